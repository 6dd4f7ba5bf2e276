"""The two runs of a verification: the whole model in one process, and split over the ranks of the layout.

The split run is the trainer's own code. The whole run is written out here with nothing but a model, autograd and an
optimiser, so that what they share is only what does not depend on a layout: layers, the loss, the optimiser's formula.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from modelworks.config import RunConfig
from modelworks.data import Batch
from modelworks.models import (
    CausalContext,
    DocumentContext,
    DropoutKey,
    Routing,
    RoutingTotals,
    Transformer,
    initialize,
    initialize_slice,
    update_router_bias,
)
from modelworks.optim import build_optimizer
from modelworks.parallel import Mesh, SplitModel, split_model
from modelworks.train import Precision, apply_gradients, compute_gradients, data_rows
from modelworks.verify.batches import verification_batch
from modelworks.verify.hidden import HiddenRecorder
from modelworks.verify.observed import Observed


def run_whole(config: RunConfig, steps: int, precision: Precision) -> Observed:
    """One process, the global batch at once."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(precision.parameter_dtype)
    try:
        model = Transformer(config.model)
    finally:
        torch.set_default_dtype(before)
    initialize(model, config.seed)
    model.train()
    optimizer = build_optimizer(model.named_parameters(), config.optimizer)
    observed = Observed([], [], [], _copies(dict(model.named_parameters())), {})
    for step in range(steps):
        batch = verification_batch(config, step)
        recorder = HiddenRecorder([model]) if step == 0 else None
        routing = Routing(1.0 / batch.n_rows, config.data.seq_len) if config.model.n_experts else None
        loss, total = _whole_loss(model, batch, config, step, precision, routing)
        (loss / total).backward()  # type: ignore[no-untyped-call]
        if recorder is not None:
            observed.hidden.update(recorder.whole())
        gradients = {name: _gradient(parameter) for name, parameter in model.named_parameters()}
        norm = _norm(gradients, float(config.train.grad_clip_norm))
        observed.losses.append(_mean_nll(model, batch, config, step, precision))
        observed.norms.append(norm)
        observed.gradients.append(_copies(gradients))
        clip = config.train.grad_clip
        if clip is not None and norm > clip:
            gradients = {name: gradient * (clip / norm) for name, gradient in gradients.items()}
        optimizer.step(gradients, config.optimizer.lr)
        if routing is not None:
            totals = RoutingTotals(model)
            totals.add(routing)
            update_router_bias(model, totals.loads())
        model.zero_grad()
    observed.final.update(_copies(dict(model.named_parameters())))
    return observed


def run_split(config: RunConfig, steps: int, precision: Precision, mesh: Mesh) -> tuple[Observed | None, SplitModel]:
    """All ranks of the layout; every rank must call it. What was observed is on rank 0."""
    model = split_model(
        config,
        mesh,
        dtype=precision.parameter_dtype,
        fill=lambda spec, out: initialize_slice(out, config.model, spec, config.seed),
    )
    model.train()
    optimizer = build_optimizer(model.stored.items(), config.optimizer, all_names=model.parameter_names)
    observed = Observed([], [], [], _assembled(model, model.stored), {})
    micro_batch = int(config.train.micro_batch)
    for step in range(steps):
        mesh.labels.step(step + 1)
        batch = verification_batch(config, step).rows(data_rows(model, config.train.global_batch))
        recorder = HiddenRecorder(list(model.parts.values())) if step == 0 else None
        mesh.traffic.take()
        gradients = compute_gradients(model, batch, config, step=step, micro_batch=micro_batch, precision=precision)
        if recorder is not None:
            observed.hidden.update(recorder.split(model, micro_batch))
        found = _assembled(model, gradients.by_name)
        done = apply_gradients(model, optimizer, gradients, config, lr=config.optimizer.lr)
        observed.losses.append(done.loss)
        observed.norms.append(done.grad_norm)
        observed.gradients.append(found)
    observed.final.update(_assembled(model, model.stored))
    return (observed if mesh.is_main else None), model


def _whole_loss(
    model: Transformer, batch: Batch, config: RunConfig, step: int, precision: Precision, routing: Routing | None
) -> tuple[Tensor, float]:
    """The objective summed over the batch by plain cross entropy on all logits, and the weight to divide it by."""
    logits, weights = _logits(model, batch, config, step, precision, routing)
    train, targets = config.train, batch.targets.flatten()
    losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=train.label_smoothing)
    if train.z_loss:
        losses = losses + train.z_loss * logits.logsumexp(-1).square()
    return (losses * weights).sum(), float(weights.sum())


@torch.no_grad()
def _mean_nll(model: Transformer, batch: Batch, config: RunConfig, step: int, precision: Precision) -> float:
    routing = Routing(0.0, config.data.seq_len) if config.model.n_experts else None
    logits, weights = _logits(model, batch, config, step, precision, routing)
    losses = F.cross_entropy(logits, batch.targets.flatten(), reduction="none")
    return float((losses * weights).sum() / weights.sum())


def _logits(
    model: Transformer, batch: Batch, config: RunConfig, step: int, precision: Precision, routing: Routing | None
) -> tuple[Tensor, Tensor]:
    """(tokens, vocabulary) in the widest dtype there is use for, and each token's weight."""
    key = None
    if config.model.dropout or config.model.attention_dropout:
        key = DropoutKey(config.seed, step, config.data.seq_len)
    within = config.data.packing == "within-document"
    context: Any = (
        DocumentContext(batch.document_ids, dropout=key, routing=routing)
        if within
        else CausalContext(dropout=key, routing=routing)
    )
    with precision.autocast(torch.device("cpu")):
        hidden = model(batch.tokens, batch.positions, context)
        logits = model.logits(hidden)
    exact = torch.float64 if precision.parameter_dtype == torch.float64 else torch.float32
    return logits.flatten(0, 1).to(exact), batch.loss_weights.flatten().to(exact)


def _norm(gradients: Mapping[str, Tensor], p: float) -> float:
    absolute = torch.cat([gradient.double().abs().flatten() for gradient in gradients.values()])
    return float(absolute.max()) if math.isinf(p) else float(absolute.pow(p).sum() ** (1.0 / p))


def _gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    return gradient.double() if gradient.dtype == torch.float64 else gradient.float()


def _assembled(model: SplitModel, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors on rank 0, in float64; nothing elsewhere. Names that no rank holds are left out."""
    world = model.mesh.group("world")
    held = {name for names in world.gather_objects(sorted(model.plans)) for name in names}
    names = [name for name in model.parameter_names if name in held]
    return {name: tensor.double() for name, tensor in model.assembler.all(local, names)}


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().double().clone() for name, tensor in tensors.items()}
