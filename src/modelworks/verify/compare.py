"""The comparison: errors of every quantity, a verdict by a stated bound, and the name of the suspect.

Error of a parameter's gradient: ||split - whole|| / max(||whole||, 1e-6 * global norm). Some gradients are zero in
theory (the bias of keys, an expert nobody chose): a plain relative error would raise a false alarm there. The update's
error is of the change that the steps made to the parameter, measured likewise. In float64 rounding is about 1e-15 and
a bug rarely below 1e-6, so a bound of 1e-10 parts them with orders of magnitude to spare on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from modelworks.config import ParallelConfig
from modelworks.verify.observed import Observed
from modelworks.verify.suspects import name_suspects

BOUND_FLOAT64 = 1e-10
FLOOR = 1e-6  # of the global norm: errors of smaller gradients are measured against this
ZERO = 1e-10  # of the global norm: below it a gradient is zero in theory, and its update is not compared


@dataclass(frozen=True)
class Comparison:
    """The largest error of each quantity, and where. suspects: what to look at, most telling first; empty when equal.

    first_layer: the first whose output differs, -1 for the embedding, None where all agree.
    """

    equal: bool
    bound: float
    errors: dict[str, float]  # initial, loss, gradient, norm, update
    worst_parameter: str | None
    first_layer: int | None
    by_parameter: dict[str, float]
    suspects: list[str]


def compare(whole: Observed, split: Observed, parallel: ParallelConfig, bound: float = BOUND_FLOAT64) -> Comparison:
    """Compare the split run with the whole one."""
    missing = sorted(set(whole.initial) - set(split.initial))
    names = [name for name in whole.initial if name in split.initial]
    scale = max(1e-300, whole.norms[0])
    initial = {name: float((split.initial[name] - whole.initial[name]).abs().max()) for name in names}
    gradient = {
        name: max(
            _error(ours[name], theirs[name], FLOOR * scale)
            for ours, theirs in zip(split.gradients, whole.gradients, strict=True)
        )
        for name in names
    }
    moved = math.sqrt(sum(float((whole.final[n] - whole.initial[n]).norm()) ** 2 for n in names))
    update = {
        name: _error(
            split.final[name] - split.initial[name], whole.final[name] - whole.initial[name], max(1e-300, FLOOR * moved)
        )
        for name in names
        if _is_trained(name, whole)
    }
    errors = {
        "initial": _largest(initial.values()),
        "loss": _largest(_relative(a, b) for a, b in zip(split.losses, whole.losses, strict=True)),
        "gradient": _largest(gradient.values()),
        "norm": _largest(_relative(a, b) for a, b in zip(split.norms, whole.norms, strict=True)),
        "update": _largest(update.values()),
    }
    wrong = missing or not all(error <= bound for error in errors.values())
    table = gradient if errors["gradient"] > bound or not wrong else update
    worst = missing[0] if missing else max(table, key=lambda name: _order(table[name]), default=None)
    layer = _first_layer(whole.hidden, split.hidden, bound)
    suspects = name_suspects(whole, split, parallel, errors, gradient, missing, layer, bound) if wrong else []
    return Comparison(not wrong, bound, errors, worst, layer, table, suspects)


def _is_trained(name: str, whole: Observed) -> bool:
    """Adam divides a gradient by its own size: where that is rounding alone, so is the direction of the update."""
    return any(
        float(gradients[name].norm()) > ZERO * norm
        for gradients, norm in zip(whole.gradients, whole.norms, strict=True)
    )


def _error(ours: Tensor, theirs: Tensor, floor: float) -> float:
    return float((ours - theirs).norm()) / max(float(theirs.norm()), floor)


def _relative(ours: float, theirs: float) -> float:
    return abs(ours - theirs) / max(abs(theirs), 1e-300)


def _largest(errors: object) -> float:
    """The largest, with NaN counting as infinite: a NaN must never pass a bound."""
    return max((_order(error) for error in errors), default=0.0)  # type: ignore[attr-defined]


def _order(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _first_layer(whole: Mapping[int, Tensor], split: Mapping[int, Tensor], bound: float) -> int | None:
    for layer in sorted(whole):
        if layer not in split or _order(_error(split[layer], whole[layer], 1e-300)) > bound:
            return layer
    return None


def compare_noisy(
    truth: Observed, whole: Observed, split: Observed, parallel: ParallelConfig, factor: float = 4.0
) -> Comparison:
    """Compare two runs in low precision by their distances from a float64 run.

    The errors are ratios: the split run's distance over the whole run's (or over the typical parameter's, where that
    is larger: a distance may be small by luck). Equal where none is above `factor`.
    """
    exact, noisy = compare(truth, whole, parallel, factor), compare(truth, split, parallel, factor)
    errors = {"initial": noisy.errors["initial"] / max(exact.errors["initial"], 1e-2)}
    for quantity, least in (("loss", 1e-3), ("norm", 1e-2)):
        errors[quantity] = noisy.errors[quantity] / max(exact.errors[quantity], least)
    scale = max(1e-300, truth.norms[0])
    ratios = _noise_ratios(truth.gradients[0], whole.gradients[0], split.gradients[0], FLOOR * scale)
    moved = [{n: run.final[n] - run.initial[n] for n in truth.initial} for run in (truth, whole, split)]
    updates = _noise_ratios(moved[0], moved[1], moved[2], 1e-300)
    errors["gradient"], errors["update"] = _largest(ratios.values()), _largest(updates.values())
    equal = all(error <= factor for error in errors.values())
    table = ratios if errors["gradient"] > factor or equal else updates
    worst = max(table, key=lambda name: _order(table[name]), default=None)
    suspects = [] if equal else ["precision: further from float64 than one process is (master weights, dtype of sums)"]
    return Comparison(equal, factor, errors, worst, None, table, suspects)


def _noise_ratios(
    truth: Mapping[str, Tensor], whole: Mapping[str, Tensor], split: Mapping[str, Tensor], floor: float
) -> dict[str, float]:
    """Parameter -> how many times as far from the truth the split run is."""
    theirs = {name: _error(whole[name], truth[name], floor) for name in truth}
    typical = sorted(theirs.values())[len(theirs) // 2]
    return {name: _error(split[name], truth[name], floor) / max(theirs[name], typical, 1e-12) for name in truth}
