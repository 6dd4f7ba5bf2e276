"""The two runs of a verification: the whole model in one process, and split over the ranks of the layout.

The split run is the trainer's own code. The whole run is written out here with nothing but a model, autograd and an
optimiser, so that what they share is only what does not depend on a layout: layers, the loss, the optimiser's formula.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from modelworks.config import RunConfig, parameter_shapes
from modelworks.data import Batch
from modelworks.layout import ShardSpec
from modelworks.models import (
    CausalContext,
    DocumentContext,
    DropoutKey,
    Routing,
    RoutingTotals,
    Transformer,
    default_dtype,
    initialize_slice,
    update_router_bias,
)
from modelworks.optim import Optimizer, build_optimizer
from modelworks.parallel import Mesh, SplitModel, split_model, state_allocator
from modelworks.train import NonFiniteStep, Precision, apply_gradients, compute_gradients, data_rows
from modelworks.verify.batches import of_step, verification_batch
from modelworks.verify.hidden import HiddenRecorder
from modelworks.verify.observed import Observed

FLOAT64 = Precision("float64", torch.float64)
LOSS_SCALE = 1024.0  # of fp16: large enough to be noticed where it is not undone, and nothing overflows


def run_whole(config: RunConfig, steps: int, precision: Precision) -> Observed:
    """One process, the global batch at once."""
    model = _whole_model(config, precision.parameter_dtype)
    optimizer = build_optimizer(model.named_parameters(), config.optimizer, model=config.model)
    observed = Observed([], [], [], _copies(dict(model.named_parameters())), {})
    scale = LOSS_SCALE if precision.scales_loss else 1.0
    for step in range(steps):
        batch = verification_batch(of_step(config, step), step)
        recorder = HiddenRecorder([model]) if step == 0 and precision == FLOAT64 else None
        routing = Routing(scale / batch.n_rows, config.data.seq_len) if config.model.n_experts else None
        loss, nll, total = _whole_loss(model, batch, config, step, precision, routing)
        (loss * scale / total).backward()  # type: ignore[no-untyped-call]
        if recorder is not None:
            observed.hidden.update(recorder.whole())
        gradients = {name: _gradient(parameter) / scale for name, parameter in model.named_parameters()}
        norm = _norm(gradients, float(config.train.grad_clip_norm))
        observed.losses.append(nll / total)
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
    observed.final.update(_copies(_updated(dict(model.named_parameters()), optimizer)))
    return observed


def run_split(config: RunConfig, steps: int, precision: Precision, mesh: Mesh) -> tuple[Observed | None, SplitModel]:
    """All ranks of the layout; every rank must call it. What was observed is on rank 0."""
    model = split_model(
        config,
        mesh,
        dtype=precision.parameter_dtype,
        fill=lambda spec, out: _fill(spec, out, config),
    )
    model.train()
    with tempfile.TemporaryDirectory(prefix="modelworks-offload-") as scratch:
        allocate = state_allocator(config.parallel, mesh.device, Path(scratch) / f"rank-{mesh.rank}")
        optimizer = build_optimizer(
            model.stored.items(), config.optimizer, model=config.model, split=model.split, allocate=allocate
        )
        return _observe_split(model, optimizer, config, steps, precision), model


def _observe_split(
    model: SplitModel, optimizer: Optimizer, config: RunConfig, steps: int, precision: Precision
) -> Observed | None:
    mesh = model.mesh
    observed = Observed([], [], [], _assembled(model, model.stored), {})
    observed.copies.append(_worst_copies(model, observed.initial))
    micro_batch = int(config.train.micro_batch)
    scale = LOSS_SCALE if precision.scales_loss else 1.0
    sent = mesh.traffic.take()
    for step in range(steps):
        mesh.labels.step(step + 1)
        now = of_step(config, step)
        batch = verification_batch(now, step).rows(data_rows(model, now.train.global_batch))
        listens = step == 0 and precision == FLOAT64
        recorder = HiddenRecorder(list(model.parts.values())) if listens else None
        mesh.traffic.take()
        gradients = compute_gradients(
            model, batch, now, step=step, micro_batch=micro_batch, precision=precision, loss_scale=scale
        )
        if recorder is not None:
            observed.hidden.update(recorder.split(model))
        found = {name: gradient / scale for name, gradient in _assembled(model, gradients.by_name).items()}
        observed.gradients.append(found)
        observed.losses.append(gradients.loss)
        try:
            done = apply_gradients(model, optimizer, gradients, now, lr=config.optimizer.lr, loss_scale=scale)
            observed.norms.append(done.grad_norm)
        except NonFiniteStep as stop:
            observed.norms.append(stop.grad_norm)
            break
        sent = mesh.traffic.take()
    observed.copies.append(_worst_copies(model, _assembled(model, model.stored)))
    observed.final.update(_assembled(model, _updated(model.stored, optimizer)))
    mesh.traffic.volumes = sent  # of a step alone, without what comparing sends
    return observed if mesh.is_main else None


def row_gradients(config: RunConfig) -> list[dict[str, Tensor]]:
    """What each row of the first step's batch adds to the gradients in one process, in float64."""
    model, batch = _whole_model(config, torch.float64), verification_batch(config, 0)
    total, found = float(batch.loss_weights.sum()), []
    for row in range(batch.n_rows):
        routing = Routing(1.0 / batch.n_rows, config.data.seq_len) if config.model.n_experts else None
        loss, *_ = _whole_loss(model, batch.rows(slice(row, row + 1)), config, 0, FLOAT64, routing, first_row=row)
        (loss / total).backward()  # type: ignore[no-untyped-call]
        found.append(_copies({name: _gradient(parameter) for name, parameter in model.named_parameters()}))
        model.zero_grad()
    return found


