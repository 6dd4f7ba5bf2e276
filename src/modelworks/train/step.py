"""One optimiser step: gradients of the global batch, clipped, applied.

    loss = sum over the global batch of w * -log p(target)  /  sum over the global batch of w

The denominator is known before the first micro-batch runs, so every micro-batch's sum is scaled by it and the
gradients simply add up. That is the invariant: however a batch is cut into micro-batches, and however unequal
their target counts, the gradients are the same up to rounding. (Averaging each micro-batch's mean, the common
mistake, weighs tokens of short micro-batches more.)

A loss or gradient norm that is not finite: under fp16 the step is skipped and the loss scale halved; in every
other precision it raises `NonFiniteStep` *before* anything is updated, so that the state is still good.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from modelworks.config import RunConfig, UserError
from modelworks.data.batch import Batch
from modelworks.models import AttentionContext, CausalContext, DocumentContext, DropoutKey, Transformer
from modelworks.optim import AdamW, clip_gradients
from modelworks.train.loss import vocabulary_loss
from modelworks.train.precision import LossScaler, Precision

_LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class StepResult:
    """loss: nats per target token, without z-loss and smoothing. grad_norm: of the unscaled gradients before
    clipping. applied: False where fp16 overflowed and the update was skipped."""

    loss: float
    grad_norm: float
    applied: bool


class NonFiniteStep(Exception):
    """Loss or gradients are not finite. rows: (first, end) of the global batch's rows whose loss is not; None where
    the loss is finite and only the gradient norm is not."""

    def __init__(self, loss: float, grad_norm: float, rows: tuple[int, int] | None) -> None:
        super().__init__(f"loss {loss}, gradient norm {grad_norm}")
        self.loss, self.grad_norm, self.rows = loss, grad_norm, rows


def train_step(
    model: Transformer,
    optimizer: AdamW,
    batch: Batch,
    config: RunConfig,
    *,
    step: int,
    lr: float,
    micro_batch: int,
    precision: Precision,
    scaler: LossScaler | None = None,
) -> StepResult:
    """Update the model once on a global batch. step: updates asked for so far, which keys the dropout masks."""
    scale = scaler.scale if scaler else 1.0
    gradients, losses = accumulate_gradients(
        model, batch, config, step=step, micro_batch=micro_batch, precision=precision, loss_scale=scale
    )
    if scale != 1.0:
        torch._foreach_mul_(list(gradients.values()), 1.0 / scale)
    settings = config.train
    norm = clip_gradients(gradients, settings.grad_clip, float(settings.grad_clip_norm))
    loss = float(losses.sum() / batch.target_weight())
    good = math.isfinite(norm) and math.isfinite(loss)
    if scaler:
        scaler.update(overflowed=not good)
    elif not good:
        raise NonFiniteStep(loss, norm, _bad_rows(losses, micro_batch, batch.n_rows))
    if good:
        optimizer.step(gradients, lr)
    for parameter in model.parameters():
        parameter.grad = None
    return StepResult(loss, norm, applied=good)


def accumulate_gradients(
    model: Transformer,
    batch: Batch,
    config: RunConfig,
    *,
    step: int,
    micro_batch: int,
    precision: Precision,
    loss_scale: float = 1.0,
) -> tuple[Mapping[str, Tensor], Tensor]:
    """Gradients of `loss_scale` times the batch's loss by parameter name, and each micro-batch's summed loss.

    The gradients of bf16 and fp16 parameters are summed in float32: a sum of many small terms would stop growing.
    """
    total = float(batch.target_weight())
    if total <= 0:
        raise UserError(f"the batch of step {step} has no target tokens: every loss weight is 0")
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    device = next(iter(parameters.values())).device
    wide_sums: dict[str, Tensor] = {}
    losses = []
    for index, part in enumerate(batch.split(micro_batch)):
        part = part.to(device)
        dropout = _dropout_key(config, step, index * micro_batch)
        with precision.autocast(device):
            hidden = model(part.tokens, part.positions, attention_context(part, config.data.packing, dropout))
            loss = vocabulary_loss(
                hidden,
                model.head_weight(),
                part.targets,
                part.loss_weights,
                label_smoothing=config.train.label_smoothing,
                z_loss=config.train.z_loss,
                scale=loss_scale / total,
            )
        loss.objective.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.nll)
        if batch.n_rows > micro_batch:
            _sum_wide(parameters, wide_sums)
    for parameter in parameters.values():
        if parameter.grad is None:  # outside the graph of this batch
            parameter.grad = torch.zeros_like(parameter)
    # Where every micro-batch went into a wide sum, the parameter's own gradient is None by now.
    gradients = {name: wide_sums.get(name, parameter.grad) for name, parameter in parameters.items()}
    return gradients, torch.stack(losses).double().cpu()  # type: ignore[return-value]


def attention_context(batch: Batch, packing: str, dropout: DropoutKey | None = None) -> AttentionContext:
    """What the batch's tokens may see: their own document, or everything before them in their row."""
    if packing == "within-document":
        return DocumentContext(batch.document_ids, dropout=dropout)
    return CausalContext(dropout=dropout)


def _dropout_key(config: RunConfig, step: int, first_row: int) -> DropoutKey | None:
    if config.model.dropout or config.model.attention_dropout:
        return DropoutKey(config.seed, step, config.data.seq_len, first_row)
    return None


def _sum_wide(parameters: Mapping[str, Tensor], sums: dict[str, Tensor]) -> None:
    """Move the gradients of low-precision parameters into their float32 sums."""
    for name, parameter in parameters.items():
        if parameter.dtype not in _LOW_PRECISION or parameter.grad is None:
            continue
        if name in sums:
            sums[name] += parameter.grad
        else:
            sums[name] = parameter.grad.float()
        parameter.grad = None


def _bad_rows(losses: Tensor, micro_batch: int, n_rows: int) -> tuple[int, int] | None:
    """The rows of the first micro-batch whose loss is not finite."""
    bad = (~losses.isfinite()).nonzero()
    if not len(bad):
        return None
    first = int(bad[0]) * micro_batch
    return first, min(first + micro_batch, n_rows)
