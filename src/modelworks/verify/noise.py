"""The comparison of two runs in low precision, by their distances from a float64 run: what float64 cannot show.

Both runs are noisy, and alike: of 64 micro-batches' gradients, the split run's distance from the truth is the whole
run's within a few percent, at the median over parameters. So the bounds are

    initial            0        values are rounded once, wherever they are made
    copies             0        what ranks hold twice is the same to the bit
    loss, norm         0.1%, 2% relative error; rounding is about 0.001% and 0.1%
    gradient           4        times the whole run's distance, of the worst parameter
    typical gradient   1.25     the same, of the median: about 1; sums over the micro-batches in bf16 give 1.4
    update             0.6      relative error, of all parameters of a kind together

Updates are made with a rate far below what a weight in bf16 can show: where they are not kept in float32 (master
weights) they are lost, an error of 1. AdamW divides a gradient by its size, so that rounding turns some near zero
round, which is nearly all of the update's error otherwise: about 0.05, up to 0.3 for kinds with few elements.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

from torch import Tensor

from modelworks.config import RunConfig
from modelworks.layout import placement
from modelworks.verify.compare import Comparison
from modelworks.verify.differences import TINY, distance, largest, measure_differences
from modelworks.verify.observed import Observed, changes

BOUNDS = {
    "initial": 0.0,
    "loss": 1e-3,
    "gradient": 4.0,
    "typical gradient": 1.25,
    "norm": 2e-2,
    "update": 0.6,
    "copies": 0.0,
}
MICRO_BATCHES = 64  # of each data-parallel rank: enough for the dtype of sums to show
LEARNING_RATE = 1e-5  # of a weight of 0.02, a tenth of what bf16 can show
_NOISE = 1e-4  # of the global norm: smaller gradients are rounding, not compared


def noisy_run(small: RunConfig) -> RunConfig:
    """The run for this comparison, of one that `shrink` has made."""
    ranks = small.parallel.dp_replicate * small.parallel.dp_shard
    train = small.with_batch(MICRO_BATCHES * ranks).train
    optimizer = small.optimizer.model_copy(update={"lr": LEARNING_RATE})
    return small.model_copy(update={"train": train, "optimizer": optimizer})


def compare_noisy(truth: Observed, whole: Observed, split: Observed) -> Comparison:
    """truth: in float64; whole, split: in low precision. by_parameter: gradients' ratios."""
    found, from_truth = measure_differences(whole, split, math.inf), measure_differences(truth, split, math.inf)
    ratios = _noise_ratios(truth, whole, split)
    updates = _by_kind(changes(truth), changes(split), list(ratios))
    errors = {
        "initial": found.largest["initial"],
        "loss": largest(from_truth.losses),
        "gradient": largest(ratios.values()),
        "typical gradient": statistics.median(ratios.values()),
        "norm": largest(from_truth.norms),
        "update": largest(updates.values()),
        "copies": found.largest["copies"],
    }
    complete = not found.missing and len(split.losses) == len(whole.losses)
    equal = complete and all(error <= BOUNDS[quantity] for quantity, error in errors.items())
    worst = found.missing[0] if found.missing else max(ratios, key=lambda name: ratios[name], default=None)
    suspects = [] if equal else _suspects(errors, updates, split.norms[0] / max(TINY, truth.norms[0]))
    return Comparison(equal, BOUNDS, errors, worst, None, None, ratios, suspects)


def _noise_ratios(truth: Observed, whole: Observed, split: Observed) -> dict[str, float]:
    """Parameter -> how many times as far from the truth the split run's gradient of the first step is. Against the
    typical parameter's distance where that is larger: one may be small by luck."""
    true, scale = truth.gradients[0], truth.norms[0]
    names = [name for name in true if name in split.gradients[0] and float(true[name].norm()) > _NOISE * scale]
    theirs = {name: distance(whole.gradients[0][name], true[name], TINY) for name in names}
    ours = {name: distance(split.gradients[0][name], true[name], TINY) for name in names}
    typical = statistics.median(theirs.values())
    return {name: ours[name] / max(theirs[name], typical, TINY) for name in names}


def _by_kind(true: Mapping[str, Tensor], ours: Mapping[str, Tensor], names: list[str]) -> dict[str, float]:
    """How parameters are cut -> relative error of the updates of all of that kind."""
    errors: dict[str, float] = {}
    for kind in dict.fromkeys(placement(name) for name in names):
        same = [name for name in names if placement(name) == kind]
        error = sum(float((ours[name] - true[name]).square().sum()) for name in same)
        errors[kind] = math.sqrt(error / max(TINY, sum(float(true[name].square().sum()) for name in same)))
    return errors


def _suspects(errors: Mapping[str, float], updates: Mapping[str, float], norm: float) -> list[str]:
    wrong = {quantity for quantity, error in errors.items() if not error <= BOUNDS[quantity]}
    found = []
    if "initial" in wrong:
        found.append("initialisation: values are rounded otherwise than in one process")
    if "norm" in wrong:
        found.append(f"loss scale: the gradient norm is {norm:.4g} times the right one (a scale that is not undone?)")
    if wrong & {"gradient", "typical gradient"}:
        found.append(
            "gradients: further from float64 than one process is: the dtype of sums over micro-batches or ranks"
        )
    if "update" in wrong:
        lost = ", ".join(kind for kind, error in updates.items() if not error <= BOUNDS["update"])
        found.append(f"update: updates of {lost} weights are lost or wrong: master weights, dtype of optimiser state")
    if "copies" in wrong:
        found.append("update: ranks that hold the same weights differ")
    if "loss" in wrong:
        found.append("loss: further from float64 than rounding explains")
    return found or ["run: the split run ended early or lacks parameters"]
