import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelworks.report.series import downsample, smooth

values = st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=1, max_size=300)


@given(values, st.integers(1, 50))
def test_downsampling_keeps_extremes_ends_and_gaps(numbers, buckets):
    steps = list(range(len(numbers)))
    points = downsample(steps, [float(step) for step in steps], numbers, buckets=buckets)
    finite = [value for value in numbers if math.isfinite(value)]
    kept = [value for _, _, value in points if value is not None]
    assert [step for step, _, _ in points] == sorted({step for step, _, _ in points})
    assert points[0][0] == 0
    assert points[-1][0] == steps[-1]
    assert len(points) <= max(3 * buckets + 2, 2 * buckets)
    if finite:
        assert min(kept) == pytest.approx(min(finite), rel=1e-5)
        assert max(kept) == pytest.approx(max(finite), rel=1e-5)
    assert (None in [value for _, _, value in points]) == (len(finite) < len(numbers))


@given(st.lists(st.floats(-1e3, 1e3) | st.just(math.nan), min_size=1, max_size=80), st.integers(1, 20))
def test_smoothing_is_the_mean_of_the_window(numbers, reach):
    smoothed = smooth(numbers, reach=reach)
    for i, value in enumerate(numbers):
        window = [v for v in numbers[max(0, i - reach) : i + min(reach, i) + 1] if math.isfinite(v)]
        if math.isfinite(value):
            assert smoothed[i] == pytest.approx(sum(window) / len(window), abs=1e-9)
        else:
            assert math.isnan(smoothed[i])


def test_a_straight_line_does_not_lag_at_the_start():
    line = [float(-i) for i in range(100)]
    assert smooth(line, reach=5)[:90] == pytest.approx(line[:90])
