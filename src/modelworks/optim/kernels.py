"""The family's formulas in one pass over memory, compiled by numba: what a CPU runs instead of torch's operations.

A formula of several operations goes several times through memory in torch, and through the cache at best; an update is
bound by memory, so here each number is read and written once. Each function takes flat, contiguous arrays of one dtype,
float32 or float64, of one stretch of a tensor, and scalars of the same dtype. The formulas are explained where they are
called (`lion`, `trust`, `adafactor`); the torch path there and these come to the same but for rounding.

No arithmetic is reordered, but in sums of squares, where it could not be vectorised otherwise; sums are in float64.
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

_SCRATCH = 2048  # elements; a few such arrays stay in the first-level cache


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
    """Moves both moments. sums: squares of the weights and of the direction."""
    direction = np.empty(_SCRATCH, value.dtype)
    sums[0] = sums[1] = 0.0
    for start in range(0, value.size, _SCRATCH):
        n = min(_SCRATCH, value.size - start)
        for i in range(n):
            at = start + i
            g = gradient[at]
            m = first[at] + (g - first[at]) * weight1
            v = second[at] * keep2 + (weight2 * g) * g
            first[at], second[at] = m, v
            direction[i] = m * scale1 / (np.sqrt(v) * scale2 + eps) + decay * value[at]
        sums[0] += square_sum(value, start, n)
        sums[1] += square_sum(direction, 0, n)


@kernel
def lamb_apply(
    value: Array, first: Array, second: Array, rate: float, scale1: float, scale2: float, eps: float, decay: float
) -> None:
    for i in range(value.size):
        direction = first[i] * scale1 / (np.sqrt(second[i]) * scale2 + eps) + decay * value[i]
        value[i] -= rate * direction


@kernel
def two_square_sums(one: Array, other: Array, sums: Array) -> None:
    sums[0] = square_sum(one, 0, one.size)
    sums[1] = square_sum(other, 0, other.size)


@kernel
def square_sums(one: Array, sums: Array) -> None:
    sums[0] = square_sum(one, 0, one.size)


@kernel
def lars_apply(value: Array, gradient: Array, buffer: Array, rate: float, decay: float, momentum: float) -> None:
    for i in range(value.size):
        moved = buffer[i] * momentum + rate * (gradient[i] + decay * value[i])
        buffer[i] = moved
        value[i] -= moved


@reduction
def square_sum(array: Array, start: int, n: int) -> float:
    total = 0.0
    for i in range(start, start + n):
        wide = np.float64(array[i])
        total += wide * wide
    return total


@kernel
def row_column_squares(gradient: Array, rows: Array, columns: Array, n_rows: int, n_columns: int) -> None:
    """Of matrices of n_rows rows one after the other, or of some rows of one. rows: set to their sums of squares,
    float64. columns: theirs are added."""
    for row in range(rows.size):
        start, to = row * n_columns, row // n_rows * n_columns
        rows[row] = square_sum(gradient, start, n_columns)
        for i in range(n_columns):
            wide = np.float64(gradient[start + i])
            columns[to + i] += wide * wide


@kernel
def factored_squares(
    gradient: Array, row_scales: Array, column_scales: Array, sums: Array, n_rows: int, n_columns: int
) -> None:
    """sums: for each matrix, the squares of gradient times the scales of its row and column are added."""
    scaled = np.empty(n_columns, gradient.dtype)
    for row in range(row_scales.size):
        matrix = row // n_rows
        for i in range(n_columns):
            scaled[i] = gradient[row * n_columns + i] * row_scales[row] * column_scales[matrix * n_columns + i]
        sums[matrix] += square_sum(scaled, 0, n_columns)


@kernel
def factored_apply(
    value: Array, gradient: Array, row_scales: Array, column_scales: Array, n_rows: int, n_columns: int, keep: float,
    size: float,
) -> None:  # fmt: skip
    for row in range(row_scales.size):
        to = row // n_rows * n_columns
        for i in range(n_columns):
            at = row * n_columns + i
            update = gradient[at] * row_scales[row] * column_scales[to + i]
            value[at] = value[at] * keep - size * update


@kernel
def factored_apply_moment(
    value: Array, gradient: Array, moment: Array, row_scales: Array, column_scales: Array, n_rows: int, n_columns: int,
    keep: float, size: float, weight: float,
) -> None:  # fmt: skip
    """weight: of the update in its running mean."""
    for row in range(row_scales.size):
        to = row // n_rows * n_columns
        for i in range(n_columns):
            at = row * n_columns + i
            update = gradient[at] * row_scales[row] * column_scales[to + i]
            moved = moment[at] + (size * update - moment[at]) * weight
            moment[at] = moved
            value[at] = value[at] * keep - moved
