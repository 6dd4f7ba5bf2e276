"""Lion (Chen et al. 2023, 2302.06675, algorithm 2): the sign of a momentum that looks ahead.

    p <- p (1 - lr decay)        p <- p - lr sign(b1 m + (1 - b1) g)        m <- b2 m + (1 - b2) g

Every element moves by exactly the rate; where momentum and gradient are 0 it stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from modelworks.layout import ShardSpec
from modelworks.optim.compiled import kernels_for, run
from modelworks.optim.groups import ParameterOptions
from modelworks.optim.pieces import Piece, Step, alike, batches
from modelworks.optim.sums import Sums


@dataclass(frozen=True)
class Lion:
    betas: tuple[float, float]

    def states(self, spec: ShardSpec) -> dict[str, ShardSpec]:
        return {"exp_avg": spec}

    def update(self, pieces: Sequence[Piece], step: Step, sums: Sums) -> None:
        for group in alike(pieces):
            options = group[0].options
            lr = step.lr * options.lr_multiplier
            if kernels := kernels_for(group[0].value):
                columns, numbers = ("value", "gradient", "exp_avg"), self._scalars(step, options)
                run([job for piece in group for job in kernels.in_stretches("lion", piece, columns, numbers)])
                continue
            for batch in batches(group, "exp_avg"):
                values, gradients, averages = batch.columns
                direction = torch._foreach_lerp(averages, gradients, 1.0 - self.betas[0])
                torch._foreach_sign_(direction)
                if options.weight_decay:
                    torch._foreach_mul_(values, 1.0 - lr * options.weight_decay)
                torch._foreach_add_(values, direction, alpha=-lr)
                torch._foreach_lerp_(averages, gradients, 1.0 - self.betas[1])

    def in_tiles(self, step: Step, options: ParameterOptions) -> tuple[str, tuple[float, ...]]:
        """The kernel for a momentum in 8 bits, and its scalars."""
        return "lion_tiles", self._scalars(step, options)

    def _scalars(self, step: Step, options: ParameterOptions) -> tuple[float, ...]:
        lr = step.lr * options.lr_multiplier
        return lr, 1.0 - lr * options.weight_decay, *(1.0 - beta for beta in self.betas)
