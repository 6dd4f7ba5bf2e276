"""From the logits of a step to its tokens: many sequences at once, each by settings of its own.

The order is that of transformers' `generate`: logit bias, repetition penalty, (frequency and presence penalty,) bad
words, min tokens, allowed tokens and structure, temperature, top-k, top-p, min-p, typical, draw. Log-probabilities that
are reported are the model's own, from before all of it, as OpenAI's and vLLM's are.

Invariant: a sequence's token is a function of its logits, its settings and (seed, branch, position). The rows beside it
decide nothing: whatever sums over a row does so in an order of its own, and random numbers are counted, not drawn.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelworks.config import UserError
from modelworks.data import Tokenizer
from modelworks.models import uniform_rows
from modelworks.serve.draws import IS_NOT_FINITE, NOTHING_ALLOWED, Settings, best_tokens, draw_tokens
from modelworks.serve.logit_edits import edit
from modelworks.serve.params import SamplingParams
from modelworks.serve.preparation import Preparation
from modelworks.serve.reports import Reports, report
from modelworks.serve.sampling_state import SamplingState as SamplingState
from modelworks.serve.structured import Constraint

NOT_FINITE = "the model's logits are not finite: its weights are damaged, or its dtype overflows; try float32"
_ERRORS = {
    IS_NOT_FINITE: NOT_FINITE,
    NOTHING_ALLOWED: "no token is allowed to come next: bad_words, min_tokens and allowed_token_ids forbid them all",
}


@dataclass(slots=True)
class Sampled:
    """A sequence's next token. logprob, top: if asked for; natural logarithms, the most likely tokens first.

    error: one line; then there is no token (-1), and the sequence must end.
    """

    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] = field(default_factory=list)
    error: str | None = None


class Sampler:
    """vocab_size: columns of the logits. tokenizer: None where no request has bad words or a structure.

    end_ids: tokens that end a text; None: the tokeniser's.
    """

    def __init__(
        self, vocab_size: int, tokenizer: Tokenizer | None = None, end_ids: Collection[int] | None = None
    ) -> None:
        self._vocab_size, self._tokenizer = vocab_size, tokenizer
        known = tokenizer.eos_ids if end_ids is None and tokenizer is not None else end_ids or ()
        self._end_ids = frozenset(token for token in known if token < vocab_size)
        self._preparation = Preparation(tokenizer, vocab_size, self._end_ids)

    def start(self, params: SamplingParams, prompt_ids: Sequence[int], seed: int, branch: int = 0) -> SamplingState:
        """The state of a sequence before its first new token.

        seed: of the request; branch: which of its results it is. Raises UserError where params cannot be followed.
        """
        constraint = None if params.structure is None else self._preparation.constraint(params.structure)
        return self._state(params, prompt_ids, seed, branch, constraint)

    def begin(
        self, params: SamplingParams, prompt_ids: Sequence[int], seed: int
    ) -> tuple[SamplingState, Future[Constraint] | None]:
        """The same without waiting for a structure to be compiled. Where there is a future, its result must become the
        state's `constraint` before the state is used; it raises UserError where the structure cannot be followed."""
        found = None if params.structure is None else self._preparation.begin(params.structure)
        if isinstance(found, Future):
            return self._state(params, prompt_ids, seed, 0, None), found
        return self._state(params, prompt_ids, seed, 0, found), None

    def warm_up(self) -> None:
        """Make now what the first structure would need."""
        self._preparation.warm_up()

    def close(self) -> None:
        """No structures are compiled any more."""
        self._preparation.close()

    @torch.inference_mode()  # an executor's logits may be changed in no other
    def sample(self, logits: Tensor, states: Sequence[SamplingState]) -> list[Sampled]:
        """The next token of each sequence. logits: (R, vocab_size) float32, of its row; **overwritten**.

        What fails, fails for one sequence: its result has an `error`.
        """
        if logits.dtype != torch.float32 or logits.shape != (len(states), self._vocab_size):
            raise ValueError(f"logits: got {logits.dtype} {tuple(logits.shape)}, expected float32 (rows, vocab_size)")
        logits = logits.contiguous()
        reported = np.array([row for row, state in enumerate(states) if state.params.logprobs is not None], np.int64)
        raw, rows = logits, reported
        if any(states[row].edits for row in reported):
            raw, rows = logits[torch.from_numpy(reported).to(logits.device)], np.arange(len(reported))
        edit(logits, states)
        tokens = self._choose(logits, states)
        results = [
            Sampled(token) if token >= 0 and state.error is None else Sampled(-1, error=state.error or _ERRORS[token])
            for token, state in zip(tokens.tolist(), states, strict=True)
        ]
        if len(reported):
            _tell([results[row] for row in reported], [states[row] for row in reported], raw, rows)
        return results

    @torch.inference_mode()
    def log_probs(self, logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
        """Log-probabilities (R, vocab_size) after all that edits logits: what a beam search adds up. No draw.

        logits are **overwritten**. transformers' beam search takes the logarithms first and edits those; here they
        remain logarithms of probabilities. A row that is not finite, or whose state failed, is all NaN.
        """
        logits = logits.contiguous()
        edit(logits, states)
        failed = torch.tensor([state.error is not None for state in states], device=logits.device)[:, None]
        return logits.log_softmax(dim=-1).masked_fill(failed, torch.nan)

    @torch.inference_mode()
    def prompt_logprobs(self, logits: Tensor, next_tokens: Sequence[int], count: int) -> Reports:
        """How likely the tokens of a prompt were. logits: (n, vocab_size); next_tokens: what came after each of them.

        count: most likely tokens reported with each.
        """
        return report(logits.to(torch.float32), np.arange(len(logits)), np.array(next_tokens, np.int64), count)

    def _state(
        self, params: SamplingParams, prompt_ids: Sequence[int], seed: int, branch: int, constraint: Constraint | None
    ) -> SamplingState:
        params.check_against(self._vocab_size, max_model_len=1 << 62)  # lengths are the engine's to know
        return SamplingState(
            params,
            prompt_ids,
            seed,
            branch,
            end_ids=(frozenset() if params.ignore_eos else self._end_ids).union(params.stop_token_ids),
            bad_words=self._spelled(params.bad_words),
            allowed=self._bits(params.allowed_token_ids),
            constraint=constraint,
        )

    def _choose(self, logits: Tensor, states: Sequence[SamplingState]) -> NDArray[np.int64]:
        greedy = np.fromiter((state.params.greedy for state in states), bool, len(states))
        if greedy.all():
            return _finite(*best_tokens(logits))
        tokens = np.empty(len(states), np.int64)
        if greedy.any():
            tokens[greedy] = _finite(*best_tokens(logits[torch.from_numpy(greedy).to(logits.device)]))
        rows = np.logical_not(greedy).nonzero()[0]
        drawing = [states[row] for row in rows]
        tokens[rows] = draw_tokens(logits, rows, _settings(drawing), _uniforms(drawing))
        return tokens

    def _spelled(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """The tokens of each word, within a text and after a space."""
        if not words:
            return []
        if self._tokenizer is None:
            raise UserError("bad_words: they are of text, but the model has no tokeniser")
        spelled = [self._tokenizer.encode_continuation(text) for word in words for text in (word, " " + word.lstrip())]
        return list(dict.fromkeys(tuple(ids) for ids in spelled if ids))

    def _bits(self, ids: Sequence[int] | None) -> NDArray[np.int32] | None:
        if ids is None:
            return None
        bits = np.zeros(-(-self._vocab_size // 32) * 32, np.uint8)
        bits[list(ids)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


_WINDOW = 64  # draws made at a time: a hundred operations of torch, for all sequences that need them together


def _uniforms(states: Sequence[SamplingState]) -> NDArray[np.float64]:
    """The random number of each sequence at its position."""
    without = [state for state in states if not 0 <= state.position - state.first_draw < len(state.draws)]
    if without:
        firsts = [state.position // _WINDOW * _WINDOW for state in without]
        numbers = uniform_rows([state.key for state in without], firsts, _WINDOW).tolist()
        for state, first, draws in zip(without, firsts, numbers, strict=True):
            state.first_draw, state.draws = first, draws
    return np.array([state.draws[state.position - state.first_draw] for state in states])


def _settings(states: Sequence[SamplingState]) -> Settings:
    rows = np.array([state.filters for state in states])
    return Settings(rows[:, 0], rows[:, 1].astype(np.int64), rows[:, 2], rows[:, 3], rows[:, 4])


def _finite(tokens: NDArray[np.int64], values: NDArray[np.float32]) -> NDArray[np.int64]:
    """The tokens, or why there is none: a highest value that is no number."""
    if np.isfinite(values).all():
        return tokens
    return np.where(np.isneginf(values), NOTHING_ALLOWED, np.where(np.isfinite(values), tokens, IS_NOT_FINITE))


def _tell(results: Sequence[Sampled], states: Sequence[SamplingState], logits: Tensor, rows: NDArray[np.int64]) -> None:
    """Log-probabilities into the results, each as many as its state asks for. rows: those of logits that are theirs."""
    counts = [state.params.logprobs or 0 for state in states]
    chosen = np.array([max(result.token, 0) for result in results], np.int64)
    logprobs, ids, values = (each.tolist() for each in report(logits, rows, chosen, max(counts)))
    for place, (result, count) in enumerate(zip(results, counts, strict=True)):
        if result.error is None:
            result.logprob = logprobs[place]
            result.top = list(zip(ids[place][:count], values[place][:count], strict=True))
