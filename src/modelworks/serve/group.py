"""A request in progress: the sequences that it became, their text, and what is told of them.

A request begins as one sequence, its prompt. Once that is computed it is forked: into `n` completions that are told of
as they grow, into `best_of` of which the best are told of at the end, or into the beams of a search, whose number stays
and whose members change. Whatever happens, `news` and `end` tell of each of the n completions' end exactly once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from modelworks.serve.beam import BeamSearch, Candidate, Ending
from modelworks.serve.prompt_scores import PromptScores
from modelworks.serve.request import Delta, FinishReason, Request, TokenLogprob
from modelworks.serve.sequence import Sequence
from modelworks.serve.text import CompletionText, Decoder

if TYPE_CHECKING:
    from modelworks.serve.sampler import Sampled, SamplingState


@dataclass(eq=False, slots=True)
class Branch:
    """One sequence of a request. text: None for a beam, whose text is made at the end. candidates: of a beam that has
    caught up and waits for the others. shown, logprobs: so far, where they are told of at the end."""

    group: Group
    index: int
    sequence: Sequence
    state: SamplingState
    text: CompletionText | None
    cumulative_logprob: float = 0.0
    shown: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ending: Ending | None = None
    error: str | None = None
    candidates: list[Candidate] | None = None


class Group:
    """ends: tokens that end a text (none of them where the request ignores them). decoder: makes a decoder, or None
    where there is no tokeniser. longest: new tokens at most. vocab_size: of the logits."""

    def __init__(
        self,
        request: Request,
        *,
        ends: frozenset[int],
        decoder: Callable[[], Decoder | None],
        longest: int,
        vocab_size: int,
    ) -> None:
        params = request.params
        self.request, self.params, self.n_prompt, self.longest = request, params, len(request.prompt), longest
        self._ends, self._decoder = ends - set(params.stop_token_ids), decoder
        self._stop_ids = frozenset(params.stop_token_ids)
        self.branches: list[Branch] = []
        self.n_cached = -1  # until its prompt is begun
        self.queued_s = 0.0
        n_top = params.prompt_logprobs
        self.prompt_logprobs = None if n_top is None else PromptScores(request.prompt, min(n_top, vocab_size))
        self.search = self._begin_search() if params.beams is not None else None
        self._held = self.search is not None or (params.best_of or params.n) > params.n
        self._n_open = params.n
        self._told = [False] * params.n  # whether anything was told of a completion

    @property
    def n_candidates(self) -> int:
        """Most likely tokens of each beam that a step of the search must see."""
        assert self.search is not None
        n_ends = len(self._ends | self._stop_ids) + bool(self.params.stop)  # may all be among the best of each beam
        return max(self.search.width * (1 + max(n_ends, 1)), self.params.logprobs or 0)

    @property
    def is_scoring(self) -> bool:
        """Whether log-probabilities of its prompt are still wanted."""
        return self.prompt_logprobs is not None and self.prompt_logprobs.n_known < self.n_prompt

    @property
    def is_over(self) -> bool:
        return self._n_open == 0

    def new_text(self) -> CompletionText:
        params = self.params
        return CompletionText(
            self._decoder(), params.stop, included=params.include_stop, first_checked=params.min_tokens
        )

    def take(self, branch: Branch, sampled: Sampled) -> Delta | None:
        """A branch has its next token, which its sequence holds already. Its news, if they are told at once; its
        `ending` is set if it has ended."""
        token, text = sampled.token, branch.text
        assert text is not None
        n_new = len(branch.sequence.tokens) - self.n_prompt
        if token in self._ends:
            branch.ending, shown = ("stop", None), text.flush()
        elif token in self._stop_ids:
            branch.ending = "stop", token
            shown = (text.push(token) if self.params.include_stop else "") + text.flush()
        else:
            shown = text.push(token)
            if text.found is not None:
                branch.ending = "stop", text.found
            elif n_new >= self.longest:
                branch.ending = "length", None
                shown += text.flush()
        logprob = None
        if sampled.logprob is not None:
            branch.cumulative_logprob += sampled.logprob
            if self.params.logprobs is not None:
                logprob = TokenLogprob(token, sampled.logprob, sampled.top)
        if self._held:
            branch.shown.append(shown)
            if logprob is not None:
                branch.logprobs.append(logprob)
            return None
        return self._delta(branch, [token], shown, None if logprob is None else [logprob])

    def fail(self, branch: Branch, error: str) -> Delta | None:
        """A branch ends because of an error of its own."""
        branch.ending, branch.error = ("error", None), error
        held = "" if branch.text is None else branch.text.flush()
        return None if self._held else self._delta(branch, [], held, None)

    def results(self) -> list[Delta]:
        """What was held back until the end, now that all branches have ended or the search is over."""
        if not self._held or self._n_open == 0:
            return []
        return self._best_beams("length") if self.search is not None else self._best_branches("length")

    def end(self, reason: FinishReason, error: str | None = None) -> list[Delta]:
        """All that has not ended ends now."""
        if self._n_open == 0:
            return []
        open_branches = [branch for branch in self.branches if branch.ending is None]
        for branch in open_branches:
            branch.ending, branch.error = (reason, None), error
            if branch.text is not None and self._held:
                branch.shown.append(branch.text.flush())
        if self._held and error is None:
            return self._best_beams(reason) if self.search is not None else self._best_branches(reason)
        known = {} if self._held else {branch.index: branch for branch in self.branches}
        deltas = []
        for index in range(self.params.n):
            if index not in known:  # the prompt was not computed yet, or nothing of it was told
                deltas.append(self._told_of(index, finish_reason=reason, error=error))
            elif known[index] in open_branches:
                text = known[index].text
                deltas.append(self._delta(known[index], [], "" if text is None else text.flush(), None))
        return deltas

    def _delta(self, branch: Branch, tokens: list[int], text: str, logprobs: list[TokenLogprob] | None) -> Delta:
        if branch.ending is None:
            return self._told_of(branch.index, tokens, text, logprobs)
        reason, met = branch.ending
        total = branch.cumulative_logprob if self.params.logprobs is not None else None
        return self._told_of(branch.index, tokens, text, logprobs, reason, met, branch.error, total)

    def _told_of(
        self,
        index: int,
        token_ids: list[int] | None = None,
        text: str = "",
        logprobs: list[TokenLogprob] | None = None,
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
        error: str | None = None,
        cumulative_logprob: float | None = None,
    ) -> Delta:
        """The one place where deltas are made, so that each completion ends once and the last of them is known."""
        scores = None
        if not self._told[index]:
            self._told[index] = True
            if index == 0 and not self.is_scoring:
                scores = self.prompt_logprobs
        if finish_reason is not None:
            self._n_open -= 1
        return Delta(
            self.request.id,
            index,
            [] if token_ids is None else token_ids,
            text,
            logprobs,
            finish_reason,
            stop_reason,
            error,
            self.n_prompt,
            max(self.n_cached, 0),
            cumulative_logprob,
            scores,
            self._n_open == 0,
            self.queued_s,
        )

    def _best_branches(self, otherwise: FinishReason) -> list[Delta]:
        """The n branches with the highest log-probability per token; those that failed come last. otherwise: why there
        are fewer."""

        def rank(branch: Branch) -> tuple[bool, float]:
            n_new = len(branch.sequence.tokens) - self.n_prompt
            return branch.error is not None, -branch.cumulative_logprob / max(n_new, 1)

        deltas = []
        for index, branch in enumerate(sorted(self.branches, key=rank)[: self.params.n]):
            assert branch.ending is not None
            tokens, wanted = branch.sequence.tokens[self.n_prompt :], self.params.logprobs is not None
            deltas.append(
                self._told_of(
                    index, tokens, "".join(branch.shown), branch.logprobs if wanted else None, *branch.ending,
                    branch.error, branch.cumulative_logprob,
                )
            )  # fmt: skip
        return deltas + [self._told_of(index, finish_reason=otherwise) for index in range(len(deltas), self.params.n)]

    def _best_beams(self, otherwise: FinishReason) -> list[Delta]:
        assert self.search is not None
        deltas = []
        for index, beam in enumerate(self.search.best(self.params.n, otherwise)):
            assert beam.ending is not None
            reason, met = beam.ending
            text, shown = self.new_text(), ""
            by_token = reason == "stop" and not isinstance(met, str)
            shown_end = by_token and met is not None and self.params.include_stop
            for token in beam.tokens[:-1] if by_token and not shown_end else beam.tokens:
                shown += text.push(token)
            shown += text.flush()
            logprobs = beam.logprobs if self.params.logprobs is not None else None
            deltas.append(self._told_of(index, beam.tokens, shown, logprobs, reason, met, None, beam.logprob))
        error = "no other continuation is possible" if otherwise == "length" else None
        reason = otherwise if error is None else "error"
        missing = range(len(deltas), self.params.n)
        return deltas + [self._told_of(index, finish_reason=reason, error=error) for index in missing]

    def _begin_search(self) -> BeamSearch:
        params = self.params
        assert params.beams is not None
        return BeamSearch(
            params.beams,
            longest=self.longest,
            ends=self._beam_ends,
            text=self.new_text() if params.stop else None,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            n_top=params.logprobs,
        )

    def _beam_ends(self, token: int, text: CompletionText | None) -> Ending | None:
        """Whether a completion with this text, which did not end before, ends with this token."""
        if token in self._ends:
            return "stop", None
        if token in self._stop_ids:
            return "stop", token
        if text is not None:
            text.push(token)
            if text.found is not None:
                return "stop", text.found
        return None
