"""Whether the learned correction helps: step times with and without it, on rows that it has not seen.

Two kinds of leaving out. By source is the question that a new cluster or program asks. By model inside the sources (all
runs of one model are left out together, those of other models of the same source stay) is what somebody asks who has
measured other models on the same cluster. Rows left out at random would be flattering: neighbours in a table are
near-duplicates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelworks.plan import Work
from modelworks.plan.correction import FEWEST_ROWS, fit_correction

Array = NDArray[np.float64]


def accuracy(
    part: Callable[[NDArray[np.bool_]], Work],
    predicted: Array,
    measured: Array,
    sources: Sequence[str],
    models: Sequence[str],
) -> dict[str, Any]:
    """Mean and median errors without and with, over all rows and over those that were in range; printed too.

    part: the rows of a mask as columns. sources, models: of each row.
    """
    result = {}
    by_model = [f"{source} {model}" for source, model in zip(sources, models, strict=True)]
    for name, groups in (("source", list(sources)), ("model", by_model)):
        corrected, applied = _left_out(part, predicted, measured, np.array(groups), np.array(sources))
        without, with_ = (np.abs(seconds / measured - 1.0) for seconds in (predicted, corrected))
        scores: dict[str, Any] = {
            "rows": len(measured),
            "in_range": int(applied.sum()),
            "without": _score(without),
            "with": _score(with_),
            "without_in_range": _score(without[applied]),
            "with_in_range": _score(with_[applied]),
            "by_source": {},
        }
        for each in dict.fromkeys(sources):
            here = np.array(sources) == each
            scores["by_source"][each] = {
                "in_range": int(applied[here].sum()),
                "without": _score(without[here]),
                "with": _score(with_[here]),
            }
        result[name] = scores
        print(f"\nlearned correction, each {name} left out: in range {applied.sum()} of {len(applied)} rows")
        for label in ("", "_in_range"):
            before, after = scores[f"without{label}"], scores[f"with{label}"]
            if not before:
                continue
            print(
                f"  {'in range' if label else 'all rows':9} mean {before['mean_ape']:6.1%} -> {after['mean_ape']:6.1%}"
                f"   median {before['median_ape']:6.1%} -> {after['median_ape']:6.1%}"
            )
    return result


def _left_out(
    part: Callable[[NDArray[np.bool_]], Work],
    predicted: Array,
    measured: Array,
    groups: NDArray[Any],
    sources: NDArray[Any],
) -> tuple[Array, NDArray[np.bool_]]:
    """Each group with what the others teach; as predicted where these are too few."""
    seconds, applied = predicted.copy(), np.zeros(len(measured), dtype=bool)
    for group in dict.fromkeys(groups.tolist()):
        mask = groups == group
        if (~mask).sum() < FEWEST_ROWS:
            continue
        correction = fit_correction(part(~mask), measured[~mask], sources[~mask].tolist())
        found = correction(part(mask))
        seconds[mask], applied[mask] = found.seconds, found.applied
    return seconds, applied


def _score(errors: Array) -> dict[str, float]:
    return {"mean_ape": float(errors.mean()), "median_ape": float(np.median(errors))} if len(errors) else {}
