"""The error of every quantity in which two runs differ.

Error of a parameter's gradient: ||split - whole|| / max(||whole||, 1e-6 * global norm). Some gradients are zero in
theory (the bias of keys, an expert nobody chose): a plain relative error would raise a false alarm there. The update's
error is of the change that all steps made to the parameter, measured likewise. NaN counts as infinite.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from modelworks.verify.observed import PARTS, Observed, Place, changes

FLOOR = 1e-6  # of the global norm: errors of smaller gradients are measured against this
ZERO = 1e-10  # of the global norm: below it a gradient is zero in theory, and its update is not compared
TINY = 1e-300


@dataclass(frozen=True)
class Differences:
    """missing: parameters on no rank. losses, gradients, norms: of each step. place: the first in the first step's
    forward pass that differs; wrong_tokens: which tokens do there, bool (rows, length)."""

    missing: list[str]
    initial: dict[str, float]
    losses: list[float]
    gradients: list[dict[str, float]]
    norms: list[float]
    updates: dict[str, float]
    copies: list[dict[str, tuple[float, int]]]
    place: Place | None
    wrong_tokens: Tensor | None

    @property
    def largest(self) -> dict[str, float]:
        """The largest error of each quantity."""
        return {
            "initial": largest(self.initial.values()),
            "loss": largest(self.losses),
            "gradient": largest(error for step in self.gradients for error in step.values()),
            "norm": largest(self.norms),
            "update": largest(self.updates.values()),
            "copies": largest(error for step in self.copies for error, _ in step.values()),
        }

    def first_gradient(self, bound: float) -> dict[str, float] | None:
        """By parameter, of the first step that has one above the bound."""
        return next((step for step in self.gradients if not largest(step.values()) <= bound), None)


def measure_differences(whole: Observed, split: Observed, bound: float) -> Differences:
    """bound: above which a place of the forward pass counts as different."""
    names = [name for name in whole.initial if name in split.initial]
    scale = max(TINY, whole.norms[0])
    ours, theirs = changes(split), changes(whole)
    moved = math.sqrt(sum(float(theirs[name].norm()) ** 2 for name in names))
    place = _first_place(whole.hidden, split.hidden, bound)
    return Differences(
        missing=sorted(set(whole.initial) - set(names)),
        initial={name: _order(float((split.initial[name] - whole.initial[name]).abs().max())) for name in names},
        losses=[_relative(a, b) for a, b in zip(split.losses, whole.losses, strict=False)],
        gradients=[
            {name: distance(a[name], b[name], FLOOR * scale) for name in names}
            for a, b in zip(split.gradients, whole.gradients, strict=False)
        ],
        norms=[_relative(a, b) for a, b in zip(split.norms, whole.norms, strict=False)],
        updates={
            name: distance(ours[name], theirs[name], max(TINY, FLOOR * moved))
            for name in names
            if is_trained(name, whole)
        },
        copies=split.copies,
        place=place,
        wrong_tokens=_wrong_tokens(place, whole.hidden, split.hidden, bound),
    )


def is_trained(name: str, whole: Observed) -> bool:
    """Adam divides a gradient by its own size: where that is rounding alone, so is the direction of the update."""
    return any(
        float(gradients[name].norm()) > ZERO * norm
        for gradients, norm in zip(whole.gradients, whole.norms, strict=True)
    )


def distance(ours: Tensor, theirs: Tensor, floor: float) -> float:
    """Relative to `theirs`, or to `floor` where that is larger."""
    return _order(float((ours - theirs).norm()) / max(float(theirs.norm()), floor))


def largest(errors: Iterable[float]) -> float:
    return max(map(_order, errors), default=0.0)


def _relative(ours: float, theirs: float) -> float:
    return _order(abs(ours - theirs) / max(abs(theirs), TINY))


def _order(error: float) -> float:
    """NaN must never pass a bound."""
    return math.inf if math.isnan(error) else error


def _first_place(whole: Mapping[Place, Tensor], split: Mapping[Place, Tensor], bound: float) -> Place | None:
    for place in sorted(whole, key=lambda place: (place[0], PARTS.index(place[1]))):
        if place not in split or not distance(split[place], whole[place], TINY) <= bound:
            return place
    return None


def _wrong_tokens(
    place: Place | None, whole: Mapping[Place, Tensor], split: Mapping[Place, Tensor], bound: float
) -> Tensor | None:
    if place is None or place not in split:
        return None
    right: Tensor = (split[place] - whole[place]).norm(dim=-1) <= bound * whole[place].norm(dim=-1).max()
    return right.logical_not()  # NaN is not right
