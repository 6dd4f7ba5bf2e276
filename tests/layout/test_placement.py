"""Over all ranks, what is stored and counted covers each element of each parameter exactly once, on any layout."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from modelworks.config import ModelConfig, ParallelConfig, parameter_shapes, preset, preset_names
from modelworks.layout import Layout, placement, plan_parameters


def test_every_parameter_of_every_preset_is_placed() -> None:
    for name in preset_names():
        model = preset(name).model_copy(update={"n_layers": 1})
        for parameter in parameter_shapes(model):
            assert placement(parameter)


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelConfig, ParallelConfig]:
    tp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    n_kv_heads = draw(st.sampled_from([1, 2, 4]))
    parallel: dict[str, object] = {
        "tp": tp,
        "pp": pp,
        "dp_replicate": draw(st.sampled_from([1, 2])),
        "dp_shard": draw(st.sampled_from([1, 2, 3])),
        "cp": draw(st.sampled_from([1, 2])),
        "sequence_parallel": draw(st.booleans()),
    }
    if parallel["dp_shard"] != 1:
        parallel["zero"] = draw(st.sampled_from([1, 2, 3]))
    if pp > 1:
        parallel["pp_schedule"] = draw(st.sampled_from(["1f1b", "zbv"]))
    model = ModelConfig(
        family=draw(st.sampled_from(["llama", "gpt2", "qwen3"])),
        n_layers=4,
        d_model=8,
        n_heads=4,
        n_kv_heads=n_kv_heads,
        d_ff=13,
        vocab_size=11,
        max_seq_len=7,
        tie_embeddings=draw(st.booleans()),
    )
    return model, ParallelConfig(**parallel)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_each_element_is_counted_once(case: tuple[ModelConfig, ParallelConfig]) -> None:
    model, parallel = case
    layout = Layout.of(parallel)
    stages = [[0, 1], [2, 3]] if parallel.pp > 1 and parallel.pp_schedule == "1f1b" else [[0], [1], [2], [3]]
    stages = stages if parallel.pp > 1 else [[0, 1, 2, 3]]
    counts = {name: np.zeros(shape, int) for name, shape in parameter_shapes(model).items()}
    for rank in range(layout.world_size):
        for name, plan in plan_parameters(model, layout, parallel, rank, stages).items():
            assert plan.stored.shape == plan.computed.shape == counts[name].shape
            for inner, outer in zip(plan.stored.bounds, plan.computed.bounds, strict=True):
                assert outer[0] <= inner[0] <= inner[1] <= outer[1]
            if plan.stored.counted:
                counts[name][plan.stored.slices] += 1
    assert all((count == 1).all() for count in counts.values())


@settings(max_examples=25, deadline=None)
@given(cases())
def test_gradients_of_all_holders_are_summed(case: tuple[ModelConfig, ParallelConfig]) -> None:
    """Ranks that hold the same elements and see different things are joined by the groups that the plan names."""
    model, parallel = case
    layout = Layout.of(parallel)
    stages = [[0], [1], [2], [3]] if parallel.pp_schedule == "zbv" else [[0, 1], [2, 3]]
    stages = stages if parallel.pp > 1 else [[0, 1, 2, 3]]
    plans = [plan_parameters(model, layout, parallel, rank, stages) for rank in range(layout.world_size)]
    holders_of: dict[Any, set[int]] = {}
    for rank, own in enumerate(plans):
        for name, plan in own.items():
            holders_of.setdefault((name, plan.computed.bounds), set()).add(rank)
    joined_by: dict[Any, set[int]] = {}
    for rank, own in enumerate(plans):
        for name, plan in own.items():
            holders = holders_of[name, plan.computed.bounds]
            groups = (plan.shard_group, plan.replicate_group, *plan.sums)
            if (rank, groups) not in joined_by:
                joined = {rank}
                for _ in groups:  # each pass goes one group further
                    for member in list(joined):
                        for group in groups:
                            joined |= set(_ranks(layout, member, group, model))
                joined_by[rank, groups] = joined
            joined = joined_by[rank, groups]
            alike = {r for r in holders if layout.coordinates(r).tp == layout.coordinates(rank).tp}
            # Without sequence parallelism tensor-parallel ranks compute the very same gradient of a norm.
            assert alike <= joined <= holders
            if parallel.sequence_parallel:
                assert joined == holders


def _ranks(layout: Layout, rank: int, group: str, model: ModelConfig) -> tuple[int, ...]:
    if group == "kv":
        return layout.kv_ranks(rank, model.n_kv_heads)
    return layout.tied_ranks(rank) if group == "tied" else layout.ranks(rank, group)
