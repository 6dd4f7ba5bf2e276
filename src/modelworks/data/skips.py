"""`Skips`: spans of the data that a run leaves out, because it went back to an earlier step instead of learning them.

Going back to the state after step `good` and on with other data, the samples `first` to `end` are passed over: the
batch after `good` begins at `end`. So the data stays a function of (seed, step) and of the skips, whatever is repeated
or resumed. A later skip that goes back behind an earlier one takes its place: its span holds the earlier one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any


@dataclass(frozen=True)
class Skip:
    """spike: the step (from 1) that was the reason. good: steps that were kept. first, end: samples of the whole order
    of data that are left out: `first` follows those of the last good step, `end` is the next to be trained on."""

    spike: int
    good: int
    first: int
    end: int

    def __post_init__(self) -> None:
        if any(type(number) is not int for number in astuple(self)):
            raise TypeError("not a whole number")
        if not 0 <= self.good < self.spike or not 0 <= self.first < self.end:
            raise ValueError("a skip goes back, and leaves something out")


class Skips:
    """history: all that were made, in that order; some may have given way to later ones."""

    def __init__(self, history: Sequence[Skip] = ()) -> None:
        self.history: list[Skip] = []
        self._active: list[Skip] = []
        for skip in history:
            self.add(skip)

    def add(self, skip: Skip) -> None:
        self.history.append(skip)
        self._active = [*(earlier for earlier in self._active if earlier.good < skip.good), skip]

    def before(self, step: int) -> int:
        """Samples left out before the batch that follows `step` steps."""
        return sum(skip.end - skip.first for skip in self._active if skip.good <= step)

    def within(self, step: int) -> list[tuple[int, int]]:
        """Spans (first, end) left out between the batches of the first `step` steps."""
        return [(skip.first, skip.end) for skip in self._active if skip.good < step]

    def state(self) -> list[list[int]]:
        """For a checkpoint."""
        return [list(astuple(skip)) for skip in self.history]

    def load_state(self, state: Any) -> None:
        """Raises TypeError or ValueError for what is none."""
        read = Skips([Skip(*row) for row in state])
        self.history, self._active = read.history, read._active
