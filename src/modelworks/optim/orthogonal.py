"""The nearest orthogonal matrix by Newton-Schulz, and how far Muon goes along it.

Of a matrix U S V^T it is U V^T: all singular values become 1. With X0 = M / ||M||_F, whose singular values are at
most 1, each step is an odd polynomial of X, and so one of its singular values alone:

    X <- a X + (b A + c A^2) X,    A = X X^T       (of a tall matrix, its transpose is taken)

The coefficients (3.4445, -4.7750, 2.0315) are Keller Jordan's (2024, kellerjordan.github.io/posts/muon): steepest at
0, so that small singular values grow fastest, and not convergent: after five steps they lie within about 0.7 to 1.2.

Scaling of the update (m rows, n columns):
    original          sqrt(max(1, m / n))       Keller Jordan's Muon; its rate is not AdamW's
    match_rms_adamw   0.2 sqrt(max(m, n))       Liu et al. 2025 (2502.16982, Moonshot): an orthogonal matrix has a root
                      mean square of 1 / sqrt(max(m, n)); AdamW's updates have about 0.2, so its rate and decay serve

Matrices are those of the blocks. Embeddings and the head have rows that are looked up or compared one by one, and norms
and biases are vectors: these are AdamW's. Experts are stacked along the first dimension, and each is a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from modelworks.layout import ShardSpec

UpdateScale = Literal["original", "match_rms_adamw"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether Muon orthogonalises this parameter of a model; the others are AdamW's. A name without a dot is nobody's
    of our models, and then the shape alone tells."""
    return len(shape) >= 2 and (name.startswith("blocks.") or "." not in name)


def newton_schulz(
    matrix: Tensor,
    *,
    steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """(..., m, n): nearly orthogonal, of the same shape and dtype. dtype: to compute in; the matrix's own by default.

    A matrix of zeros stays one.
    """
    a, b, c = coefficients
    x = matrix.to(dtype or matrix.dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    # The largest magnitude first: squares of large or tiny gradients leave the range of float32.
    largest = x.abs().amax((-2, -1), keepdim=True)
    x = x / torch.where(largest == 0, 1.0, largest)
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    result: Tensor = x.mT if tall else x
    return result.to(matrix.dtype)


def update_scale(shape: Sequence[float], kind: UpdateScale) -> float:
    """By what the orthogonal matrix is multiplied, besides the rate. shape: of the whole matrix, or a stack of them."""
    rows, columns = shape[-2:]
    if kind == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


class WholeMatrices(Protocol):
    """Computes something of whole matrices where each rank holds slices."""

    def __call__(
        self, slices: Mapping[str, Tensor], specs: Mapping[str, ShardSpec], compute: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """slices: of this rank, by name. specs: theirs. compute: from a whole matrix to one of the same shape.

        Returns this rank's slices of the results. All ranks call it together; each matrix is computed once.
        """


def whole_here(
    slices: Mapping[str, Tensor], specs: Mapping[str, ShardSpec], compute: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """`WholeMatrices` of a process that holds everything."""
    for name, spec in specs.items():
        if not spec.is_whole:
            raise ValueError(f"{name}: only {spec.bounds} of {spec.shape} is here, and a whole matrix is needed")
    return {name: compute(tensor) for name, tensor in slices.items()}
