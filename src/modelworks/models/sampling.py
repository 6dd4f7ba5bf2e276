"""From logits to a token: the processed distribution and a draw from it.

The order is that of transformers' `generate`, so that equal settings mean the same there and here:
repetition penalty, temperature, top-k, top-p, min-p, typical. A draw is a function of (seed, position) alone, and a
row's result of that row alone to the last bit, so that what else is computed beside a sequence cannot change its
tokens. That is why weights are summed by `cumsum`, one after the other: `sum` and `softmax` split a row among
threads and vector lanes in ways that depend on the shape.

Shapes: R rows (sequences), W candidates each: the whole vocabulary, or those of its tokens that are left, in the order
of their ids. Removed ones are -inf.
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


@dataclass(frozen=True)
class Filters:
    """Settings of R rows, each a tensor (R, 1); a setting that no row uses is None.

    temperature (above 0), top_p, min_p, typical_p: float64. top_k: int64. See `Sampling`; typical_p keeps the
    tokens whose information -log p is nearest to the distribution's entropy, with a probability of typical_p together
    (Meister et al. 2022, "Locally typical sampling"). Rows without: top_k = W, top_p = 1, min_p = 0, typical_p = 1.
    """

    temperature: Tensor
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    typical_p: Tensor | None = None

    @classmethod
    def of(cls, sampling: Sampling, device: torch.device | str = "cpu") -> Filters:
        """Those of one row."""

        def column(value: float | None, dtype: torch.dtype) -> Tensor | None:
            return None if value is None else torch.tensor([[value]], dtype=dtype, device=device)

        temperature = torch.tensor([[sampling.temperature]], dtype=torch.float64, device=device)
        top_p, min_p = column(sampling.top_p, torch.float64), column(sampling.min_p, torch.float64)
        return cls(temperature, column(sampling.top_k, torch.int64), top_p, min_p)


def choose(logits: Tensor, seen: Tensor, sampling: Sampling, position: int) -> int:
    """The token at `position` of a sequence. logits: (vocab_size,). seen: int64, the sequence's tokens so far.

    Of equally likely best tokens, greedy takes the lowest id.
    """
    scores = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    if sampling.greedy:
        return int(penalize(scores, seen, sampling.repetition_penalty).argmax())
    scores = process(scores, seen, sampling)
    uniforms = uniform(draw_key(sampling.seed), position, position + 1, device=logits.device)
    return int(_draw(scores[None], uniforms))


def draw_filtered(scores: Tensor, filters: Filters, uniforms: Tensor) -> Tensor:
    """A token id (R,) of each row of scores (R, V), which holds a finite one. uniforms: (R,) float64 in (0, 1)."""
    scores = _keep_top_k(_heat(scores, filters.temperature), filters.top_k)
    packed = _left(scores)
    if packed is None:
        return _draw(_keep_likely(scores, filters), uniforms)
    scores, ids = packed
    return ids.gather(-1, _draw(_keep_likely(scores, filters), uniforms)[:, None])[:, 0]


def process(scores: Tensor, seen: Tensor, sampling: Sampling) -> Tensor:
    """Logits (vocab_size,) after penalty, temperature and filters; filtered tokens are -inf."""
    filters = Filters.of(sampling, scores.device)
    scores = _heat(penalize(scores, seen, sampling.repetition_penalty)[None], filters.temperature)
    return _keep_likely(_keep_top_k(scores, filters.top_k), filters)[0]


def penalize(scores: Tensor, seen: Tensor, penalty: float | Tensor) -> Tensor:
    """Make tokens in `seen` less likely (penalty > 1) or more (< 1). scores, seen and penalty are of one dimension."""
    if isinstance(penalty, float) and penalty == 1.0:
        return scores
    chosen = scores[seen]
    return scores.index_put((seen,), torch.where(chosen < 0, chosen * penalty, chosen / penalty))


def highest_scores(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` highest scores of each row (R, W), best first, and their places; of equal ones the lowest first."""
    width = scores.shape[-1]
    if count + 1 >= width:
        values, places = scores.sort(dim=-1, descending=True, stable=True)
        return values[:, :count], places[:, :count]
    values, places = scores.topk(count + 1, dim=-1)
    undecided = values[:, count - 1] == values[:, count]  # which of equal ones came in is up to `topk`
    places = places[:, :count].sort(dim=-1).values
    values, order = scores.gather(-1, places).sort(dim=-1, descending=True, stable=True)
    places = places.gather(-1, order)
    if bool(undecided.any()):
        exact = scores[undecided].sort(dim=-1, descending=True, stable=True)
        values[undecided], places[undecided] = exact.values[:, :count], exact.indices[:, :count]
    return values, places


def draw_key(seed: int, branch: int = 0) -> Key:
    """The stream of a sequence's draws; element i decides the token at position i. branch: of several results."""
    return Key.of(seed, "sample") if branch == 0 else Key.of(seed, "sample", branch)


