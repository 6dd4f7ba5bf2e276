"""`SampleOrder`: global sample index to a place in a source's token stream.

A sample is a window of seq_len + 1 tokens: seq_len inputs, and the same moved by one as targets. Windows lie
seq_len apart, so that every token but a stream's first is a target once a pass. The tail that fills no window is
left out, at most seq_len tokens a source.

The mixture says which source a sample comes from and its place t among that source's samples. Pass t // n over the
source's n windows takes them in the order of a permutation of its own: window = permutation(seed, source, pass)(t % n).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from modelworks.config import UserError
from modelworks.data.mixture import Mixture
from modelworks.data.permutation import permute


@dataclass(frozen=True)
class Windows:
    """How a stream of `tokens` tokens is cut."""

    tokens: int
    seq_len: int

    @property
    def count(self) -> int:
        return max(0, (self.tokens - 1) // self.seq_len)

    @property
    def left_out(self) -> int:
        """Tokens at the end that are in no window."""
        return self.tokens - self.count * self.seq_len - 1 if self.count else self.tokens


class SampleOrder:
    """Pure functions of (seed, sample index). windows: of each source, in the mixture's order."""

    def __init__(self, mixture: Mixture, windows: Sequence[Windows], *, seed: int, shuffle: bool) -> None:
        self.mixture, self.windows = mixture, tuple(windows)
        self._seed, self._shuffle = seed, shuffle
        for name, cut in zip(mixture.names, self.windows, strict=True):
            if not cut.count:
                raise UserError(
                    f"source `{name}`: {cut.tokens} training tokens do not fill one sample of "
                    f"{cut.seq_len + 1}: lower data.seq_len or add text"
                )

    def places(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each sample its source's number and the first token of its window. int64, same length."""
        sources, cursors = self.mixture.draw(samples)
        starts = np.empty_like(cursors)
        for source in np.unique(sources):
            here = sources == source
            starts[here] = self._window(int(source), cursors[here]) * self.windows[source].seq_len
        return sources, starts

    def _window(self, source: int, cursors: NDArray[np.int64]) -> NDArray[np.int64]:
        count = self.windows[source].count
        passes, places = np.divmod(cursors, count)
        if not self._shuffle:
            return places
        for number in np.unique(passes):
            here = passes == number
            key = f"{self._seed}/{self.mixture.names[source]}/{number}"
            places[here] = permute(places[here], count, key)
        return places
