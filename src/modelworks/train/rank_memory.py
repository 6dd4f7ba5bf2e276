"""Bytes that training needs on one rank of a layout: the fullest one.

Parameters, gradients and optimiser state are exact, from the same plans that split them (`modelworks.layout`).
Activations are those of one process (`modelworks.train.memory`), divided: a stage holds some of the layers, but of as
many micro-batches as its schedule keeps in flight; context and sequence parallelism divide the tokens. Without
sequence parallelism, norms and the residual stream are whole on every tensor rank; that is not counted, so the
prediction is then somewhat low.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from modelworks.config import RunConfig, count_parameters
from modelworks.layout import (
    DataParallelMemory,
    Layout,
    ParameterPlan,
    memory_of_run,
    plan_parameters,
    stages_of,
)
from modelworks.layout.pipeline import peak_formula, stage_layers
from modelworks.train.memory import MemoryPrediction, predict_memory
from modelworks.train.precision import PRECISIONS
from modelworks.train.state_memory import state_bytes


def predict_rank_memory(
    config: RunConfig,
    *,
    precision: str,
    micro_batch: int,
    rank: int | None = None,
    whole: MemoryPrediction | None = None,
) -> MemoryPrediction:
    """micro_batch: rows of one. rank: None for the one that needs most. whole: of one process with the same
    micro-batch, where it is known (it takes longest to find)."""
    parallel = config.parallel
    whole = whole or predict_memory(
        config.model,
        config.train,
        precision=precision,
        micro_batch=micro_batch,
        seq_len=config.data.seq_len,
        optimizer=config.optimizer,
    )
    layout = Layout.of(parallel)
    if layout.world_size == 1:
        return whole
    stages = stage_layers(config)
    ranks = layout.ranks(0, "pp") if rank is None else (rank,)  # those of one pipeline differ
    return max(
        (_of_rank(config, layout, rank, stages, whole, precision, micro_batch) for rank in ranks),
        key=lambda prediction: prediction.total,
    )


def stored_memory(config: RunConfig, rank: int, *, itemsize: int, micro_batches: int) -> tuple[DataParallelMemory, int]:
    """Parameters and gradients of one rank, and bytes of its optimiser state, wherever that lives.

    itemsize: bytes of a stored parameter's element. micro_batches: of a step.
    """
    parallel, model = config.parallel, config.model
    plans = plan_parameters(model, Layout.of(parallel), parallel, rank, stage_layers(config))
    data = memory_of_run(plans, model, parallel, rank, micro_batches=micro_batches, itemsize=itemsize)
    return data, sum(_state_bytes(config, plans, itemsize).values())


def _state_bytes(config: RunConfig, plans: Mapping[str, ParameterPlan], itemsize: int) -> dict[str, int]:
    return state_bytes(
        config.optimizer,
        config.model,
        {name: plan.stored for name, plan in plans.items()},
        itemsize=itemsize,
        offloaded=config.parallel.offload != "none",
    )


def staged_bytes(config: RunConfig, *, precision: str) -> int:
    """Host memory that the fullest rank copies into when it saves, within `checkpoint.staging`. Nothing where saves are
    not asynchronous."""
    if not config.checkpoint.async_:
        return 0
    wanted, limit = written_bytes(config, precision=precision), config.checkpoint.staging
    return wanted if limit is None else min(wanted, limit)


def written_bytes(config: RunConfig, *, precision: str) -> int:
    """What the fullest rank writes of a checkpoint: its share of what it holds, copies of which other ranks write a
    part of."""
    parallel, layout = config.parallel, Layout.of(config.parallel)
    itemsize = PRECISIONS[precision].parameter_dtype.itemsize
    stages, most = stage_layers(config), 0.0
    for rank in layout.ranks(0, "pp"):
        share = 0.0
        plans = plan_parameters(config.model, layout, parallel, rank, stages)
        states = _state_bytes(config, plans, itemsize)
        for name, plan in plans.items():
            copies = layout.size(rank, plan.replicate_group)
            if plan.zero_dimension is None:
                copies *= layout.size(rank, plan.shard_group)
            share += (plan.stored.n_local * itemsize + states[name]) / copies
        most = max(most, share)
    return round(most)


def saved_bytes(config: RunConfig, *, precision: str) -> float:
    """Bytes of a checkpoint for one parameter, on average: its value and its optimiser state."""
    itemsize = PRECISIONS[precision].parameter_dtype.itemsize
    offloaded = config.parallel.offload != "none"
    states = state_bytes(config.optimizer, config.model, itemsize=itemsize, offloaded=offloaded)
    return itemsize + sum(states.values()) / count_parameters(config.model).total


def _of_rank(
    config: RunConfig,
    layout: Layout,
    rank: int,
    stages: Sequence[Sequence[int]],
    whole: MemoryPrediction,
    precision: str,
    micro_batch: int,
) -> MemoryPrediction:
    parallel, model = config.parallel, config.model
    micro_batches = -(-config.rank_rows // micro_batch)
    itemsize = PRECISIONS[precision].parameter_dtype.itemsize
    data, state = stored_memory(config, rank, itemsize=itemsize, micro_batches=micro_batches)
    held = stages_of(layout, parallel, rank)
    layers = sum(len(stages[stage]) for stage in held) / len(held)
    place = layout.coordinates(rank).pp
    in_flight = peak_formula(parallel.pp_schedule, parallel.pp, micro_batches, parallel.pp_virtual, rank=place)
    share = layers * in_flight / model.n_layers if parallel.pp > 1 else 1.0
    return MemoryPrediction(
        parameters=data.parameters,
        gradients=max(data.accumulating, data.gradients),
        optimizer=state,
        activations=round(whole.activations * share / (parallel.cp * parallel.tp)),
        loss=whole.loss // (parallel.cp * parallel.tp) if len(stages) - 1 in held else 0,
    )
