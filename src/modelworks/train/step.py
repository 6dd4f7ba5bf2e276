"""One optimiser step: gradients of the global batch, clipped, applied.

    loss = sum over the global batch of w * -log p(target)  /  sum over the global batch of w

The denominator is known before the first micro-batch runs, so every micro-batch's sum is scaled by it and the
gradients simply add up. That is the invariant: however a batch is cut into micro-batches and spread over ranks, and
however unequal their target counts, the gradients are the same up to rounding. (Averaging each micro-batch's or
rank's mean, the common mistake, weighs tokens of short micro-batches more.)

A loss or gradient norm that is not finite: under fp16 the step is skipped and the loss scale halved; in every
other precision it raises `NonFiniteStep` *before* anything is updated, so that the state is still good, or is left out
where a watch says so (`modelworks.train.health`). Loss and norm are the same numbers on every rank, so all ranks decide
alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modelworks.config import RunConfig, UserError
from modelworks.data.batch import Batch
from modelworks.optim import Optimizer, clip_gradients
from modelworks.parallel import GradientWatch, SplitModel, world_reduce
from modelworks.train.experts import balance_experts
from modelworks.train.health import Judgement, Watch
from modelworks.train.micro_batches import MicroBatches
from modelworks.train.precision import LossScaler, Precision


@dataclass(frozen=True)
class StepResult:
    """loss: nats per target token, without z-loss and smoothing. grad_norm: of the unscaled gradients before
    clipping. applied: False where fp16 overflowed and the update was skipped. routing: figures of experts, by name.
    held: in a measured step, bytes on this rank at the update by category, and `gradients_accumulating` before it.
    judgement: of this step, where steps are judged; an update that it refuses is left out whole. rows: (first, end) of
    the global batch's rows with the highest loss, in a step with a spike or an outlier."""

    loss: float
    grad_norm: float
    applied: bool
    routing: dict[str, float]
    held: dict[str, int] = field(default_factory=dict)
    judgement: Judgement | None = None
    rows: tuple[int, int] | None = None


class NonFiniteStep(Exception):
    """Loss or gradients are not finite. rows: (first, end) of the global batch's rows whose loss is not; None where
    the loss is finite and only the gradient norm is not."""

    def __init__(self, loss: float, grad_norm: float, rows: tuple[int, int] | None) -> None:
        super().__init__(f"loss {loss}, gradient norm {grad_norm}")
        self.loss, self.grad_norm, self.rows = loss, grad_norm, rows


@dataclass(frozen=True)
class Gradients:
    """What a step's passes give. by_name: of this rank's stored shards, summed over all ranks, times the loss scale.

    loss: mean over the target tokens of the global batch, on every rank. micro: the micro-batches of this rank.
    """

    by_name: dict[str, Tensor]
    loss: float
    micro: MicroBatches


def train_step(
    model: SplitModel,
    optimizer: Optimizer,
    batch: Batch,
    config: RunConfig,
    *,
    step: int,
    lr: float,
    micro_batch: int,
    precision: Precision,
    scaler: LossScaler | None = None,
    watch: Watch | None = None,
) -> StepResult:
    """Update the model once on a global batch.

    batch: the rows of this data-parallel rank (`data_rows`). step: updates asked for so far, which keys the dropout
    masks. watch: judges the step and measures it.
    """
    scale = scaler.scale if scaler else 1.0
    gradients = compute_gradients(
        model, batch, config, step=step, micro_batch=micro_batch, precision=precision, loss_scale=scale, watch=watch
    )
    return apply_gradients(model, optimizer, gradients, config, lr=lr, loss_scale=scale, scaler=scaler, watch=watch)


def compute_gradients(
    model: SplitModel,
    batch: Batch,
    config: RunConfig,
    *,
    step: int,
    micro_batch: int,
    precision: Precision,
    loss_scale: float = 1.0,
    watch: Watch | None = None,
) -> Gradients:
    """Forward and backward passes of all micro-batches, and the reductions over ranks.

    Gradients of bf16 and fp16 parameters are summed in float32: a sum of many small terms would stop growing.
    """
    total = _over_data_ranks(model, batch.target_weight())
    if total <= 0:
        raise UserError(f"the batch of step {step} has no target tokens: every loss weight is 0")
    first = model.mesh.place("dp") * batch.n_rows
    parts = list(batch.split(micro_batch))
    probes = watch.before_passes(parts, total, loss_scale) if watch else None
    micro = MicroBatches(
        model,
        parts,
        config,
        precision,
        step=step,
        first_rows=[first + index * micro_batch for index in range(len(parts))],
        scale=loss_scale / total,
        loss_scale=loss_scale,
        probe=probes.forward if probes else None,
    )
    model.gradients.begin_step(len(parts))
    executor = model.executor(len(parts))
    executor.watch = GradientWatch(model.gradients, probes.micro.see) if probes else None
    try:
        executor.run(len(parts), micro.forward, training=True, edge_shapes=micro.edge_shapes)
    finally:
        if executor.watch:
            executor.watch.close()
        executor.watch = None
    return Gradients(model.gradients.finish(), global_loss(model, micro, total), micro)


