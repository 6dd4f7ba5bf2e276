"""The family's formulas in one pass over memory, compiled by numba: what a CPU runs instead of torch's operations.

A formula of several operations goes several times through memory in torch, and through the cache at best; an update is
bound by memory, so here each number is read and written once. Each function takes flat, contiguous arrays of one dtype,
float32 or float64, of one stretch of a tensor, and scalars of the same dtype. The formulas are explained where they are
called (`lion`, `trust`, `adafactor`); the torch path there and these come to the same but for rounding.

Loops run over slices from 0: an index that might be negative would have to be looked at, element by element.

No arithmetic is reordered, but in sums of squares, where it could not be vectorised otherwise; sums are in float64,
LAMB's but for a few numbers at a time.
Machine code is kept on disk (beside this file or, where that cannot be written, in the user's cache), so that only the
first process compiles. Import it through `modelworks.optim.compiled`, which knows whether it can be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numba import njit

F = TypeVar("F", bound=Callable[..., Any])
Array = Any  # of numpy, as numba sees it

_LANES = 512  # elements; a few such arrays stay in the first-level cache
_BLOCK = 32 * _LANES
_LEAST, _MOST = 1e-25, 1e35  # sums of squares in float32 that nothing underflowed out of, or overflowed


def kernel(function: F) -> F:
    """Compiled on first use. Division by zero gives infinity, as in torch, and threads run it side by side."""
    return _compiled(function, fastmath=False)


def reduction(function: F) -> F:
    """As `kernel`, but sums may be taken in any order, the same in each call."""
    return _compiled(function, fastmath={"reassoc", "nsz"})


def _compiled(function: F, fastmath: Any) -> F:
    options = {"nogil": True, "error_model": "numpy", "fastmath": fastmath}
    try:
        made: F = njit(cache=True, **options)(function)
    except RuntimeError:  # no place on this machine can be written
        made = njit(**options)(function)
    return made


@kernel
def lion(value: Array, gradient: Array, average: Array, lr: float, keep: float, ahead: float, weight: float) -> None:
    """keep: 1 - lr decay. ahead, weight: of the gradient, in the direction and in the average that is kept."""
    zero = value.dtype.type(0)
    for i in range(value.size):
        apart = gradient[i] - average[i]
        direction = average[i] + apart * ahead
        value[i] = value[i] * keep - (lr if direction > zero else (-lr if direction < zero else zero))
        average[i] += apart * weight


@kernel
def lamb_moments(
    value: Array, gradient: Array, first: Array, second: Array, sums: Array, weight1: float, weight2: float,
    keep2: float, scale1: float, scale2: float, eps: float, decay: float,
) -> None:  # fmt: skip
    """Moves both moments. sums: squares of the weights and of the direction.

    Squares are added up in as many lanes as a slice is long, so that adding keeps pace with memory, and in the arrays'
    own dtype for a block only: 32 numbers a lane, which costs a relative 2e-6 at most. Where they leave the range of
    float32 the block is gone through again.
    """
    lanes1, lanes2 = np.empty(_LANES, value.dtype), np.empty(_LANES, value.dtype)
    sums[0] = sums[1] = 0.0
    for first_of_block in range(0, value.size, _BLOCK):
        end = min(first_of_block + _BLOCK, value.size)
        lanes1[:] = 0
        lanes2[:] = 0
        for start in range(first_of_block, end, _LANES):
            stop = min(start + _LANES, end)
            p, g, m, v = value[start:stop], gradient[start:stop], first[start:stop], second[start:stop]
            for i in range(p.size):
                moved1 = m[i] + (g[i] - m[i]) * weight1
                moved2 = v[i] * keep2 + (weight2 * g[i]) * g[i]
                direction = moved1 * scale1 / (np.sqrt(moved2) * scale2 + eps) + decay * p[i]
                m[i], v[i] = moved1, moved2
                lanes1[i] += p[i] * p[i]
                lanes2[i] += direction * direction
        one, other = _total(lanes1), _total(lanes2)
        if not (_LEAST < one < _MOST and _LEAST < other < _MOST):
            one = other = 0.0
            for i in range(first_of_block, end):
                direction = first[i] * scale1 / (np.sqrt(second[i]) * scale2 + eps) + decay * value[i]
                one += np.float64(value[i]) * np.float64(value[i])
                other += np.float64(direction) * np.float64(direction)
        sums[0] += one
        sums[1] += other


@kernel
def lamb_apply(
    value: Array, first: Array, second: Array, rate: float, scale1: float, scale2: float, eps: float, decay: float
) -> None:
    for i in range(value.size):
        direction = first[i] * scale1 / (np.sqrt(second[i]) * scale2 + eps) + decay * value[i]
        value[i] -= rate * direction


@kernel
def two_square_sums(one: Array, other: Array, sums: Array) -> None:
    sums[0] = square_sum(one)
    sums[1] = square_sum(other)


@kernel
def square_sums(one: Array, sums: Array) -> None:
    sums[0] = square_sum(one)


@kernel
def lars_apply(value: Array, gradient: Array, buffer: Array, rate: float, decay: float, momentum: float) -> None:
    for i in range(value.size):
        moved = buffer[i] * momentum + rate * (gradient[i] + decay * value[i])
        buffer[i] = moved
        value[i] -= moved


@reduction
def square_sum(array: Array) -> float:
    total = 0.0
    for i in range(array.size):
        wide = np.float64(array[i])
        total += wide * wide
    return total


@reduction
def _total(array: Array) -> float:
    total = 0.0
    for i in range(array.size):
        total += np.float64(array[i])
    return total


@kernel
def row_column_squares(gradient: Array, rows: Array, columns: Array, n_rows: int, n_columns: int) -> None:
    """Of matrices of n_rows rows one after the other, or of some rows of one. rows: set to their sums of squares,
    float64. columns: theirs are added."""
    for row in range(rows.size):
        g, column = _row(gradient, row, n_columns), _row(columns, row // n_rows, n_columns)
        rows[row] = square_sum(g)
        for i in range(n_columns):
            column[i] += np.float64(g[i]) * np.float64(g[i])


@kernel
def factored_squares(
    gradient: Array, row_scales: Array, column_scales: Array, sums: Array, n_rows: int, n_columns: int
) -> None:
    """sums: for each matrix, the squares of gradient times the scales of its row and column are added."""
    scaled = np.empty(n_columns, gradient.dtype)
    for row in range(row_scales.size):
        g, column = _row(gradient, row, n_columns), _row(column_scales, row // n_rows, n_columns)
        scale = row_scales[row]
        for i in range(n_columns):
            scaled[i] = g[i] * scale * column[i]
        sums[row // n_rows] += square_sum(scaled)


@kernel
def factored_apply(
    value: Array, gradient: Array, row_scales: Array, column_scales: Array, n_rows: int, n_columns: int, keep: float,
    size: float,
) -> None:  # fmt: skip
    for row in range(row_scales.size):
        p, g = _row(value, row, n_columns), _row(gradient, row, n_columns)
        column, scale = _row(column_scales, row // n_rows, n_columns), row_scales[row]
        for i in range(n_columns):
            p[i] = p[i] * keep - size * (g[i] * scale * column[i])


@kernel
def factored_apply_moment(
    value: Array, gradient: Array, moment: Array, row_scales: Array, column_scales: Array, n_rows: int, n_columns: int,
    keep: float, size: float, weight: float,
) -> None:  # fmt: skip
    """weight: of the update in its running mean."""
    for row in range(row_scales.size):
        p, g, m = _row(value, row, n_columns), _row(gradient, row, n_columns), _row(moment, row, n_columns)
        column, scale = _row(column_scales, row // n_rows, n_columns), row_scales[row]
        for i in range(n_columns):
            m[i] += (size * (g[i] * scale * column[i]) - m[i]) * weight
            p[i] = p[i] * keep - m[i]


@kernel
def _row(array: Array, row: int, length: int) -> Array:
    return array[row * length : (row + 1) * length]
