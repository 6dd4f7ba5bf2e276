"""Adafactor (Shazeer & Stern 2018, 1804.04235, algorithms 4 to 6): a second moment of rows and columns.

    R, C   running means of g^2 + eps over the columns and over the rows, with b2 = 1 - t^-exponent
    v = R C / mean(R)        u = g / sqrt(v)        u <- u / max(1, RMS(u) / update_clip)
    lr_t = min(lr, 1 / sqrt(t)) max(min_scale, RMS(p))
    p <- p (1 - lr decay)    p <- p - lr_t u

Rows and columns are the last two dimensions, each matrix of a stack (experts) for itself; a tensor with fewer keeps the
whole moment. Root mean squares are of the whole logical tensor. `relative_step` bounds the rate by 1 / sqrt(t);
`scale_parameter` multiplies it by the weights' size. A first moment, of updates and not of gradients, is optional, as
in section 7.2. Decay takes the schedule's rate, as in torch.

Of tensors that are cut between ranks the sums of rows and columns are added up over ranks: one collective for all
tensors, and a second one for mean(R) and RMS(u), which can only be known after the first. A rank keeps the rows and the
columns of its slice; ranks with the same rows have the same numbers for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from modelworks.layout import ShardSpec
from modelworks.optim.compiled import STRETCH, Job, Kernels, kernels_for, run
from modelworks.optim.pieces import Piece, Step, batch_elements
from modelworks.optim.sums import Sums

ROWS, COLUMNS, WHOLE = "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq"


@dataclass(frozen=True)
class Adafactor:
    eps: float
    decay_exponent: float
    update_clip: float
    min_scale: float
    relative_step: bool
    scale_parameter: bool
    first_moment: float | None = None

    def states(self, spec: ShardSpec) -> dict[str, ShardSpec]:
        moment = {} if self.first_moment is None else {"exp_avg": spec}
        return ({ROWS: _without(spec, -1), COLUMNS: _without(spec, -2)} if _factored(spec) else {WHOLE: spec}) | moment

    def update(self, pieces: Sequence[Piece], step: Step, sums: Sums) -> None:
        pieces = [piece for piece in pieces if piece.value.numel()]
        first = sums.total({piece.name: self._first_sums(piece) for piece in pieces}, _n_first)
        for piece in pieces:
            self._move_moments(piece, first[piece.name], step)
        second = sums.total({piece.name: self._second_sums(piece) for piece in pieces}, _n_second)
        for piece in pieces:
            n = math.prod(piece.spec.shape)
            self._apply(piece, step, math.sqrt(float(first[piece.name][0]) / n), second[piece.name])

    def _first_sums(self, piece: Piece) -> Tensor:
        """Squares of all weights; then, where it is factored, of the gradient's rows and columns, each at their places
        in the whole tensor."""
        weight = _square_sum(piece)
        if not _factored(piece.spec):
            return weight
        parts = [weight]
        for dimension, squares in zip((-1, -2), _squares_of_rows_and_columns(piece), strict=True):
            held = _without(piece.spec, dimension)
            whole = weight.new_zeros(held.shape)
            whole[held.slices] = squares.view(held.local_shape)
            parts.append(whole.flatten())
        return torch.cat(parts)

    def _move_moments(self, piece: Piece, sums: Tensor, step: Step) -> None:
        weight = step.number**-self.decay_exponent  # 1 - b2
        if not _factored(piece.spec):
            squares = piece.gradient.square().add_(self.eps).clamp_(max=_largest(piece.value.dtype))
            piece.state[WHOLE].lerp_(squares, weight)
            return
        rows, columns = (_without(piece.spec, dimension) for dimension in (-1, -2))
        _, *parts = sums.split_with_sizes([1, math.prod(rows.shape), math.prod(columns.shape)])
        for kind, held, part, dimension in zip((ROWS, COLUMNS), (rows, columns), parts, (-1, -2), strict=True):
            means = part.view(held.shape)[held.slices] / piece.spec.shape[dimension] + self.eps
            means = means.clamp_(max=_largest(piece.value.dtype))
            piece.state[kind].lerp_(means.to(piece.value.dtype), weight)

    def _second_sums(self, piece: Piece) -> Tensor:
        """Squares of g / sqrt(v); of a factored tensor, for each matrix of the stack: those of g / sqrt(R C), and R."""
        if not _factored(piece.spec):
            update = piece.gradient * piece.state[WHOLE].rsqrt()
            squares: Tensor = torch.linalg.vector_norm(update, dtype=torch.float64).square()
            return squares.view(1)
        sums = torch.zeros(2, *piece.spec.shape[:-2], dtype=torch.float64, device=piece.value.device).view(2, -1)
        stacked = _stack_index(piece.spec, sums.device)
        sums[0].index_add_(0, stacked, _squares_of_updates(piece))
        if piece.spec.bounds[-1][0] == 0:  # of the ranks with these rows, the one with the first columns
            sums[1, stacked] = piece.state[ROWS].double().sum(-1).view(-1)
        return sums.flatten()

    def _apply(self, piece: Piece, step: Step, weight: float, sums: Tensor) -> None:
        """weight: root mean square of the parameter before the update."""
        spec, state = piece.spec, piece.state
        rate = step.lr * piece.options.lr_multiplier
        decay = 1.0 - rate * piece.options.weight_decay
        size = (max(self.min_scale, weight) if self.scale_parameter else 1.0) * (
            min(rate, step.number**-0.5) if self.relative_step else rate
        )
        if _factored(spec):
            means = sums.view(2, -1)[1] / spec.shape[-2]
            squares = float((sums.view(2, -1)[0] * means).sum())
            own = means[_stack_index(spec, means.device)].sqrt().to(piece.value.dtype).view(-1, 1, 1)
        else:
            squares = float(sums)
        clip = max(1.0, math.sqrt(squares / math.prod(spec.shape)) / self.update_clip)
        if not _factored(spec):
            update = piece.gradient * state[WHOLE].rsqrt()
            _change(piece.value, update, decay, size / clip, self.first_moment, state.get("exp_avg"))
            return
        if kernels := kernels_for(piece.value):
            run(self._jobs(kernels, piece, own, decay, size / clip))
            return
        for block in _blocks(piece, batch_elements(piece.value)):
            update = (block.gradient * (own[block.stack] * block.rows.rsqrt())).mul_(block.columns.rsqrt())
            _change(block.value, update, decay, size / clip, self.first_moment, block.moment)

    def _jobs(self, kernels: Kernels, piece: Piece, own: Tensor, decay: float, size: float) -> list[Job]:
        """The update of a factored tensor by a compiled kernel. own: a factor for each matrix."""
        jobs: list[Job] = []
        for block in _blocks(piece, STRETCH):
            scales = [own[block.stack] * block.rows.rsqrt(), block.columns.rsqrt()]
            tensors = [block.value, block.gradient, *scales]
            if block.moment is None or self.first_moment is None:
                jobs.append(kernels.job("factored_apply", tensors, block.sizes, [decay, size]))
            else:
                numbers = [decay, size, 1.0 - self.first_moment]
                jobs.append(kernels.job("factored_apply_moment", [*tensors, block.moment], block.sizes, numbers))
        return jobs


@dataclass(frozen=True)
class _Block:
    """Some rows of one matrix, or some matrices: (matrices, rows, columns). stack, part: which of those that are here,
    and which of their rows."""

    stack: slice
    part: tuple[slice, slice]
    value: Tensor
    gradient: Tensor
    rows: Tensor
    columns: Tensor
    moment: Tensor | None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """All rows of the block, rows of each matrix that are in it, columns."""
        n_matrices, n_rows, n_columns = self.gradient.shape
        return n_matrices * n_rows, n_rows, n_columns


def _blocks(piece: Piece, limit: int) -> Iterator[_Block]:
    """All of a factored tensor's slice, in parts of about `limit` elements."""
    *_, n_rows, n_columns = piece.value.shape
    shape = (-1, n_rows, n_columns)
    value, gradient = piece.value.view(shape), piece.gradient.reshape(shape)
    rows, columns = piece.state[ROWS].view(-1, n_rows, 1), piece.state[COLUMNS].view(-1, 1, n_columns)
    moment = piece.state["exp_avg"].view(shape) if "exp_avg" in piece.state else None
    matrices = max(1, limit // (n_rows * n_columns))
    length = n_rows if matrices > 1 else max(1, limit // n_columns)
    for begin in range(0, value.shape[0], matrices):
        stack = slice(begin, begin + matrices)
        for row in range(0, n_rows, length):
            part = (stack, slice(row, row + length))
            own = moment[part] if moment is not None else None
            yield _Block(stack, part, value[part], gradient[part], rows[part], columns[stack], own)


def _square_sum(piece: Piece) -> Tensor:
    """Of the weights, (1,), float64."""
    if kernels := kernels_for(piece.value):
        found: list[float] = []
        run(kernels.sums_in_stretches("square_sums", piece, ("value",), 1, (), found.extend))
        return torch.tensor(found, dtype=torch.float64)
    squares: Tensor = torch.linalg.vector_norm(piece.value, dtype=torch.float64).square().view(1)
    return squares


def _squares_of_rows_and_columns(piece: Piece) -> tuple[Tensor, Tensor]:
    """Sums of the gradient's squares, float64, for each matrix: (matrices, rows) and (matrices, columns)."""
    kernels = kernels_for(piece.value)
    *_, n_rows, n_columns = piece.value.shape
    if not kernels:
        gradient = piece.gradient.reshape(-1, n_rows, n_columns)
        rows, columns = (torch.linalg.vector_norm(gradient, dim=each).double().square() for each in (-1, -2))
        return rows, columns
    blocks = list(_blocks(piece, STRETCH))
    rows = torch.zeros(piece.value.numel() // (n_rows * n_columns), n_rows, dtype=torch.float64)
    columns = rows.new_zeros(rows.shape[0], n_columns)
    partial = [torch.zeros_like(columns[block.stack]) for block in blocks]
    run(
        [
            kernels.job("row_column_squares", [block.gradient, rows[block.part], part], block.sizes)
            for block, part in zip(blocks, partial, strict=True)
        ]
    )
    for block, part in zip(blocks, partial, strict=True):  # in order, whichever thread was first
        columns[block.stack] += part
    return rows, columns


def _squares_of_updates(piece: Piece) -> Tensor:
    """Of each matrix of a factored tensor that has a part here, the squares of g / sqrt(R C): float64."""
    kernels = kernels_for(piece.value)
    found = torch.zeros(math.prod(piece.value.shape[:-2]), dtype=torch.float64, device=piece.value.device)
    blocks = list(_blocks(piece, STRETCH if kernels else batch_elements(piece.value)))
    partial = [torch.zeros_like(found[block.stack]) for block in blocks]
    if kernels:
        run(
            [
                kernels.job(
                    "factored_squares",
                    [block.gradient, block.rows.rsqrt(), block.columns.rsqrt(), part],
                    block.sizes,
                )
                for block, part in zip(blocks, partial, strict=True)
            ]
        )
    for block, part in zip(blocks, partial, strict=True):
        if not kernels:
            update = block.gradient * block.rows.rsqrt() * block.columns.rsqrt()
            part += torch.linalg.vector_norm(update, dim=(-1, -2), dtype=torch.float64).square()
        found[block.stack] += part
    return found


def _change(
    value: Tensor, update: Tensor, decay: float, size: float, first_moment: float | None, moment: Tensor | None
) -> None:
    if decay != 1.0:
        value.mul_(decay)
    if moment is not None and first_moment is not None:
        update = moment.lerp_(update.mul_(size), 1.0 - first_moment)
        size = 1.0
    value.add_(update, alpha=-size)


def _largest(dtype: torch.dtype) -> float:
    """Of a mean of squares: an infinite one would make 0 or NaN of all updates after it."""
    return torch.finfo(dtype).max / 32


def _factored(spec: ShardSpec) -> bool:
    return len(spec.shape) >= 2


def _without(spec: ShardSpec, dimension: int) -> ShardSpec:
    """What is left of a slice when one of the last two dimensions is summed; nothing of a slice without elements."""
    keep = [index for index in range(len(spec.shape)) if index != len(spec.shape) + dimension]
    bounds = [spec.bounds[index] if spec.n_local else (spec.bounds[index][0],) * 2 for index in keep]
    return replace(spec, shape=tuple(spec.shape[index] for index in keep), bounds=tuple(bounds))


def _stack_index(spec: ShardSpec, device: torch.device) -> Tensor:
    """The numbers, within the whole stack, of the matrices that this slice has a part of."""
    numbers = torch.arange(math.prod(spec.shape[:-2]), device=device).view(spec.shape[:-2])
    return numbers[spec.slices[:-2]].reshape(-1)


def _n_first(spec: ShardSpec) -> int:
    return 1 + sum(math.prod(_without(spec, each).shape) for each in (-1, -2)) if _factored(spec) else 1


def _n_second(spec: ShardSpec) -> int:
    return 2 * math.prod(spec.shape[:-2]) if _factored(spec) else 1
