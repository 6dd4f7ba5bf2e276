"""From the logits of a step to its tokens, sequence by sequence: the processing of `modelworks.models.sampling`.

A draw is a function of (seed, branch, position) alone. Log-probabilities that are reported are the model's own, from
before any processing. What is not processed here is refused when a request starts, not ignored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelworks.config import UserError
from modelworks.data import Tokenizer
from modelworks.models import Sampling
from modelworks.models.sampling import choose
from modelworks.serve.params import SamplingParams
from modelworks.serve.request import TokenLogprob

_NOT_HERE = ("typical_p", "presence_penalty", "frequency_penalty", "bad_words", "structure")
NOT_FINITE = "the model's logits for this request are not finite: its weights are damaged, or its dtype overflows"


@dataclass(frozen=True, slots=True)
class Sampled:
    """token: -1 where error is set. logprob, top: where the state's parameters ask for them."""

    token: int
    logprob: float | None = None
    top: Sequence[tuple[int, float]] = ()
    error: str | None = None


class SamplingState:
    """What sampling remembers of one running sequence."""

    def __init__(self, params: SamplingParams, tokens: list[int], seed: int, branch: int, ends: frozenset[int]) -> None:
        self.params, self.tokens, self.seed, self.n_output, self.ends = params, tokens, seed, 0, ends
        self.sampling = Sampling(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p or None,
            repetition_penalty=params.repetition_penalty,
            seed=(seed + branch * 0x9E3779B97F4A7C15) % 2**63,
        )
        changed = params.logit_bias or params.allowed_token_ids or params.repetition_penalty != 1.0
        self.plain = not changed and not params.min_tokens

    def accept(self, token: int) -> None:
        self.tokens.append(token)
        self.n_output += 1

    def fork(self, branch: int) -> SamplingState:
        forked = SamplingState(self.params, list(self.tokens), self.seed, branch, self.ends)
        forked.n_output = self.n_output
        return forked


class Sampler:
    def __init__(self, vocab_size: int, tokenizer: Tokenizer | None) -> None:
        self._eos_ids = frozenset(tokenizer.eos_ids if tokenizer else ())

    def start(self, params: SamplingParams, prompt_ids: Sequence[int], seed: int, branch_index: int) -> SamplingState:
        """Raises UserError for what cannot be sampled."""
        for name in _NOT_HERE:
            if getattr(params, name) != getattr(SamplingParams, name):
                raise UserError(f"{name}: got {getattr(params, name)!r}, which is not served; leave it out")
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids)
        return SamplingState(params, list(prompt_ids), seed, branch_index, ends)

    def sample(self, logits: Tensor, states: Sequence[SamplingState]) -> list[Sampled]:
        """The next token of each sequence. logits: float32 (R, vocab_size), one row a state."""
        largest, tokens = logits.max(dim=-1)  # NaN where any is
        best, finite = tokens.tolist(), largest.isfinite().tolist()
        sampled = []
        for row, state, token, right in zip(logits, states, best, finite, strict=True):
            if not right:
                sampled.append(Sampled(-1, error=NOT_FINITE))
                continue
            if not (state.plain and state.sampling.greedy):
                processed, seen = self._processed(row, state), torch.tensor(state.tokens)
                token = choose(processed, seen, state.sampling, position=len(state.tokens))
            if state.params.logprobs is None:
                sampled.append(Sampled(token))
            else:
                (told,) = self.prompt_logprobs(row[None], [token], state.params.logprobs)
                sampled.append(Sampled(token, told.logprob, told.top))
        return sampled

    def log_probs(self, logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
        """Of each sequence's next token, (R, vocab_size), after processing but for temperature and filters."""
        return torch.stack(
            [self._processed(row, state) for row, state in zip(logits, states, strict=True)]
        ).log_softmax(dim=-1)

    def prompt_logprobs(self, logits: Tensor, next_tokens: Sequence[int], k: int) -> list[TokenLogprob]:
        """Of `next_tokens`, each after its row of logits (n, vocab_size), with the k most likely ones."""
        logprobs = logits.log_softmax(dim=-1)
        chosen = logprobs[torch.arange(len(next_tokens)), torch.tensor(next_tokens)].tolist()
        values, tokens = logprobs.topk(min(k, logits.shape[-1]))
        tops = zip(tokens.tolist(), values.tolist(), strict=True)
        return [
            TokenLogprob(token, logprob, list(zip(*top, strict=True)))
            for token, logprob, top in zip(next_tokens, chosen, tops, strict=True)
        ]

    def _processed(self, logits: Tensor, state: SamplingState) -> Tensor:
        params, scores = state.params, logits
        if params.logit_bias:
            scores = scores.clone()
            scores[list(params.logit_bias)] += torch.tensor(list(params.logit_bias.values()))
        if params.allowed_token_ids is not None:
            kept = torch.full_like(scores, -math.inf)
            allowed = list(params.allowed_token_ids)
            kept[allowed] = scores[allowed]
            scores = kept
        if state.n_output < params.min_tokens and state.ends:
            scores = scores.index_fill(0, torch.tensor(sorted(state.ends)), -math.inf)
        return scores
