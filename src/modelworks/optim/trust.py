"""Layer-wise rates: LAMB and LARS scale each tensor's step to the norm of its weights.

LAMB (You et al. 2019, 1904.00962, algorithm 2), Adam's direction with bias-corrected moments:

    u = m^ / (sqrt(v^) + eps) + decay p        p <- p - lr phi(|p|) / |u| u

LARS (You et al. 2017, 1708.03888, algorithm 1), inside momentum:

    r = coefficient |p| / (|g| + decay |p| + eps)
    b <- momentum b + lr r (g + decay p)       p <- p - b

phi is the identity, or clamps to [low, high] as in the paper's section 3. The ratio is 1 where either norm is 0, so
that a tensor that starts at zero can leave it, and for norms and biases (`optimizer.no_trust`), whose few elements say
little about a step. Norms are of the logical tensor, experts of a layer together.

Two passes: the norms must be known before anything moves. LAMB's direction is not kept in between but computed from the
moments again, which costs less than to write and read it. Where this process holds all of a tensor, a compiled second
pass follows the first at once, before the next tensor, and from the end: it finds much of what it needs in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from modelworks.layout import ShardSpec
from modelworks.optim.adam import adam_step
from modelworks.optim.compiled import Job, Kernels, kernels_for, run
from modelworks.optim.pieces import Batch, Piece, Step, alike, batches
from modelworks.optim.sums import Sums

_CACHED = 1 << 20  # elements; of LAMB's four tensors 16 MB in float32, what a third-level cache holds

Then = Callable[[list[float]], Sequence[Job] | None]  # of the squares of weights and of the update or gradient


@dataclass(frozen=True)
class Lamb:
    betas: tuple[float, float]
    eps: float
    clamp: tuple[float, float] | None = None

    def states(self, spec: ShardSpec) -> dict[str, ShardSpec]:
        return {"exp_avg": spec, "exp_avg_sq": spec}

    def update(self, pieces: Sequence[Piece], step: Step, sums: Sums) -> None:
        _update(self, pieces, step, sums)

    def first_pass(self, kernels: Kernels, piece: Piece, step: Step, then: Then) -> list[Job]:
        columns = ("value", "gradient", "exp_avg", "exp_avg_sq")
        beta1, beta2 = self.betas
        numbers = (1.0 - beta1, 1.0 - beta2, beta2, *self._scales(step), self.eps, piece.options.weight_decay)
        return kernels.sums_in_stretches("lamb_moments", piece, columns, 2, numbers, then)

    def second_pass(self, kernels: Kernels, piece: Piece, rate: float, step: Step) -> list[Job]:
        """The rate is the first of the jobs' numbers."""
        columns = ("value", "exp_avg", "exp_avg_sq")
        numbers = (rate, *self._scales(step), self.eps, piece.options.weight_decay)
        return kernels.in_stretches("lamb_apply", piece, columns, numbers, backwards=True)

    def squares(self, group: Sequence[Piece], step: Step) -> list[list[float]]:
        """Of weights and direction. Moves the moments."""

        def direction_of(batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
            values, gradients, exp_avgs, exp_avg_sqs = batch.columns
            # One step of rate -1 from zero is Adam's direction; torch's kernel moves the moments on its way.
            direction = [torch.zeros_like(value) for value in values]
            adam_step(
                direction, gradients, exp_avgs, exp_avg_sqs, step=step.number, lr=-1.0, betas=self.betas, eps=self.eps,
                weight_decay=0.0, decoupled=True,
            )  # fmt: skip
            if decay := group[0].options.weight_decay:
                torch._foreach_add_(direction, values, alpha=decay)
            return values, direction

        return _squares_in_batches(group, ("exp_avg", "exp_avg_sq"), direction_of)

    def _scales(self, step: Step) -> tuple[float, float]:
        """What takes the bias out of the first moment, and out of the second's root."""
        first, second = (1.0 - beta**step.number for beta in self.betas)
        return 1.0 / first, 1.0 / math.sqrt(second)

    def apply(self, group: Sequence[Piece], rates: Sequence[float], step: Step) -> None:
        options = group[0].options
        first, second = self._scales(step)
        for batch in batches(group, "exp_avg", "exp_avg_sq"):
            values, _, exp_avgs, exp_avg_sqs = batch.columns
            rate = [rates[owner] for owner in batch.owners]
            root = torch._foreach_pow(exp_avg_sqs, 0.5)  # on a CPU torch's sqrt takes five times as long
            torch._foreach_mul_(root, second)
            torch._foreach_add_(root, self.eps)
            if options.weight_decay:
                torch._foreach_mul_(values, [1.0 - each * options.weight_decay for each in rate])
            torch._foreach_addcdiv_(values, exp_avgs, root, [-each * first for each in rate])

    def ratio(self, weight: float, update: float, piece: Piece) -> float:
        """By the two norms."""
        if self.clamp:
            weight = min(max(weight, self.clamp[0]), self.clamp[1])
        return weight / update if piece.options.trust and weight and update else 1.0


@dataclass(frozen=True)
class Lars:
    momentum: float
    coefficient: float
    eps: float

    def states(self, spec: ShardSpec) -> dict[str, ShardSpec]:
        return {"momentum_buffer": spec} if self.momentum else {}

    def update(self, pieces: Sequence[Piece], step: Step, sums: Sums) -> None:
        _update(self, pieces, step, sums)

    def first_pass(self, kernels: Kernels, piece: Piece, step: Step, then: Then) -> list[Job]:
        return kernels.sums_in_stretches("two_square_sums", piece, ("value", "gradient"), 2, (), then)

    def second_pass(self, kernels: Kernels, piece: Piece, rate: float, step: Step) -> list[Job]:
        decay = piece.options.weight_decay
        if not self.momentum:
            return kernels.in_stretches("lars_apply_plain", piece, ("value", "gradient"), (rate, decay), backwards=True)
        columns, numbers = ("value", "gradient", "momentum_buffer"), (rate, decay, self.momentum)
        return kernels.in_stretches("lars_apply", piece, columns, numbers, backwards=True)

    def squares(self, group: Sequence[Piece], step: Step) -> list[list[float]]:
        return _squares_in_batches(group, (), lambda batch: (batch.columns[0], batch.columns[1]))

    def apply(self, group: Sequence[Piece], rates: Sequence[float], step: Step) -> None:
        decay = group[0].options.weight_decay
        for batch in batches(group, *(("momentum_buffer",) if self.momentum else ())):
            values, gradients, *buffers = batch.columns
            rate = [rates[owner] for owner in batch.owners]
            moved = torch._foreach_mul(gradients, rate)
            if decay:
                torch._foreach_add_(moved, torch._foreach_mul(values, [each * decay for each in rate]))
            for buffer in buffers:
                torch._foreach_mul_(buffer, self.momentum)
                torch._foreach_add_(buffer, moved)
            torch._foreach_sub_(values, buffers[0] if buffers else moved)

    def ratio(self, weight: float, gradient: float, piece: Piece) -> float:
        if not (piece.options.trust and weight and gradient):
            return 1.0
        return self.coefficient * weight / (gradient + piece.options.weight_decay * weight + self.eps)


def _update(rule: Lamb | Lars, pieces: Sequence[Piece], step: Step, sums: Sums) -> None:
    if sums.all_here:
        run([job for piece in pieces if (kernels := kernels_for(piece.value))
             for job in _both_passes(rule, kernels, piece, step)])  # fmt: skip
        for some in _together([piece for piece in pieces if not kernels_for(piece.value)]):
            _apply(rule, some, _squares(rule, some, step), step)
        return
    own = {name: torch.tensor(both, dtype=torch.float64) for name, both in _squares(rule, pieces, step).items()}
    totals = sums.total(own, _two)  # one collective
    _apply(rule, pieces, {name: both.tolist() for name, both in totals.items()}, step)


def _both_passes(rule: Lamb | Lars, kernels: Kernels, piece: Piece, step: Step) -> list[Job]:
    # Made before the rate is known: between the passes Python's own memory is out of the cache, and this took 5 %.
    second_pass = rule.second_pass(kernels, piece, 0.0, step)

    def with_rate(squares: list[float]) -> list[Job]:
        second_pass[0].numbers[0] = _rate(rule, piece, squares, step)
        return second_pass

    return rule.first_pass(kernels, piece, step, with_rate)


def _squares(rule: Lamb | Lars, pieces: Sequence[Piece], step: Step) -> dict[str, list[float]]:
    """By parameter, those of the two tensors that the rule takes norms of, as far as they are here."""
    found = {piece.name: [0.0, 0.0] for piece in pieces}

    for group in alike(pieces):
        if kernels := kernels_for(group[0].value):
            run([job for piece in group
                 for job in rule.first_pass(kernels, piece, step, partial(found.__setitem__, piece.name))])  # fmt: skip
        else:
            found |= {piece.name: own for piece, own in zip(group, rule.squares(group, step), strict=True)}
    return found


def _apply(rule: Lamb | Lars, pieces: Sequence[Piece], squares: Mapping[str, Sequence[float]], step: Step) -> None:
    for group in alike(pieces):
        rates = [_rate(rule, piece, squares[piece.name], step) for piece in group]
        if kernels := kernels_for(group[0].value):
            both = zip(reversed(group), reversed(rates), strict=True)
            run([job for piece, rate in both for job in rule.second_pass(kernels, piece, rate, step)])
        else:
            rule.apply(group, rates, step)


def _rate(rule: Lamb | Lars, piece: Piece, squares: Sequence[float], step: Step) -> float:
    weight, other = (math.sqrt(square) for square in squares)
    return step.lr * piece.options.lr_multiplier * rule.ratio(weight, other, piece)


def _together(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """As few pieces as keep all threads busy, so that the second pass finds some of them in the cache."""
    some: list[Piece] = []
    size = 0
    for piece in pieces:
        some.append(piece)
        size += piece.value.numel()
        if size >= _CACHED:
            yield some
            some, size = [], 0
    if some:
        yield some


def _squares_in_batches(
    group: Sequence[Piece],
    kinds: tuple[str, ...],
    pair: Callable[[Batch], tuple[list[Tensor], list[Tensor]]],
) -> list[list[float]]:
    """For each piece, the squares of the two tensors that `pair` makes of each batch."""
    found = [[0.0, 0.0] for _ in group]
    for batch in batches(group, *kinds):
        for which, tensors in enumerate(pair(batch)):
            for owner, square in zip(batch.owners, _square_sums(tensors), strict=True):
                found[owner][which] += square
    return found


def _square_sums(tensors: list[Tensor]) -> list[float]:
    """The sum of squares of each. On a CPU by a dot product, several times as fast as a norm; in float64 where squares
    of float32 leave its range."""
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(tensors)).double().square().tolist()
    found = [float(torch.dot(tensor, tensor)) for tensor in tensors]
    safe = [1e-25 < value < 1e35 for value in found]
    wide = zip(tensors, found, safe, strict=True)
    return [value if fine else float(tensor.double().square().sum()) for tensor, value, fine in wide]


def _two(spec: ShardSpec) -> int:
    return 2
