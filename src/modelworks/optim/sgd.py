"""Stochastic gradient descent with momentum (Polyak 1964; Nesterov 1983 as Sutskever et al. 2013 write it).

    g <- g + decay p        b <- momentum b + g        p <- p - lr b         or, Nesterov: p <- p - lr (g + momentum b)

Decay goes through the gradient (L2), as in torch. Without momentum nothing is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.optim.sgd import sgd

from modelworks.layout import ShardSpec
from modelworks.optim.pieces import Piece, Step, alike
from modelworks.optim.sums import Sums


@dataclass(frozen=True)
class Sgd:
    momentum: float
    nesterov: bool = False

    def states(self, spec: ShardSpec) -> dict[str, ShardSpec]:
        return {"momentum_buffer": spec} if self.momentum else {}

    def update(self, pieces: Sequence[Piece], step: Step, sums: Sums) -> None:
        for group in alike(pieces):
            options = group[0].options
            sgd(
                [piece.value for piece in group],
                [piece.gradient for piece in group],
                [piece.state.get("momentum_buffer") for piece in group],
                fused=group[0].value.device.type in ("cpu", "cuda"),
                foreach=False,
                weight_decay=options.weight_decay,
                momentum=self.momentum,
                lr=step.lr * options.lr_multiplier,
                dampening=0.0,
                nesterov=self.nesterov,
                maximize=False,
            )