def _whole_model(config: RunConfig, dtype: torch.dtype) -> Transformer:
    with default_dtype(dtype):
        model = Transformer(config.model)
    for name, parameter in model.named_parameters():
        _fill(ShardSpec.whole(name, tuple(parameter.shape)), parameter, config)
    model.train()
    return model


def _whole_loss(
    model: Transformer,
    batch: Batch,
    config: RunConfig,
    step: int,
    precision: Precision,
    routing: Routing | None,
    first_row: int = 0,
) -> tuple[Tensor, float, float]:
    """By plain cross entropy on all logits, summed over the batch: the objective, the loss without smoothing and
    z-loss, and the weight to divide both by."""
    key = None
    if config.model.dropout or config.model.attention_dropout:
        key = DropoutKey(config.seed, step, config.data.seq_len, first_row)
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
    logits, weights = logits.flatten(0, 1).to(exact), batch.loss_weights.flatten().to(exact)
    train, targets = config.train, batch.targets.flatten()
    losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=train.label_smoothing)
    if train.z_loss:
        losses = losses + train.z_loss * logits.logsumexp(-1).square()
    plain = F.cross_entropy(logits.detach(), targets, reduction="none")
    return (losses * weights).sum(), float((plain * weights).sum()), float(weights.sum())


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


def _fill(spec: ShardSpec, out: Tensor, config: RunConfig) -> None:
    """The run's own initial values; norms and biases, which all start alike, get some noise of their own, or a wrong
    slice of one would not show."""
    initialize_slice(out, config.model, spec, config.seed)
    if spec.name.endswith(("norm.weight", ".bias")):
        noise = torch.empty_like(out)
        initialize_slice(noise, config.model, replace(spec, name=f"{spec.name}.noise"), config.seed)
        with torch.no_grad():
            out += noise


def _updated(parameters: Mapping[str, Tensor], optimizer: Optimizer) -> dict[str, Tensor]:
    """What the optimiser updates: the float32 copy of a parameter in low precision, where it has one."""
    masters = {name.removesuffix("/master"): tensor for name, tensor in optimizer.named_state() if "/master" in name}
    return {name: masters.get(name, tensor.float() if masters else tensor) for name, tensor in parameters.items()}


def _worst_copies(model: SplitModel, whole: Mapping[str, Tensor]) -> dict[str, tuple[float, int]]:
    """By parameter, the largest relative difference of any rank's copy from the value that counts, and that rank.

    whole: on rank 0. A copy is what a rank stores, and what it computes with where that is there between steps (not
    under zero 3). Every rank must call it; the result is on rank 0.
    """
    shapes, world = parameter_shapes(model.config.model), model.mesh.group("world")
    names = model.mesh.shared(list(whole))
    flat = torch.empty(sum(math.prod(shapes[name]) for name in names), dtype=torch.float64)
    if model.mesh.is_main:
        torch.cat([whole[name].flatten() for name in names], out=flat)
    world.broadcast_(flat)
    values = {
        name: part.view(shapes[name])
        for name, part in zip(names, flat.split_with_sizes([math.prod(shapes[name]) for name in names]), strict=True)
    }
    computed = model.gradients.leaves() if model.config.parallel.zero < 3 else {}
    own: dict[str, float] = {}
    for name, plan in model.plans.items():
        held = [(model.stored[name], plan.stored)]
        if name in computed:
            held.append((computed[name], plan.computed))
        for tensor, spec in held:
            true = values[name][spec.slices]
            error = _relative(tensor.detach().double(), true) if true.numel() else 0.0
            own[name] = max(error, own.get(name, 0.0), key=_order)
    worst = dict.fromkeys(names, (0.0, 0))
    for rank, errors in enumerate(world.gather_objects(own)):
        for name, error in errors.items():
            worst[name] = max(worst[name], (error, rank), key=lambda found: _order(found[0]))
    return worst


def _relative(copy: Tensor, true: Tensor) -> float:
    return float((copy - true).norm()) / max(float(true.norm()), 1e-300)


def _order(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().double().clone() for name, tensor in tensors.items()}
