"""Bytes that training needs on one rank of a layout: the fullest one.

Parameters, gradients and optimiser state are exact, from the same plans that split them (`modelworks.layout`).
Activations are those of one process (`modelworks.train.memory`), divided: a stage holds some of the layers, but of as
many micro-batches as its schedule keeps in flight; context and sequence parallelism divide the tokens. Without
sequence parallelism, norms and the residual stream are whole on every tensor rank; that is not counted, so the
prediction is then somewhat low.
"""

from __future__ import annotations

from collections.abc import Sequence

from modelworks.config import RunConfig
from modelworks.layout import Layout, plan_parameters, stages_of
from modelworks.layout.data_memory import data_parallel_memory
from modelworks.layout.pipeline import peak_formula, stage_layers
from modelworks.train.memory import NARROW, WIDE, MemoryPrediction, predict_memory


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
        config.model, config.train, precision=precision, micro_batch=micro_batch, seq_len=config.data.seq_len
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
    plans = plan_parameters(model, layout, parallel, rank, stages)
    stored = NARROW if precision == "bf16" else WIDE
    rows = config.train.global_batch // (parallel.dp_replicate * parallel.dp_shard)
    micro_batches = -(-rows // micro_batch)
    data = data_parallel_memory(
        plans,
        layout,
        rank,
        zero=parallel.zero,
        accumulate=parallel.accumulate_reduce,
        micro_batches=micro_batches,
        itemsize=stored,
    )
    state = 2 * WIDE + (WIDE if precision == "bf16" else 0)
    held = stages_of(layout, parallel, rank)
    layers = sum(len(stages[stage]) for stage in held) / len(held)
    place = layout.coordinates(rank).pp
    in_flight = peak_formula(parallel.pp_schedule, parallel.pp, micro_batches, parallel.pp_virtual, rank=place)
    share = layers * in_flight / model.n_layers if parallel.pp > 1 else 1.0
    return MemoryPrediction(
        parameters=data.parameters,
        gradients=max(data.accumulating, data.gradients),
        optimizer=sum(plan.stored.n_local for plan in plans.values()) * state,
        activations=round(whole.activations * share / (parallel.cp * parallel.tp)),
        loss=whole.loss // (parallel.cp * parallel.tp) if len(stages) - 1 in held else 0,
    )
