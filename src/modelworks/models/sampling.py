"""From logits to a token: the processed distribution and a draw from it.

The order is that of transformers' `generate`, so that equal settings mean the same there and here:
repetition penalty, temperature, top-k, top-p, min-p. A draw is a function of (seed, position) alone, so that what
else is computed beside a sequence cannot change its tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from modelworks.config import UserError
from modelworks.models.random import Key, uniform


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    temperature: divides the logits; 0 is greedy, as is top_k = 1. top_k: keep the k most likely tokens (and those
    equal to the last of them). top_p: keep the fewest most likely tokens whose probabilities sum to at least top_p
    (Holtzman et al. 2020). min_p: keep tokens at least min_p times as likely as the best (Nguyen et al. 2024).
    repetition_penalty: logits of tokens already in the sequence are divided by it where positive and multiplied
    where negative (Keskar et al. 2019). seed: of the draws.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        rules = [
            ("temperature", self.temperature, 0.0 <= self.temperature < math.inf, "a finite number >= 0 (0 is greedy)"),
            ("top_k", self.top_k, self.top_k is None or self.top_k >= 1, "a whole number >= 1"),
            ("top_p", self.top_p, self.top_p is None or 0.0 < self.top_p <= 1.0, "a number in (0, 1]"),
            ("min_p", self.min_p, self.min_p is None or 0.0 <= self.min_p <= 1.0, "a number in [0, 1]"),
            (
                "repetition_penalty",
                self.repetition_penalty,
                0.0 < self.repetition_penalty < math.inf,
                "a finite number > 0 (1 is none)",
            ),
        ]
        for name, value, right, expected in rules:
            if not right:
                raise UserError(f"{name}: got {value!r}, expected {expected}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without a draw."""
        return self.temperature == 0.0 or self.top_k == 1


def choose(logits: Tensor, seen: Tensor, sampling: Sampling, position: int) -> int:
    """The token at `position` of a sequence. logits: (vocab_size,). seen: int64, the sequence's tokens so far.

    Of equally likely best tokens, greedy takes the lowest id.
    """
    scores = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    if sampling.greedy:
        return int(penalize(scores, seen, sampling.repetition_penalty).argmax())
    scores = process(scores, seen, sampling)
    # Inverse of the cumulative distribution, in float64: the chance of a token is its probability to 2^-32.
    cumulative = scores.to(torch.float64).softmax(dim=-1).cumsum(dim=-1)
    draw = uniform(Key.of(sampling.seed, "sample"), position, position + 1, device=logits.device)
    token = int(torch.searchsorted(cumulative, draw * cumulative[-1], right=True))
    return min(token, int(scores.isfinite().nonzero()[-1]))


def process(scores: Tensor, seen: Tensor, sampling: Sampling) -> Tensor:
    """Logits (vocab_size,) after penalty, temperature and filters; filtered tokens are -inf."""
    scores = penalize(scores, seen, sampling.repetition_penalty) / sampling.temperature
    if sampling.top_k is not None:
        scores = _keep(scores, scores >= scores.topk(min(sampling.top_k, scores.numel())).values[-1])
    if sampling.top_p is not None and sampling.top_p < 1.0:
        # Ascending, with the lowest id last among equals: it is the one to keep, as in greedy.
        order = scores.sort(stable=True, descending=True).indices.flip(0)
        ascending = scores[order]
        unlikely = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - sampling.top_p
        unlikely[-1] = False
        scores = scores.index_fill(0, order[unlikely], -math.inf)
    if sampling.min_p is not None:
        probabilities = scores.softmax(dim=-1)
        scores = _keep(scores, probabilities >= sampling.min_p * probabilities.max())
    return scores


def penalize(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make tokens in `seen` less likely (penalty > 1) or more (< 1)."""
    if penalty == 1.0:
        return scores
    chosen = scores[seen]
    return scores.index_put((seen,), torch.where(chosen < 0, chosen * penalty, chosen / penalty))


def _keep(scores: Tensor, kept: Tensor) -> Tensor:
    return scores.masked_fill(~kept, -math.inf)
