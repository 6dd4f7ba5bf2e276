"""The save interval against brute force: the model's minimum over a grid, and a simulation of failures."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelworks.config.save_interval import (
    LONGEST,
    FailureRate,
    assumed_seconds,
    best_interval,
    daly_interval,
    expected_slowdown,
    failure_rate,
)

COSTS = st.floats(1e-3, 1e3)
MEANS = st.floats(10.0, 1e8)


@given(cost=COSTS, mean=MEANS)
def test_no_interval_of_a_fine_grid_loses_noticeably_less_time(cost: float, mean: float) -> None:
    """Daly gives a relative error of the total time below 0.2 % up to costs of half the time between failures."""
    if cost > mean / 2:
        return
    ours = expected_slowdown(daly_interval(cost, mean), cost, mean)
    grid = [daly_interval(cost, mean) * 1.02**power for power in range(-120, 121)]
    best = min(expected_slowdown(interval, cost, mean) for interval in grid)
    assert ours <= best * 1.002


@given(cost=COSTS, mean=MEANS)
def test_it_improves_on_young_or_equals_it(cost: float, mean: float) -> None:
    if cost > mean / 2:
        return
    young = expected_slowdown(math.sqrt(2 * cost * mean), cost, mean)
    assert expected_slowdown(daly_interval(cost, mean), cost, mean) <= young * (1 + 1e-9)


@pytest.mark.parametrize(("mean", "published"), [(24 * 60.0, 117.0), (6 * 60.0, 57.0), (15.0, 9.1)])
def test_the_figures_that_the_paper_gives(mean: float, published: float) -> None:
    """Minutes, for saves of five minutes: figures 3 to 5 of Daly (2006)."""
    assert daly_interval(5.0, mean) == pytest.approx(published, rel=0.02)


def test_a_save_that_takes_longer_than_failures_are_apart() -> None:
    assert daly_interval(25.0, 10.0) == 10.0
    assert daly_interval(0.0, 10.0) == 0.0


@pytest.mark.parametrize(("interval", "cost", "mean"), [(30.0, 2.0, 100.0), (5.0, 1.0, 20.0)])
def test_the_model_is_what_a_simulation_takes(interval: float, cost: float, mean: float) -> None:
    """Work in pieces, each followed by a save; a failure takes the run back to the last save."""
    source = random.Random(0)
    pieces, clock = 40_000, 0.0
    until_failure = source.expovariate(1 / mean)
    for _ in range(pieces):
        while until_failure < interval + cost:
            clock += until_failure
            until_failure = source.expovariate(1 / mean)
        clock += interval + cost
        until_failure -= interval + cost
    assert clock / (pieces * interval) == pytest.approx(expected_slowdown(interval, cost, mean), rel=0.01)


def test_published_failures_scale_with_devices() -> None:
    one, large = failure_rate(1), failure_rate(16_384)
    assert large.seconds == pytest.approx(54 * 86_400 / 419)  # about three hours
    assert one.seconds == pytest.approx(16_384 * large.seconds)
    assert "arXiv:2407.21783" in large.reason
    assert "16,384 devices" in large.reason
    assert failure_rate(8, hours=5.0) == FailureRate(18_000.0, "one failure in 5 h (as configured)")


def test_bounds() -> None:
    rate = FailureRate(1e4, "one failure in 2.78 h")
    plain = best_interval(2.0, 20.0, rate)
    assert plain.seconds == daly_interval(2.0, 1e4)
    assert (
        plain.reason == "a save stops training for 2 s (measured), one failure in 2.78 h: Daly's interval is 3.31 min"
    )
    slow = best_interval(2.0, 500.0, rate)
    assert slow.seconds == 500.0
    assert slow.reason.endswith("but a save takes 8.33 min to be written")
    rare = best_interval(2.0, 20.0, FailureRate(1e9, "never"), measured=False)
    assert rare.seconds == LONGEST
    assert "(estimated)" in rare.reason
    assert rare.reason.endswith("but never more than 30 min of work is at stake")
    assert best_interval(0.0, 0.0, rate).seconds == 0.0
    assert best_interval(1.0, 4000.0, FailureRate(1e9, "never")).seconds == 4000.0


def test_an_estimate_before_anything_was_measured() -> None:
    assert assumed_seconds(10**9) == pytest.approx(5.0)
