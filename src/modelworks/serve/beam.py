"""Beam search over log-probabilities that somebody else computes: which beams go on, which are finished, when to end.

Of all continuations of `width` beams by one token, the best by summed log-probability are looked at. Those among the
first `width` that end are finished, and kept if their score, the sum over length ** length_penalty, is among the
`width` best; the best `width` that do not end go on. The search ends when `width` are finished and either
`early_stopping` is set or no running beam could still beat the worst of them at its present length, or when the longest
length is reached. These are the rules of transformers' `generate(num_beams=width)`, so that equal settings mean the
same there and here. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from modelworks.serve.request import FinishReason, TokenLogprob

if TYPE_CHECKING:
    from modelworks.serve.text import CompletionText

Candidate = tuple[int, float]  # a token and its log-probability
Ending = tuple[FinishReason, int | str | None]  # and what was met


@dataclass
class Beam:
    """Tokens so far, without the prompt, and their summed log-probability. logprobs: of each, if they are wanted. text:
    theirs, where that may end a beam."""

    tokens: list[int] = field(default_factory=list)
    logprob: float = 0.0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ending: Ending | None = None
    score: float = 0.0  # once it has ended
    text: CompletionText | None = None


class BeamSearch:
    """ends: whether a beam ends with this token, given the text before it, which it continues; not asked about length.
    longest: tokens at most. text: before the first token; None where no text is looked at."""

    def __init__(
        self,
        width: int,
        *,
        longest: int,
        ends: Callable[[int, CompletionText | None], Ending | None],
        text: CompletionText | None = None,
        length_penalty: float = 1.0,
        early_stopping: bool = False,
        n_top: int | None = None,
    ) -> None:
        self.width, self.longest = width, longest
        self._ends, self._length_penalty, self._early_stopping = ends, length_penalty, early_stopping
        self._n_top = n_top  # alternatives told with each token; None: no logprobs
        self.running = [Beam(text=text)]
        self._finished: list[Beam] = []  # the best first

    def advance(self, candidates: Sequence[Sequence[Candidate]]) -> list[tuple[int, int]]:
        """candidates: of each running beam, the most likely next tokens, the best first; `width` times one more than
        the number of tokens that end are enough.

        Returns which beams run now, as the place of the beam each continues and its new token. None is left: it ended.
        """
        every = [
            (beam.logprob + logprob, place, token, logprob)
            for place, (beam, of_beam) in enumerate(zip(self.running, candidates, strict=True))
            for token, logprob in of_beam
        ]
        every.sort(key=lambda each: (-each[0], each[1], each[2]))
        going: list[tuple[int, int]] = []
        beams: list[Beam] = []
        for rank, (_, place, token, logprob) in enumerate(every):
            if len(going) == self.width and rank >= self.width:
                break
            parent = self.running[place]
            text = None if parent.text is None else parent.text.copy()
            ending = self._ends(token, text)
            if ending is None and len(parent.tokens) + 1 >= self.longest:
                ending = "length", None
            if ending is None and len(going) < self.width:
                going.append((place, token))
                beams.append(self._grown(parent, token, logprob, candidates[place], text))
            elif ending is not None and rank < self.width:
                self._finish(self._grown(parent, token, logprob, candidates[place], text), ending)
        self.running = beams
        if self._is_over():
            self.running, going = [], []
        return going

    def best(self, count: int, otherwise: FinishReason) -> list[Beam]:
        """The `count` best: finished ones, and where they are too few, running ones, which end with `otherwise`."""
        for beam in self.running:
            beam.ending, beam.score = beam.ending or (otherwise, None), self._score(beam)
        return (self._finished + sorted(self.running, key=lambda beam: -beam.score))[:count]

    def _grown(
        self, parent: Beam, token: int, logprob: float, candidates: Sequence[Candidate], text: CompletionText | None
    ) -> Beam:
        beam = Beam([*parent.tokens, token], parent.logprob + logprob, text=text)
        if self._n_top is not None:
            beam.logprobs = [*parent.logprobs, TokenLogprob(token, logprob, candidates[: self._n_top])]
        return beam

    def _finish(self, beam: Beam, ending: Ending) -> None:
        if self._early_stopping and len(self._finished) == self.width:
            return
        beam.ending, beam.score = ending, self._score(beam)
        self._finished = sorted([*self._finished, beam], key=lambda each: -each.score)[: self.width]

    def _is_over(self) -> bool:
        if not self.running:
            return True
        if len(self._finished) < self.width:
            return False
        return self._early_stopping or self._score(self.running[0]) <= self._finished[-1].score

    def _score(self, beam: Beam) -> float:
        return beam.logprob / float(max(len(beam.tokens), 1) ** self._length_penalty)
