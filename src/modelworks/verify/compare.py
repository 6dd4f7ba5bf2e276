"""The comparison of two runs in float64: a verdict by a stated bound, and the name of the suspect.

In float64 rounding is about 1e-15 and a bug rarely below 1e-6, so a bound of 1e-10 parts them with orders of magnitude
to spare on both sides. What is measured, and against what, is in `modelworks.verify.differences`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from modelworks.config import RunConfig
from modelworks.verify.differences import measure_differences
from modelworks.verify.observed import Observed
from modelworks.verify.suspects import name_suspects

BOUND_FLOAT64 = 1e-10


@dataclass(frozen=True)
class Comparison:
    """errors: the largest of each quantity (initial, loss, gradient, norm, update, copies); bounds: of the same.
    by_parameter: of the gradients of the first step in which one differs, or of updates where only those do;
    worst_parameter: the largest. suspects: what to look at, most telling first; empty when equal.

    first_layer, first_part: the first place of the forward pass that differs (`input`, `attention`, `feed_forward` or
    `output` of a layer); None where all agree.
    """

    equal: bool
    bounds: dict[str, float]
    errors: dict[str, float]
    worst_parameter: str | None
    first_layer: int | None
    first_part: str | None
    by_parameter: dict[str, float]
    suspects: list[str]


def compare(whole: Observed, split: Observed, config: RunConfig, bound: float = BOUND_FLOAT64) -> Comparison:
    """Compare the split run with the whole one. config: of both."""
    found = measure_differences(whole, split, bound)
    errors = found.largest
    finite = all(map(math.isfinite, whole.losses + whole.norms))
    equal = (
        finite
        and not found.missing
        and len(split.losses) == len(whole.losses)
        and all(error <= bound for error in errors.values())
        and found.place is None
    )
    table = found.first_gradient(bound) or (found.updates if not errors["update"] <= bound else found.gradients[0])
    worst = found.missing[0] if found.missing else max(table, key=lambda name: table[name], default=None)
    layer, part = found.place or (None, None)
    suspects = [] if equal else name_suspects(whole, split, config, found, bound)
    return Comparison(equal, dict.fromkeys(errors, bound), errors, worst, layer, part, table, suspects)
