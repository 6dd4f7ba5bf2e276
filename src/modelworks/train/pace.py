"""When the next save is due: every so many steps, or under `checkpoint.every: auto` after so much time.

Time passes differently on every rank, so rank 0's clock decides, and the others are told. They are not asked at every
step: whenever the ranks meet, rank 0 also says at which step they meet again, about half way to when it expects the
save to be due. All ranks call these methods at the same steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from modelworks.config import FailureRate, Interval, best_interval
from modelworks.parallel import Mesh

_CLOSE = 8  # steps before the expected one, from where on the ranks meet at that step itself
_MUCH = 1.5  # an interval that changes by less is not worth a line


class Pace(Protocol):
    def is_due(self, step: int) -> bool:
        """Whether to save after this step. All ranks get the same answer; asked once a step."""

    def began(self) -> None:
        """A save began, whatever it was for."""

    def went_back(self, step: int) -> None:
        """The run goes on from an earlier step."""

    def learn(self, stall: float, write: float) -> Interval | None:
        """What a save has cost, in seconds (`best_interval`); a new interval where it is worth telling."""


class EverySteps:
    """At multiples of `every`."""

    def __init__(self, every: int) -> None:
        self.every = every

    def is_due(self, step: int) -> bool:
        return step % self.every == 0

    def began(self) -> None:
        pass

    def went_back(self, step: int) -> None:
        pass

    def learn(self, stall: float, write: float) -> Interval | None:
        return None


class EveryInterval:
    """After the interval that loses the least time, as far as it is known.

    first: the interval until a save has been measured. rate: how often the job fails. clock: seconds.
    """

    def __init__(
        self, mesh: Mesh, first: Interval, rate: FailureRate, step: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.interval = first
        self._mesh, self._rate, self._clock = mesh, rate, clock
        self._told: Interval | None = None
        self._last_save = self._last_meeting = clock()
        self._met_at = step
        self._next_meeting = step + 1  # from one step on, their length is known

    def is_due(self, step: int) -> bool:
        if step < self._next_meeting:
            return False
        due, self._next_meeting = self._mesh.shared(self._decide(step) if self._mesh.is_main else None)
        return bool(due)

    def began(self) -> None:
        self._last_save = self._clock()

    def went_back(self, step: int) -> None:
        self._last_meeting = self._clock()
        self._met_at, self._next_meeting = step, step + 1

    def learn(self, stall: float, write: float) -> Interval | None:
        self.interval = best_interval(stall, write, self._rate)
        if self._told is not None and not _differ(self._told.seconds, self.interval.seconds):
            return None
        self._told = self.interval
        return self.interval

    def _decide(self, step: int) -> tuple[bool, int]:
        """Whether a save is due, and the step of the next meeting."""
        now = self._clock()
        seconds = (now - self._last_meeting) / max(1, step - self._met_at)
        self._last_meeting, self._met_at = now, step
        left = self._last_save + self.interval.seconds - now
        due = left < seconds / 2  # rather now than after the next step
        if due:
            left = self.interval.seconds
        ahead = max(1, min(int(left / seconds), 1_000_000) if seconds > 0 else 1)
        return due, step + (ahead if ahead <= _CLOSE else ahead // 2)


def _differ(before: float, after: float) -> bool:
    return not before / _MUCH <= after <= before * _MUCH
