"""Bytes of each rank along the pipeline, by what they hold.

`memory` looks at the first and the last rank, in closed forms. Here each rank has the layers that the trainer gives it,
what it stores to the byte, and the micro-batches that the simulated schedule has in flight there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from modelworks.config import ModelConfig, ParallelConfig
from modelworks.layout import Layout, stages_of
from modelworks.plan.columns import Array
from modelworks.plan.compute import Work
from modelworks.plan.machine import Numerics
from modelworks.plan.memory import Memory, layer_activations, rank_memory
from modelworks.plan.moments import Held, kept_bytes, most_bytes
from modelworks.plan.pipeline import Stages
from modelworks.plan.step_time import HOST_DEVICES
from modelworks.plan.stored import Stored, stored


@dataclass(frozen=True)
class Rank:
    """What a rank along the pipeline has. layers: their numbers. ends: copies of the embedding, the head being one."""

    layers: tuple[int, ...]
    first: bool
    last: bool

    def ends(self, model: ModelConfig) -> float:
        return float(self.first) + float(self.last) - (self.first and self.last and model.tie_embeddings)


def ranks_of(parallel: ParallelConfig, placed: Sequence[Sequence[int]]) -> list[Rank]:
    """Along the pipeline. placed: the layers of each stage."""
    layout = Layout(pp=parallel.pp)
    found = []
    for rank in range(parallel.pp):
        mine = stages_of(layout, parallel, rank) if parallel.pp > 1 else [0]
        layers = tuple(layer for stage in mine for layer in placed[stage])
        found.append(Rank(layers, 0 in mine, len(placed) - 1 in mine))
    return found


def stages_of_ranks(ranks: Sequence[Rank]) -> Stages:
    """Their layers as the closed forms take them."""
    counts = [float(len(rank.layers)) for rank in ranks]
    others = [count for count, rank in zip(counts, ranks, strict=True) if not rank.last]
    last = next(count for count, rank in zip(counts, ranks, strict=True) if rank.last)
    return Stages(max(others, default=last), last, counts[0], sum(counts))


def stored_by_rank(
    model: ModelConfig,
    parallel: ParallelConfig,
    ranks: Sequence[Rank],
    *,
    numerics: Numerics,
    micro_batches: int,
    optimizer: str,
) -> list[Stored]:
    """What `stored` says of each rank along the pipeline, from one layer of each kind: layers of a kind hold the same,
    and so do ranks that hold the same number of each."""
    kinds = sorted({model.has_experts(layer) for layer in range(model.n_layers)})
    slim = model.model_copy(update={"n_layers": len(kinds), "dense_layers": [0] if len(kinds) == 2 else []})
    layout = Layout.of(parallel)
    known: dict[tuple[tuple[int, ...], bool, bool], Stored] = {}
    found = []
    for rank, number in zip(ranks, layout.ranks(0, "pp"), strict=True):
        counts = tuple(sum(model.has_experts(layer) == kind for layer in rank.layers) for kind in kinds)
        key = counts, rank.first, rank.last
        if key not in known:
            mine = stages_of(layout, parallel, number) if parallel.pp > 1 else [0]
            n_stages = parallel.pp * len(mine)
            placed = [list(range(len(kinds))) if stage == mine[0] else [] for stage in range(n_stages)]
            known[key] = stored(
                slim,
                parallel,
                number,
                numerics=numerics,
                seq_len=1,
                micro_batches=micro_batches,
                placed=placed,
                optimizer=optimizer,
                copies=counts,
            )
        found.append(known[key])
    return found


def bytes_by_rank(
    model: ModelConfig,
    work: Work,
    ranks: Sequence[Rank],
    stores: Sequence[Stored],
    held: Sequence[float],
    bucket: float,
) -> list[dict[str, float]]:
    """By the names of `Memory`. held: layers times micro-batches whose activations each rank keeps at once. bucket:
    bytes of gradients that are reduced at once.

    On a machine that was measured, our trainer's moments are followed one by one."""
    if work.machine.measured is not None:
        return [
            most_bytes(work, _held(rank, model, each, float(work.split.virtual)), stored, bucket)
            for rank, each, stored in zip(ranks, held, stores, strict=True)
        ]
    layers = np.array([float(len(rank.layers)) for rank in ranks])
    kept = np.array(held) / np.maximum(layers, 1.0)
    ends = np.array([rank.ends(model) for rank in ranks])
    has_loss = np.array([float(rank.last) for rank in ranks])
    first = np.array([float(rank.first) for rank in ranks])
    columns = rank_memory(work, layers=layers, held=kept, ends=ends, first=first, has_loss=has_loss)
    names = [field.name for field in fields(Memory)]
    arrays = {name: np.broadcast_to(getattr(columns, name), len(ranks)) for name in names}
    found = []
    for place, each in enumerate(stores):
        exact = {"parameters": each.parameters, "gradients": each.gradients, "optimizer": each.optimizer}
        found.append({name: float(exact.get(name, arrays[name][place])) for name in names})
    return found


