"""When a trial counts as diverged, from made-up losses."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from modelworks.config import HealthConfig
from modelworks.train.health import Monitor
from modelworks.tune.divergence import Divergence


def judge(losses: Sequence[float]) -> tuple[int, str] | None:
    """(step, reason) of a trial with these losses and an ordinary gradient norm, its validation loss the last one."""
    divergence = Divergence(len(losses))
    monitor = Monitor(HealthConfig(spikes="warn"), warmup_steps=len(losses) // 50, grad_clip=1.0)
    for step, loss in enumerate(losses, start=1):
        if reason := divergence.add(loss, monitor.judge(step, loss, 1.0)):
            return step, reason
    return (len(losses), end) if (end := divergence.at_end(losses[-1])) else None


def falling(steps: int, salt: int, *, to: float = 5.0, noise: float = 0.1) -> list[float]:
    source = random.Random(salt)
    return [to + (10.4 - to) * math.exp(-5 * step / steps) + source.gauss(0.0, noise) for step in range(steps)]


@pytest.mark.parametrize("steps", [8, 22, 55, 400])
def test_a_loss_that_falls_or_stays_has_not_diverged(steps: int) -> None:
    for salt in range(50):
        assert judge(falling(steps, salt)) is None
        assert judge(falling(steps, salt, to=10.3)) is None  # a rate at which next to nothing is learnt


@pytest.mark.parametrize("steps", [22, 55, 400])
def test_one_spike_is_no_divergence(steps: int) -> None:
    losses = falling(steps, 0)
    losses[steps // 2] = 30.0
    assert judge(losses) is None


@pytest.mark.parametrize("steps", [22, 55, 400])
def test_a_loss_that_turns_up_stops_the_trial_early(steps: int) -> None:
    turn = steps // 3
    for salt in range(20):
        losses = falling(steps, salt)
        lowest = losses[turn]
        losses[turn:] = [lowest + 12 * (step - turn) / steps for step in range(turn, steps)]
        found = judge(losses)
        assert found is not None
        if steps > 50:  # blocks of four steps tell nothing in time
            assert found[0] <= steps * 0.9
            assert "the loss rose from" in found[1]


@pytest.mark.parametrize("steps", [22, 55, 400])
def test_a_loss_that_jumps_above_its_start_stops_the_trial_early(steps: int) -> None:
    """It never was lower than before the first update: only the start tells."""
    losses = [10.4, *(40.0 + random.Random(0).gauss(0.0, 1.0) for _ in range(steps - 1))]
    found = judge(losses)
    assert found is not None
    assert found[0] <= max(9, steps // 4)
    assert "from 10.4 to 40" in found[1]


def test_an_end_above_the_start_is_a_divergence() -> None:
    divergence = Divergence(40)
    for loss in falling(40, 1):
        assert divergence.add(loss, None) is None
    assert divergence.at_end(5.0) is None
    assert "the first loss was" in str(divergence.at_end(20.0))
    assert divergence.at_end(math.nan) is not None
