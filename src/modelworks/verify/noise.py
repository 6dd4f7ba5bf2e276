"""The comparison of two runs in low precision, by their distances from a float64 run."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from modelworks.verify.compare import Comparison
from modelworks.verify.differences import FLOOR, distance, largest, measure_differences
from modelworks.verify.observed import Observed, changes


def compare_noisy(truth: Observed, whole: Observed, split: Observed, factor: float = 4.0) -> Comparison:
    """Compare two runs in low precision by their distances from a float64 run.

    The errors are ratios: the split run's distance over the whole run's (or over the typical parameter's, where that
    is larger: a distance may be small by luck). Equal where none is above `factor`.
    """
    exact, noisy = (measure_differences(truth, run, factor).largest for run in (whole, split))
    errors = {"initial": noisy["initial"] / max(exact["initial"], 1e-2)}
    for quantity, least in (("loss", 1e-3), ("norm", 1e-2)):
        errors[quantity] = noisy[quantity] / max(exact[quantity], least)
    scale = max(1e-300, truth.norms[0])
    ratios = _noise_ratios(truth.gradients[0], whole.gradients[0], split.gradients[0], FLOOR * scale)
    moved = [changes(run) for run in (truth, whole, split)]
    updates = _noise_ratios(moved[0], moved[1], moved[2], 1e-300)
    errors["gradient"], errors["update"] = largest(ratios.values()), largest(updates.values())
    equal = all(error <= factor for error in errors.values())
    table = ratios if errors["gradient"] > factor or equal else updates
    worst = max(table, key=lambda name: table[name], default=None)
    suspects = [] if equal else ["precision: further from float64 than one process is (master weights, dtype of sums)"]
    return Comparison(equal, factor, errors, worst, None, None, table, suspects)


def _noise_ratios(
    truth: Mapping[str, Tensor], whole: Mapping[str, Tensor], split: Mapping[str, Tensor], floor: float
) -> dict[str, float]:
    """Parameter -> how many times as far from the truth the split run is."""
    theirs = {name: distance(whole[name], truth[name], floor) for name in truth}
    typical = sorted(theirs.values())[len(theirs) // 2]
    return {name: distance(split[name], truth[name], floor) / max(theirs[name], typical, 1e-12) for name in truth}
