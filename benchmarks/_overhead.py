"""Gradients by our code and by torch's own on the same model and batch, in turns: DDP, FSDP2, the 1F1B schedule.

Both sides use the same layers and the same loss, so what differs is the machinery: hooks, buckets, shards, the
pipeline's loop. Ours also does what a trainer cannot leave out: the batch's target weights and the loss summed over
ranks, and contexts of micro-batches.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modelworks.config import RunConfig
from modelworks.data import Batch
from modelworks.layout import Layout
from modelworks.layout.pipeline import stage_layers
from modelworks.models import CausalContext, Transformer, initialize
from modelworks.parallel import build_mesh, split_model
from modelworks.parallel.pipeline import build_parts
from modelworks.train import PRECISIONS, compute_gradients, data_rows, vocabulary_loss

if TYPE_CHECKING:
    from benchmarks.parallel import Size


def overhead_pairs(rank: int, size: Size) -> list[dict[str, Any]]:
    """On each of two ranks. ours, torch: median seconds; ratio: median of the ratios of neighbouring turns."""
    from benchmarks.parallel import run_config, tokens

    batch = tokens(size)
    half = size.rows // 2
    own = batch.rows(slice(rank * half, (rank + 1) * half))
    pairs: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "DDP": (_ours(run_config(size, {"dp_replicate": 2}, half), batch), _ddp(run_config(size, {}, half), own)),
        "FSDP2 (zero 3)": (
            _ours(run_config(size, {"dp_shard": 2, "zero": 3}, half), batch),
            _fsdp(run_config(size, {}, half), own),
        ),
        "1F1B (pp 2)": (
            _ours(run_config(size, {"pp": 2}, size.pipeline_micro_batch), batch),
            _pipeline(run_config(size, {"pp": 2}, size.pipeline_micro_batch), batch, rank),
        ),
    }
    rows = []
    for what, (ours, theirs) in pairs.items():
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(-2, 2 * size.rounds):
            order = (0, 1) if turn % 2 else (1, 0)
            for side in order:
                dist.barrier()
                started = time.perf_counter()
                (ours, theirs)[side]()
                dist.barrier()  # until the slower rank is done
                if turn >= 0:
                    times[side].append(time.perf_counter() - started)
        ratios = [mine / raw for mine, raw in zip(*times, strict=True)]
        rows.append(
            {
                "what": what,
                "ours": statistics.median(times[0]),
                "torch": statistics.median(times[1]),
                "ratio": statistics.median(ratios),
                "ratios": sorted(ratios),
            }
        )
    return rows


def _ours(config: RunConfig, batch: Batch) -> Callable[[], None]:
    mesh = build_mesh(Layout.of(config.parallel), torch.device("cpu"), n_kv_heads=config.model.n_kv_heads)
    model = split_model(
        config,
        mesh,
        dtype=torch.float32,
    )
    model.train()
    rows = batch.rows(data_rows(model, config.train.global_batch))
    micro_batch = int(config.train.micro_batch)

    def gradients() -> None:
        compute_gradients(model, rows, config, step=0, micro_batch=micro_batch, precision=PRECISIONS["fp32"])
        model.gradients.end_step()

    return gradients


def _whole(config: RunConfig) -> Transformer:
    model = Transformer(config.model)
    initialize(model, config.seed)
    return model


def _loss(hidden: Tensor, head: Tensor, batch: Batch) -> Tensor:
    return vocabulary_loss(hidden, head, batch.targets, batch.loss_weights, scale=1e-3).objective


def _ddp(config: RunConfig, batch: Batch) -> Callable[[], None]:
    model = _whole(config)
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    def gradients() -> None:
        hidden = wrapped(batch.tokens, batch.positions, CausalContext())
        _loss(hidden, model.head_weight(), batch).backward()
        wrapped.zero_grad()

    return gradients


def _fsdp(config: RunConfig, batch: Batch) -> Callable[[], None]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = _whole(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)

    def gradients() -> None:
        hidden = model(batch.tokens, batch.positions, CausalContext())
        _loss(hidden, model.head_weight(), batch).backward()
        model.zero_grad()

    return gradients


class _Stage(nn.Module):
    """A part as torch's pipelining wants it: one tensor in, one out."""

    def __init__(self, part: Transformer, positions: Tensor) -> None:
        super().__init__()
        self.part, self.positions = part, positions

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x, self.positions, CausalContext())  # type: ignore[no-any-return]


def _pipeline(config: RunConfig, batch: Batch, rank: int) -> Callable[[], None]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    micro_batch = int(config.train.micro_batch)
    stages = stage_layers(config)
    [part] = build_parts(config.model, stages, [rank]).values()
    initialize_part(part, config)
    module = _Stage(part, batch.positions[:micro_batch])
    stage = PipelineStage(module, rank, len(stages), torch.device("cpu"))
    first = batch.rows(slice(0, micro_batch))

    def loss(hidden: Tensor, targets: Tensor) -> Tensor:
        whole = copy.copy(first)
        object.__setattr__(whole, "targets", targets)
        return _loss(hidden, part.head_weight(), whole)

    schedule = Schedule1F1B(stage, batch.n_rows // micro_batch, loss_fn=loss, scale_grads=False)

    def gradients() -> None:
        if rank == 0:
            schedule.step(batch.tokens)
        else:
            schedule.step(target=batch.targets, losses=[])
        module.zero_grad()

    return gradients


def initialize_part(part: Transformer, config: RunConfig) -> None:
    """Values of a part's parameters: those of the whole model under the same names."""
    values = dict(_whole(config).named_parameters())
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            parameter.copy_(values[name])
