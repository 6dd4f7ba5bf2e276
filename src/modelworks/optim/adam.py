"""Adam (Kingma & Ba 2014, 1412.6980) and AdamW (Loshchilov & Hutter 2017, 1711.05101).

    m <- b1 m + (1 - b1) g            v <- b2 v + (1 - b2) g^2
    p <- p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

AdamW first decays the weights themselves, p <- p (1 - lr decay); Adam adds decay p to the gradient (L2), which its
second moment then divides again.

The update is elementwise, so any slice of a parameter can be updated by whoever holds it. torch's fused kernel does the
arithmetic in one pass over memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from modelworks.layout import ShardSpec
from modelworks.optim.groups import ParameterOptions
from modelworks.optim.pieces import Piece, Step, alike
from modelworks.optim.sums import Sums


@dataclass(frozen=True)
class Adam:
    """decoupled: AdamW."""

    betas: tuple[float, float]
    eps: float
    decoupled: bool

    def states(self, spec: ShardSpec) -> dict[str, ShardSpec]:
        return {"exp_avg": spec, "exp_avg_sq": spec}

    def update(self, pieces: Sequence[Piece], step: Step, sums: Sums) -> None:
        for group in alike(pieces):
            adam_step(
                [piece.value for piece in group],
                [piece.gradient for piece in group],
                [piece.state["exp_avg"] for piece in group],
                [piece.state["exp_avg_sq"] for piece in group],
                step=step.number,
                lr=step.lr * group[0].options.lr_multiplier,
                betas=self.betas,
                eps=self.eps,
                weight_decay=group[0].options.weight_decay,
                decoupled=self.decoupled,
            )

    def in_tiles(self, step: Step, options: ParameterOptions) -> tuple[str, tuple[float, ...]]:
        """The kernel for moments in 8 bits, and its scalars."""
        (beta1, beta2), lr, decay = self.betas, step.lr * options.lr_multiplier, options.weight_decay
        scales = 1.0 / (1.0 - beta1**step.number), (1.0 - beta2**step.number) ** -0.5
        decays = (1.0 - lr * decay, 0.0) if self.decoupled else (1.0, decay)
        return "adam_tiles", (1.0 - beta1, 1.0 - beta2, beta2, *scales, self.eps, lr, *decays)


def adam_step(
    values: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    """One update in place, of tensors that share dtype and device."""
    device = values[0].device
    if device.type in ("cpu", "cuda"):
        kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
        count = torch.full((), float(step), dtype=torch.float32, device=device)  # only read: one serves all
        kernel(
            values, gradients, exp_avgs, exp_avg_sqs, [], [count] * len(values),
            lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
        )  # fmt: skip
        return
    formula = adamw if decoupled else adam
    before = [torch.full((), float(step - 1), dtype=torch.float32) for _ in values]
    formula(
        values, gradients, exp_avgs, exp_avg_sqs, [], before,
        lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
    )  # fmt: skip