def host_bytes(
    model: ModelConfig,
    parallel: ParallelConfig,
    work: Work,
    ranks: Sequence[Rank],
    held: Sequence[float],
    *,
    numerics: Numerics,
    optimizer: str,
) -> float:
    """In the memory of the fullest host, for its devices: the optimiser's state, and parameters and activations where
    they wait there. Saved on disk (NVMe) it takes none; copies for saving are not counted. held: as of
    `bytes_by_rank`.
    """
    split = work.split
    if parallel.offload != "cpu" and not (parallel.offload_params or parallel.offload_activations):
        return 0.0
    at_home = stored_by_rank(
        model,
        parallel.model_copy(update={"offload": "none"}),
        ranks,
        numerics=numerics,
        micro_batches=int(split.n_micro_batches),
        optimizer=optimizer,
    )
    layer = float(layer_activations(work))
    each = [
        stored.optimizer * (parallel.offload == "cpu")
        + stored.parameters * (parallel.offload_params and parallel.zero == 3)
        + kept * layer * parallel.offload_activations
        for stored, kept in zip(at_home, held, strict=True)
    ]
    # ranks are numbered along the pipeline last, and hosts hold those that follow each other
    together = int(split.world) // parallel.pp
    before = np.concatenate([[0.0], np.cumsum(np.array(each) * together)])
    hosts = np.arange(0, int(split.world), int(min(float(work.machine.node), HOST_DEVICES)))
    ends = np.append(hosts[1:], int(split.world))
    place = np.arange(parallel.pp + 1) * together
    return float(np.max(np.interp(ends, place, before) - np.interp(hosts, place, before)))


def activations_over_time(
    model: ModelConfig,
    work: Work,
    ranks: Sequence[Rank],
    stores: Sequence[Stored],
    curves: Sequence[Sequence[tuple[float, float]]],
) -> list[list[tuple[float, float]]]:
    """By rank: (seconds, bytes of activations that it keeps from then on). curves: the same in layers times
    micro-batches, as `held_over_time` gives them.

    Their most is what `bytes_by_rank` calls activations; on a machine that was measured that is of the fullest moment,
    which need not be the one that keeps most of them."""
    found = []
    for rank, each, curve in zip(ranks, stores, curves, strict=True):
        amounts = sorted({held for _, held in curve})
        kept = dict(zip(amounts, _kept(model, work, rank, each, np.array(amounts)).tolist(), strict=True))
        found.append([(seconds, kept[held]) for seconds, held in curve])
    return found


def _kept(model: ModelConfig, work: Work, rank: Rank, stored: Stored, held: Array) -> Array:
    """Bytes. held: layers times micro-batches at once."""
    if work.machine.measured is not None:
        stages = float(work.split.virtual)
        return np.array([kept_bytes(work, _held(rank, model, float(each), stages), stored) for each in held])
    layers, ends = float(len(rank.layers)), rank.ends(model)
    each = held / max(layers, 1.0)
    kept = rank_memory(
        work, layers=layers, held=each, ends=ends, first=float(rank.first), has_loss=float(rank.last)
    ).activations
    return np.array(np.broadcast_to(kept, held.shape))


def _held(rank: Rank, model: ModelConfig, held: float, stages: float) -> Held:
    return Held(float(len(rank.layers)), held, stages, rank.ends(model), rank.first, rank.last)