def apply_gradients(
    model: SplitModel,
    optimizer: Optimizer,
    gradients: Gradients,
    config: RunConfig,
    *,
    lr: float,
    loss_scale: float = 1.0,
    scaler: LossScaler | None = None,
    watch: Watch | None = None,
) -> StepResult:
    """Clip by the one global norm and update. Frees the gradients, also where the step is refused."""
    by_name, loss, settings = gradients.by_name, gradients.loss, config.train
    if loss_scale != 1.0 and by_name:  # a stage in the middle may hold no parameters
        torch._foreach_mul_(list(by_name.values()), 1.0 / loss_scale)
    norms = watch.before_clipping(by_name) if watch else None
    over_ranks = world_reduce(model.mesh) if model.mesh.layout.world_size > 1 else None
    norm = clip_gradients(
        by_name,
        watch.clip_at if watch else settings.grad_clip,
        float(settings.grad_clip_norm),
        reduce=norms.reduce(over_ranks) if norms else over_ranks,
        counted=model.counted,
        powers=norms.powers if norms else None,
    )
    good = math.isfinite(norm) and math.isfinite(loss)
    # An overflow of fp16 is no fault of the step: the loss scale answers it.
    judgement = watch.judge(loss, norm) if watch and (good or not scaler) else None
    refused = judgement is not None and not judgement.applied
    if scaler:
        scaler.update(overflowed=not good)
    elif not good and not refused:
        model.gradients.end_step()
        raise NonFiniteStep(loss, norm, _bad_rows(model, gradients))
    routing: dict[str, float] = {}
    held: dict[str, int] = {}
    if model.measures:
        held = {**model.gradients.bytes(), "optimizer": optimizer.state_bytes()}
        held["gradients_accumulating"] = gradients.micro.accumulating
    rows = _highest_loss(model, gradients) if judgement and (judgement.spikes or judgement.outlier) else None
    applied = good and not refused
    if applied:
        if watch:
            watch.before_update()
        optimizer.step(by_name, lr)
        if watch:
            watch.after_update()
        model.gradients.after_update()
        routing = balance_experts(model, gradients.micro.routings, config.train.global_batch)
    model.gradients.end_step()
    return StepResult(loss, norm, applied, routing, held, judgement, rows)


def data_rows(model: SplitModel, global_batch: int) -> slice:
    """The rows of the global batch that this data-parallel rank computes; its cp, tp and pp partners have the same."""
    ranks, place = model.mesh.size("dp"), model.mesh.place("dp")
    each = global_batch // ranks
    return slice(place * each, (place + 1) * each)


def _over_data_ranks(model: SplitModel, value: Tensor) -> float:
    """The sum of a float64 scalar over ranks with other rows."""
    return float(model.mesh.group("dp").all_reduce_(value.to(model.mesh.device)))


def global_loss(model: SplitModel, micro: MicroBatches, total: float) -> float:
    """The loss of all ranks' tokens, on every rank: each token is counted where its loss was computed, once."""
    own = torch.zeros((), dtype=torch.float64)
    if micro.losses and model.mesh.place("tp") == 0:
        own = torch.stack([micro.losses[index] for index in sorted(micro.losses)]).double().cpu().sum()
    return float(model.mesh.group("world").all_reduce_(own.to(model.mesh.device))) / total


def _bad_rows(model: SplitModel, gradients: Gradients) -> tuple[int, int] | None:
    """The rows of the first micro-batch, over all ranks, whose loss is not finite."""
    bad = [index for index, loss in sorted(gradients.micro.losses.items()) if not bool(loss.isfinite())]
    first = gradients.micro.rows_of(bad[0]) if bad else None
    found = [rows for rows in model.mesh.group("world").gather_objects(first) if rows is not None]
    return min(found, default=None)


def _highest_loss(model: SplitModel, gradients: Gradients) -> tuple[int, int] | None:
    """The rows of the micro-batch, over all ranks, with the highest mean loss; one that is not finite before others."""
    micro, sums = gradients.micro, dict[tuple[int, int], list[float]]()
    own = {micro.rows_of(index): (float(loss), micro.weight_of(index)) for index, loss in micro.losses.items()}
    if model.mesh.place("tp"):
        own = {}
    for rank in model.mesh.group("world").gather_objects(own):  # of context-parallel ranks each has some columns
        for rows, (loss, weight) in rank.items():
            total = sums.setdefault(rows, [0.0, 0.0])
            total[0], total[1] = total[0] + loss, total[1] + weight
    means = {rows: loss / weight if weight else 0.0 for rows, (loss, weight) in sums.items()}
    return max(means, key=lambda rows: (not math.isfinite(means[rows]), means[rows], -rows[0]), default=None)
