"""When saves are due, by a clock that the test moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from modelworks.config import FailureRate, Interval
from modelworks.parallel import single_process
from modelworks.train.pace import EveryInterval, EverySteps

RATE = FailureRate(1e5, "one failure in 27.8 h")


class Steps:
    """Steps of a run: a clock, a pace, and at which times and steps it was due and the ranks met."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, interval: float, first_step: int = 0) -> None:
        mesh = single_process(torch.device("cpu"))
        real, self.meetings = mesh.shared, 0

        def shared(value: Any) -> Any:
            self.meetings += 1
            return real(value)

        monkeypatch.setattr(mesh, "shared", shared)
        self.now, self.step, self.saves = 0.0, first_step, list[float]()
        self.pace = EveryInterval(mesh, Interval(interval, "so"), RATE, first_step, clock=lambda: self.now)

    def run(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.step += 1
            self.now += seconds
            if self.pace.is_due(self.step):
                self.saves.append(self.now)
                self.pace.began()


def test_steps() -> None:
    pace = EverySteps(3)
    assert [step for step in range(1, 10) if pace.is_due(step)] == [3, 6, 9]
    assert pace.learn(1.0, 2.0) is None


def test_saves_come_an_interval_apart_and_ranks_meet_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, interval=100.0, first_step=7)
    steps.run(1000, 1.0)
    assert steps.saves == [100.0 * count for count in range(1, 11)]
    assert steps.meetings < 100


def test_steps_longer_than_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, interval=3.0)
    steps.run(5, 10.0)
    assert steps.saves == [10.0, 20.0, 30.0, 40.0, 50.0]


def test_steps_that_become_faster_or_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faster: not early, not late. Slower: late by less than half of what was expected to be left, in steps."""
    steps = Steps(monkeypatch, interval=100.0)
    steps.run(50, 1.0)
    steps.run(2000, 0.1)
    assert steps.saves[0] == pytest.approx(100.0, abs=0.11)
    before = len(steps.saves)
    steps.run(300, 2.0)
    gaps = [b - a for a, b in zip(steps.saves[before:], steps.saves[before + 1 :], strict=False)]
    assert gaps == [100.0] * len(gaps)


def test_another_save_starts_the_interval_again(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, interval=100.0)
    steps.run(60, 1.0)
    steps.pace.began()  # the best evaluation so far, say
    steps.run(80, 1.0)
    assert steps.saves == []
    steps.run(30, 1.0)
    assert steps.saves == [160.0]


def test_what_a_save_costs_is_told_once_and_when_it_changes_much(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = Steps(monkeypatch, interval=100.0).pace
    told = pace.learn(1.0, 20.0)
    assert told is not None
    assert told.seconds == pytest.approx(447.0, abs=3.0)  # about the square root of 2 C M
    assert pace.learn(1.5, 20.0) is None
    assert pace.interval.seconds > told.seconds  # and yet it counts
    assert pace.learn(4.0, 20.0) is not None
