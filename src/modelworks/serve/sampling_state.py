"""What sampling remembers of one sequence: counted tokens, forbidden words, a place in its stream of draws.

It grows by `accept`, one token at a time, at a cost that does not grow with the sequence, and is copied by `fork`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from modelworks.models import draw_key
from modelworks.serve.params import SamplingParams

if TYPE_CHECKING:
    from modelworks.serve.structured import Constraint


class SamplingState:
    """Of one running sequence. Made by `Sampler.start`, copied for another branch of its request by `fork`.

    position: of the next token in the sequence, from 0. n_output: tokens accepted. error: one line, once something of
    this sequence went wrong; it then gets no more tokens.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        seed: int,
        branch: int,
        *,
        end_ids: Collection[int],
        bad_words: Collection[tuple[int, ...]],
        allowed: NDArray[np.int32] | None,
        constraint: Constraint | None,
    ) -> None:
        self.params, self.allowed, self.constraint = params, allowed, constraint
        self.position, self.n_output = len(prompt_ids), 0
        self.error: str | None = None
        self._seed, self.key = seed, draw_key(seed, branch)
        self.draws: list[float] = []  # of the positions from `first_draw` on
        self.first_draw = 0
        self._end_ids = np.fromiter(end_ids, np.int64, len(end_ids))
        self._bad_words = BadWords(bad_words, prompt_ids) if bad_words else None
        penalised = params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
        self.counts = TokenCounts(prompt_ids if params.repetition_penalty != 1.0 else ()) if penalised else None
        self.filters = (params.temperature, params.top_k or 0, params.top_p, params.min_p, params.typical_p)
        self.bias_ids = np.fromiter(params.logit_bias, np.int64, len(params.logit_bias))
        self.bias = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))

    def accept(self, token: int) -> None:
        """`token` is the sequence's next. Does not raise: what goes wrong is kept in `error`."""
        self.position += 1
        self.n_output += 1
        if self.counts is not None:
            self.counts.add(token)
        if self._bad_words is not None:
            self._bad_words.accept(token)
        if self.constraint is not None and self.error is None:
            self.error = self.constraint.accept(token)

    def fork(self, branch: int) -> SamplingState:
        """The same sequence so far, going on by itself as result number `branch` of its request."""
        copy = SamplingState.__new__(SamplingState)
        copy.__dict__.update(self.__dict__)
        copy.key, copy.draws = draw_key(self._seed, branch), []
        copy.counts = self.counts and self.counts.copy()
        copy._bad_words = self._bad_words and self._bad_words.copy()
        copy.constraint = self.constraint and self.constraint.fork()
        return copy

    @property
    def waits_for_min_tokens(self) -> bool:
        """Whether no token may end the sequence yet."""
        return self.n_output < self.params.min_tokens and len(self._end_ids) > 0

    @property
    def bans(self) -> bool:
        """Whether `forbidden` may have anything."""
        return self._bad_words is not None or self.waits_for_min_tokens

    @property
    def edits(self) -> bool:
        """Whether its next logits may be changed before a token is chosen."""
        lists = self.constraint is not None or self.allowed is not None
        return lists or self.counts is not None or len(self.bias_ids) > 0 or self.bans

    def only_ends(self, mask: NDArray[np.int32]) -> bool:
        """Whether the mask (bits, 32 a word) allows nothing but tokens that end the sequence."""
        rest = mask.copy()
        for token in self._end_ids.tolist():
            rest[token // 32] &= np.int32(~(1 << token % 32) if token % 32 < 31 else 0x7FFFFFFF)
        return not rest.any()

    def forbidden(self, *, may_end: bool) -> list[NDArray[np.int64]]:
        """Token ids that must not come next; those that end the sequence among them, unless it may end."""
        found = [] if may_end else [self._end_ids]
        if self._bad_words is not None:
            found.append(self._bad_words.next())
        return found


class TokenCounts:
    """Distinct tokens of a sequence and how often each is in its output, as arrays that grow."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        distinct = dict.fromkeys(prompt_ids)
        self._places = {token: place for place, token in enumerate(distinct)}
        self._ids = np.fromiter(distinct, np.int64, len(distinct))
        self._times = np.zeros(len(distinct), np.float32)

    def add(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            room = max(place, 64)
            self._ids = np.concatenate((self._ids, np.zeros(room, np.int64)))
            self._times = np.concatenate((self._times, np.zeros(room, np.float32)))
        self._ids[place] = token
        self._times[place] += 1

    @property
    def ids(self) -> NDArray[np.int64]:
        """int64 (distinct,), a view."""
        return self._ids[: len(self._places)]

    @property
    def times(self) -> NDArray[np.float32]:
        """float32 (distinct,), a view: 0 for a token of the prompt alone."""
        return self._times[: len(self._places)]

    def copy(self) -> TokenCounts:
        copy = TokenCounts(())
        copy._places, copy._ids, copy._times = dict(self._places), self._ids.copy(), self._times.copy()
        return copy


class BadWords:
    """Words as sequences of tokens. A word's last token is forbidden where its others are the end of prompt + output,
    as transformers' `NoBadWordsLogitsProcessor` does."""

    def __init__(self, words: Collection[tuple[int, ...]], prompt_ids: Sequence[int]) -> None:
        single = {word[0] for word in words if len(word) == 1}
        self._single = np.fromiter(single, np.int64, len(single))
        self._by_last: dict[int, list[tuple[list[int], int]]] = {}  # the token before the last -> the words
        for word in words:
            if len(word) > 1:
                self._by_last.setdefault(word[-2], []).append((list(word[:-1]), word[-1]))
        self._longest = max(map(len, words)) - 1
        self._tail = list(prompt_ids[-self._longest :]) if self._longest else []

    def accept(self, token: int) -> None:
        if self._longest:
            self._tail.append(token)
            del self._tail[: -self._longest]

    def next(self) -> NDArray[np.int64]:
        """Tokens that would complete a word."""
        words = self._by_last.get(self._tail[-1], ()) if self._tail else ()
        found = [last for before, last in words if self._tail[-len(before) :] == before]
        return np.concatenate((self._single, np.array(found, np.int64))) if found else self._single

    def copy(self) -> BadWords:
        copy = BadWords.__new__(BadWords)
        copy.__dict__.update(self.__dict__)
        copy._tail = list(self._tail)
        return copy
