"""Stopping politely: SIGTERM and SIGINT let the step finish and the state be saved.

The first signal asks, and the run ends with exit code 75: preempted, resume me. A second SIGINT (Ctrl-C again) stops
at once; the last complete checkpoint is then what is left.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether the run was asked to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._terminated: float | None = None  # when, of `time.monotonic`, the first SIGTERM came

    @property
    def requested(self) -> bool:
        return self.signal is not None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGTERM and self._terminated is None:
            self._terminated = time.monotonic()
        if not self.requested:
            self.signal = signal.Signals(number)

    def deadline(self, grace: float) -> float | None:
        """When, of `time.monotonic`, this process may be killed: `grace` seconds after SIGTERM, also where Ctrl-C came
        before it. None while there was only Ctrl-C."""
        return None if self._terminated is None else self._terminated + grace


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Catch SIGTERM and SIGINT for the length of the block. Only in the main thread, as Python demands."""
    request = StopRequest()
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, request) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
