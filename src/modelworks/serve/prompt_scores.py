"""Log-probabilities of a prompt, kept as arrays.

A prompt of 4,000 tokens with 100 alternatives for each has 400,000 pairs. As Python's objects they would take a tenth
of a second to make and as long to send to another process, and nobody would get a token meanwhile; so they are made by
whoever looks at them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from modelworks.serve.request import TokenLogprob


class PromptScores(Sequence[TokenLogprob | None]):
    """One entry for each token of a prompt; the first has none. n_top: alternatives told with each.

    n_known: entries that were written so far, from the first on.
    """

    def __init__(self, prompt: Sequence[int], n_top: int) -> None:
        self._tokens = np.array(prompt, np.int64)
        self._logprobs = np.full(len(prompt), np.nan, np.float32)
        self._top_ids = np.zeros((len(prompt), n_top), np.int32)
        self._top_logprobs = np.full((len(prompt), n_top), np.nan, np.float32)
        self.n_top, self.n_known = n_top, 1

    def write(
        self, logprobs: NDArray[np.float32], top_ids: NDArray[np.int64], top_logprobs: NDArray[np.float32]
    ) -> None:
        """Of the next tokens: (n,), (n, n_top), (n, n_top)."""
        new = slice(self.n_known, self.n_known + len(logprobs))
        self._logprobs[new], self._top_ids[new], self._top_logprobs[new] = logprobs, top_ids, top_logprobs
        self.n_known = new.stop

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, place: int) -> TokenLogprob | None: ...
    @overload
    def __getitem__(self, place: slice) -> list[TokenLogprob | None]: ...
    def __getitem__(self, place: int | slice) -> TokenLogprob | list[TokenLogprob | None] | None:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        if place == 0:
            return None
        top = list(zip(self._top_ids[place].tolist(), self._top_logprobs[place].tolist(), strict=True))
        return TokenLogprob(int(self._tokens[place]), float(self._logprobs[place]), top)
