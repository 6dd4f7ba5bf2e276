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
moments again, which costs less than to write and read it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelworks.layout import ShardSpec
from modelworks.optim.adam import adam_step
from modelworks.optim.compiled import STRETCH, in_stretches, kernels_for, sums_in_stretches
from modelworks.optim.pieces import Batch, Piece, Step, alike, batches
from modelworks.optim.sums import Sums

_CACHED = 1 << 20  # elements; of LAMB's four tensors 16 MB in float32, what a third-level cache holds


@dataclass(frozen=True)
class Lamb:
    betas: tuple[float, float]
    eps: float
    clamp: tuple[float, float] | None = None

    def states(self, spec: ShardSpec) -> dict[str, ShardSpec]:
        return {"exp_avg": spec, "exp_avg_sq": spec}

    def update(self, pieces: Sequence[Piece], step: Step, sums: Sums) -> None:
        for some in _together(pieces, sums):
            norms = self._norms(some, step, sums)
            for group in alike(some):
                rates = [
                    step.lr * piece.options.lr_multiplier * self._ratio(norms[piece.name], piece) for piece in group
                ]
                if kernels := kernels_for(group[0].value):
                    decay = group[0].options.weight_decay
                    scalars = [(rate, *self._scales(step), self.eps, decay) for rate in rates]
                    columns = ("value", "exp_avg", "exp_avg_sq")
                    in_stretches(kernels.lamb_apply, group, columns, scalars, backwards=True)
                else:
                    self._apply(group, rates, step)

    def _norms(self, pieces: Sequence[Piece], step: Step, sums: Sums) -> Mapping[str, tuple[float, float]]:
        """Of weights and direction. Moves the moments."""

        def squares_of(group: Sequence[Piece]) -> list[list[float]]:
            decay = group[0].options.weight_decay
            if kernels := kernels_for(group[0].value):
                beta1, beta2 = self.betas
                scalars = [(1.0 - beta1, 1.0 - beta2, beta2, *self._scales(step), self.eps, decay)] * len(group)
                columns = ("value", "gradient", "exp_avg", "exp_avg_sq")
                return sums_in_stretches(kernels.lamb_moments, group, columns, 2, scalars)
            return _squares_in_batches(group, ("exp_avg", "exp_avg_sq"), direction_of)

        def direction_of(group: Sequence[Piece], batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
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

        return _norms(pieces, squares_of, sums)

    def _scales(self, step: Step) -> tuple[float, float]:
        """What takes the bias out of the first moment, and out of the second's root."""
        first, second = (1.0 - beta**step.number for beta in self.betas)
        return 1.0 / first, 1.0 / math.sqrt(second)

    def _apply(self, group: Sequence[Piece], rates: Sequence[float], step: Step) -> None:
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

    def _ratio(self, norms: tuple[float, float], piece: Piece) -> float:
        weight, update = norms
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
        for some in _together(pieces, sums):
            norms = _norms(some, self._squares, sums)
            for group in alike(some):
                decay = group[0].options.weight_decay
                rates = [
                    step.lr * piece.options.lr_multiplier * self._ratio(norms[piece.name], piece) for piece in group
                ]
                if self.momentum and (kernels := kernels_for(group[0].value)):
                    scalars = [(rate, decay, self.momentum) for rate in rates]
                    columns = ("value", "gradient", "momentum_buffer")
                    in_stretches(kernels.lars_apply, group, columns, scalars, backwards=True)
                else:
                    self._apply(group, rates)

    def _squares(self, group: Sequence[Piece]) -> list[list[float]]:
        if kernels := kernels_for(group[0].value):
            return sums_in_stretches(kernels.two_square_sums, group, ("value", "gradient"), 2, [()] * len(group))
        return _squares_in_batches(group, (), lambda group, batch: (batch.columns[0], batch.columns[1]))

    def _apply(self, group: Sequence[Piece], rates: Sequence[float]) -> None:
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

    def _ratio(self, norms: tuple[float, float], piece: Piece) -> float:
        weight, gradient = norms
        if not (piece.options.trust and weight and gradient):
            return 1.0
        return self.coefficient * weight / (gradient + piece.options.weight_decay * weight + self.eps)


def _together(pieces: Sequence[Piece], sums: Sums) -> Iterator[Sequence[Piece]]:
    """Pieces whose norms are taken before any of them moves. All, where ranks must add theirs up: one collective. Where
    nobody else has a part, as few as keep all threads busy, so that the second pass finds some of them in the cache."""
    if not sums.all_here:
        yield pieces
        return
    enough = max(_CACHED, STRETCH * torch.get_num_threads())
    some: list[Piece] = []
    size = 0
    for piece in pieces:
        some.append(piece)
        size += piece.value.numel()
        if size >= enough:
            yield some
            some, size = [], 0
    if some:
        yield some


def _norms(
    pieces: Sequence[Piece], squares_of: Callable[[Sequence[Piece]], list[list[float]]], sums: Sums
) -> Mapping[str, tuple[float, float]]:
    """By parameter, the norms of the two logical tensors whose parts' squares `squares_of` sums for each piece."""
    found = {piece.name: [0.0, 0.0] for piece in pieces}
    for group in alike(pieces):
        found |= {piece.name: own for piece, own in zip(group, squares_of(group), strict=True)}
    squares = {name: torch.tensor(both, dtype=torch.float64) for name, both in found.items()}
    totals = sums.total(squares, _two)
    roots = torch.stack(list(totals.values())).sqrt().tolist() if totals else []
    return {name: (first, second) for name, (first, second) in zip(totals, roots, strict=True)}


def _squares_in_batches(
    group: Sequence[Piece],
    kinds: tuple[str, ...],
    pair: Callable[[Sequence[Piece], Batch], tuple[list[Tensor], list[Tensor]]],
) -> list[list[float]]:
    """For each piece, the squares of the two tensors that `pair` makes of each batch."""
    found = [[0.0, 0.0] for _ in group]
    for batch in batches(group, *kinds):
        for which, tensors in enumerate(pair(group, batch)):
            for owner, square in zip(batch.owners, _squares(tensors), strict=True):
                found[owner][which] += square
    return found


def _squares(tensors: list[Tensor]) -> list[float]:
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