def _heat(scores: Tensor, temperature: Tensor) -> Tensor:
    """scores (R, W) / temperature (R, 1). Next to 0 the best token's score becomes 0, so that nothing overflows."""
    cold = temperature < _COLD
    if bool(cold.any()):
        scores = torch.where(cold, scores - scores.amax(dim=-1, keepdim=True), scores)
    return scores / temperature.to(scores.dtype)


def _keep_top_k(scores: Tensor, top_k: Tensor | None) -> Tensor:
    """The top_k (R, 1) highest scores of each row, and those equal to the last of them."""
    if top_k is None:
        return scores
    width = scores.shape[-1]
    wanted = top_k.clamp(max=width)
    most = int(torch.where(wanted < width, wanted, 1).max())
    least = scores.topk(most, dim=-1).values.gather(-1, (wanted - 1).clamp(max=most - 1))
    return scores.masked_fill((scores < least) & (wanted < width), -math.inf)


def _keep_likely(scores: Tensor, filters: Filters) -> Tensor:
    """scores (R, W) after the filters that look at probabilities: top-p, min-p, typical."""
    if filters.top_p is not None:
        scores = _keep_top_p(scores, filters.top_p)
    if filters.min_p is not None:
        below_best = scores.to(torch.float64) - scores.amax(dim=-1, keepdim=True)
        scores = scores.masked_fill(below_best < filters.min_p.log(), -math.inf)
    if filters.typical_p is not None:
        scores = _keep_typical(scores, filters.typical_p)
    return scores


def _left(scores: Tensor) -> tuple[Tensor, Tensor] | None:
    """Scores (R, V) without the removed ones: scores (R, W) and token ids (R, W), or None if that is no smaller.

    Rows with fewer are filled up with -inf.
    """
    kept = scores.isfinite()
    counts = kept.sum(dim=-1)
    width = max(int(counts.max()), 1)
    if 4 * width > scores.shape[-1]:
        return None
    rows, ids = kept.nonzero(as_tuple=True)
    places = torch.arange(len(rows), device=scores.device) - (counts.cumsum(0) - counts)[rows]
    packed = scores.new_full((len(scores), width), -math.inf)
    packed[rows, places] = scores[rows, ids]
    names = ids.new_zeros((len(scores), width))
    names[rows, places] = ids
    return packed, names


def _draw(scores: Tensor, uniforms: Tensor) -> Tensor:
    """One place (R,) of each row (R, W), as likely as its score says. uniforms: (R,) float64 in (0, 1).

    The inverse of the cumulative distribution, in float64: the chance of a token is its probability to 2^-32.
    """
    cumulative = _weights(scores).cumsum(dim=-1)
    drawn = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)[:, 0]
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())[:, 0]  # rounding shall not take it beyond
    return torch.minimum(drawn, last)


_COLD = 1e-3  # a temperature under which a float32 logit could overflow
_CANDIDATES = 256  # of top-p: more than it keeps of a language model's distributions, nearly always


def _keep_top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    """A token stays while those before it, from the best down, have less than top_p of the probability.

    No vocabulary is sorted where its best tokens already have that much.
    """
    mass = top_p * _weights(scores).cumsum(dim=-1)[:, -1:]
    kept, reached = _leading(*highest_scores(scores, _CANDIDATES), scores, mass)
    short = ((reached < mass) & (top_p < 1.0))[:, 0]
    if bool(short.any()) and scores.shape[-1] > _CANDIDATES:
        rest = scores[short]
        kept[short], _ = _leading(*rest.sort(dim=-1, descending=True, stable=True), rest, mass[short])
    return torch.where(top_p < 1.0, kept, scores)


def _leading(ordered: Tensor, places: Tensor, scores: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """scores (R, W) without all but the first of `ordered` (descending, from `places`) that have `mass` together.

    Also the weight (R, 1) of all that `ordered` holds.
    """
    weights = _weights(ordered)
    reached = weights.cumsum(dim=-1)
    before = torch.nn.functional.pad(reached[:, :-1], (1, 0))
    kept = torch.full_like(scores, -math.inf).scatter(-1, places, ordered.masked_fill(before >= mass, -math.inf))
    return kept, reached[:, -1:]


def _keep_typical(scores: Tensor, typical_p: Tensor) -> Tensor:
    weights = _weights(scores)
    total = weights.cumsum(dim=-1)[:, -1:]
    probabilities = weights / total
    information = total.log() - (scores.to(torch.float64) - scores.amax(dim=-1, keepdim=True))  # -log p
    terms = torch.where(probabilities > 0, probabilities * information, 0.0)
    distance = (information - terms.cumsum(dim=-1)[:, -1:]).abs()
    ordered, order = distance.sort(dim=-1, stable=True)
    reached = probabilities.gather(-1, order).cumsum(dim=-1)
    last = (reached < typical_p).sum(dim=-1, keepdim=True).clamp(max=scores.shape[-1] - 1)
    atypical = (distance > ordered.gather(-1, last)) & (typical_p < 1.0)
    return scores.masked_fill(atypical, -math.inf)


def _weights(scores: Tensor) -> Tensor:
    """Numbers in proportion to the probabilities, float64, the best token's is 1."""
    return (scores.to(torch.float64) - scores.amax(dim=-1, keepdim=True)).exp()
