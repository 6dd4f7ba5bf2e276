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


def smooth(values: Sequence[float], *, reach: int | None = None) -> list[float]:
    """Centred moving average over `reach` rows to each side (default: 1 % of all rows).

    Centred, so that a falling curve does not lag behind as it does with an exponential average. At the start, where
    curves are steep, the window narrows evenly and stays centred; at the end it looks back only, so that the last
    value is an average too. Rows that are not finite stay so and do not enter the average.
    """
    reach = max(1, len(values) // 100) if reach is None else reach
    sums, counts = [0.0], [0]
    for value in values:
        finite = math.isfinite(value)
        sums.append(sums[-1] + (value if finite else 0.0))
        counts.append(counts[-1] + finite)
    smoothed = []
    for i, value in enumerate(values):
        low, high = max(0, i - reach), min(i + min(reach, i), len(values) - 1) + 1
        smoothed.append((sums[high] - sums[low]) / (counts[high] - counts[low]) if math.isfinite(value) else value)
    return smoothed


def _point(
    steps: Sequence[int], times: Sequence[float], values: Sequence[float], i: int
) -> tuple[int, float, float | None]:
    # Six digits are finer than any screen, and keep the page small.
    return steps[i], round(times[i], 1), float(f"{values[i]:.6g}") if math.isfinite(values[i]) else None
