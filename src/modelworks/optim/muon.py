"""Muon: momentum, orthogonalised (Jordan et al. 2024, kellerjordan.github.io/posts/muon), with AdamW for the rest.

    b <- momentum b + (1 - momentum) g
    u = b, or, Nesterov: momentum b + (1 - momentum) g
    p <- p (1 - lr decay)        p <- p - lr scale orthogonal(u)

`modelworks.optim.orthogonal` says which parameters are matrices, how they are orthogonalised and what `scale` is. The
matrix is the logical one: slices of momentum are put together on one rank, and each rank computes its share of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelworks.layout import ShardSpec
from modelworks.optim.adam import Adam
from modelworks.optim.orthogonal import UpdateScale, is_matrix, newton_schulz, update_scale, whole_here
from modelworks.optim.pieces import Piece, Step
from modelworks.optim.sums import Sums


@dataclass(frozen=True)
class Muon:
    """rest: AdamW, for what is no matrix. dtype: that Newton-Schulz computes in; the state's own by default."""

    momentum: float
    nesterov: bool
    steps: int
    scale: UpdateScale
    rest: Adam
    dtype: torch.dtype | None = None

    def states(self, spec: ShardSpec) -> dict[str, ShardSpec]:
        return {"momentum_buffer": spec} if is_matrix(spec.name, spec.shape) else self.rest.states(spec)

    def update(self, pieces: Sequence[Piece], step: Step, sums: Sums) -> None:
        matrices = {piece.name: piece for piece in pieces if is_matrix(piece.name, piece.spec.shape)}
        self.rest.update([piece for piece in pieces if piece.name not in matrices], step, sums)
        together = (sums.split and sums.split.matrices) or whole_here
        updates = together(
            {name: self._direction(piece) for name, piece in matrices.items()},
            {name: piece.spec for name, piece in matrices.items()},
            lambda matrix: newton_schulz(matrix, steps=self.steps, dtype=self.dtype),
        )
        for name, piece in matrices.items():
            lr = step.lr * piece.options.lr_multiplier
            piece.value.mul_(1.0 - lr * piece.options.weight_decay)
            piece.value.add_(updates[name], alpha=-lr * update_scale(piece.spec.shape, self.scale))

    def _direction(self, piece: Piece) -> Tensor:
        buffer = piece.state["momentum_buffer"]
        buffer.lerp_(piece.gradient, 1.0 - self.momentum)
        return piece.gradient.lerp(buffer, self.momentum) if self.nesterov else buffer
