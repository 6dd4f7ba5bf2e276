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
FLOOR = 1e-6  # of the global norm: below it a gradient counts as zero


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
