"""Making long series small without lying about them.

A page holds some hundreds of points a curve. Of each bucket of steps the lowest and the highest value are kept, so
that a spike of one step among 100,000 is still there. Values that are not finite are kept as gaps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Points = list[tuple[int, float, float | None]]  # step, time, value; None where it was not finite

BUCKETS = 400


def downsample(
    steps: Sequence[int], times: Sequence[float], values: Sequence[float], *, buckets: int = BUCKETS
) -> Points:
    """At most four points a bucket of consecutive rows: first gap, lowest, highest, last of the series' end."""
    count = len(steps)
    if count <= 2 * buckets:
        return [_point(steps, times, values, i) for i in range(count)]
    kept: set[int] = {0, count - 1}
    for bucket in range(buckets):
        rows = range(bucket * count // buckets, (bucket + 1) * count // buckets)
        finite = [i for i in rows if math.isfinite(values[i])]
        if finite:
            kept.add(min(finite, key=lambda i: values[i]))
            kept.add(max(finite, key=lambda i: values[i]))
        if len(finite) < len(rows):
            kept.add(next(i for i in rows if not math.isfinite(values[i])))
    return [_point(steps, times, values, i) for i in sorted(kept)]


def smooth(values: Sequence[float], *, span: float | None = None) -> list[float]:
    """Exponential moving average over about `span` rows (default: 2 % of them), without the bias of its start.

    Rows that are not finite stay so and do not enter the average.
    """
    span = max(1.0, len(values) / 50) if span is None else span
    keep = 1.0 - 1.0 / span
    total = weight = 0.0
    smoothed = []
    for value in values:
        if math.isfinite(value):
            total = keep * total + value
            weight = keep * weight + 1.0
            smoothed.append(total / weight)
        else:
            smoothed.append(value)
    return smoothed


def _point(
    steps: Sequence[int], times: Sequence[float], values: Sequence[float], i: int
) -> tuple[int, float, float | None]:
    # Six digits are finer than any screen, and keep the page small.
    return steps[i], round(times[i], 1), float(f"{values[i]:.6g}") if math.isfinite(values[i]) else None
