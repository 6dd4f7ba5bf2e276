"""Which layers go on which stage: each exactly once, in order, and least costly for the costliest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from modelworks.config import ModelConfig, RunConfig, UserError, training_flops_per_token
from modelworks.layout import Layout, stages_of
from modelworks.layout.pipeline import partition_layers, placed_stages, stage_costs, stage_layers
from modelworks.layout.pipeline.partition import equal_layers, least_maximum


def model(n_layers: int, vocab_size: int = 64, d_model: int = 32) -> ModelConfig:
    return ModelConfig(n_layers=n_layers, d_model=d_model, n_heads=4, vocab_size=vocab_size)


def run(n_layers: int, **parallel: Any) -> RunConfig:
    return RunConfig(model=model(n_layers), data={"seq_len": 16, "tokenizer": "none.json"}, parallel=parallel)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 20), st.integers(1, 22), st.sampled_from([8, 1000, 100_000]))
def test_each_layer_is_placed_exactly_once(n_layers: int, stages: int, vocab_size: int) -> None:
    if stages > n_layers + 2:
        with pytest.raises(UserError, match=f"expected at most {n_layers + 2}"):
            partition_layers(model(n_layers, vocab_size), 16, stages)
        return
    parts = partition_layers(model(n_layers, vocab_size), 16, stages)
    assert len(parts) == stages
    assert list(itertools.chain(*parts)) == list(range(n_layers))
    assert all(parts[1:-1])  # only the ends may stand alone


def costs_of(
    layers: Sequence[int], stages: int, *, first: float = 0.0, last: float = 0.0, most: Sequence[int] | None = None
) -> list[NDArray[np.float64]]:
    """Of each stage, by where it begins and ends. first, last: beside its layers. most: layers of each; one at least on
    those inside."""
    ends = np.cumsum([0, *layers])
    count = np.arange(len(ends))
    held = count[None, :] - count[:, None]
    found = []
    for stage in range(stages):
        beside = first * (stage == 0) + last * (stage == stages - 1)
        least, limit = int(0 < stage < stages - 1), len(layers) if most is None else most[stage]
        found.append(np.where((held >= least) & (held <= limit), ends[None, :] - ends[:, None] + beside, np.inf))
    return found


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(2, 5), st.integers(0, 30))
def test_no_partition_has_a_cheaper_costliest_stage(layers: list[int], stages: int, head: int) -> None:
    if stages > len(layers) + 2:
        return

    def costs(counts: tuple[int, ...]) -> list[int]:
        ends = list(itertools.accumulate(counts, initial=0))
        sums = [sum(layers[begin:end]) for begin, end in itertools.pairwise(ends)]
        return [*sums[:-1], sums[-1] + head]

    allowed = [
        counts
        for counts in itertools.product(range(len(layers) + 1), repeat=stages)
        if sum(counts) == len(layers) and all(counts[1:-1])
    ]
    found = tuple(least_maximum(costs_of(layers, stages, last=head)) or [])
    assert found in allowed
    best = min((max(costs(counts)), sum(cost**2 for cost in costs(counts))) for counts in allowed)
    assert (max(costs(found)), sum(cost**2 for cost in costs(found))) == best


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 12), st.integers(1, 14), st.sampled_from([0.0, 0.4, 1.0, 2.5, 3.0, 20.0]))
def test_equal_layers_are_placed_the_same_at_once(n_layers: int, stages: int, head: float) -> None:
    if stages <= n_layers + 2:
        assert equal_layers(n_layers, stages, last=head) == least_maximum(costs_of([1] * n_layers, stages, last=head))


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=6),
    st.lists(st.integers(1, 4), min_size=2, max_size=4),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_no_stage_has_more_layers_than_it_may(layers: list[int], most: list[int], first: int, last: int) -> None:
    def costs(counts: Sequence[int]) -> list[int]:
        ends = list(itertools.accumulate(counts, initial=0))
        sums = [sum(layers[begin:end]) for begin, end in itertools.pairwise(ends)]
        return [sums[0] + first, *sums[1:-1], sums[-1] + last]

    allowed = [
        counts
        for counts in itertools.product(*(range(limit + 1) for limit in most))
        if sum(counts) == len(layers) and all(counts[1:-1])
    ]
    found = least_maximum(costs_of(layers, len(most), first=first, last=last, most=most))
    if not allowed:
        assert found is None
        return
    assert found is not None
    assert tuple(found) in allowed
    assert max(costs(found)) == min(max(costs(counts)) for counts in allowed)


def test_a_large_head_takes_layers_from_the_last_stage() -> None:
    counts = [len(stage) for stage in partition_layers(model(8, vocab_size=8), 16, 4)]
    assert counts == [2, 2, 2, 2]
    heavy = model(8, vocab_size=2000)  # the head is worth about four layers
    assert [len(stage) for stage in partition_layers(heavy, 16, 4)] == [2, 3, 3, 0]
    assert [len(stage) for stage in partition_layers(heavy, 16, 2)] == [6, 2]


def test_costs_are_the_models_flops() -> None:
    for vocab_size in (64, 5000):
        shape = model(7, vocab_size)
        costs = stage_costs(shape, 16, partition_layers(shape, 16, 4))
        assert sum(costs) == pytest.approx(training_flops_per_token(shape, 16).forward)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_of_a_run(schedule: str) -> None:
    virtual = 1 if schedule == "1f1b" else 2
    config = run(7, pp=2, pp_schedule=schedule, pp_virtual=virtual)
    stages = stage_layers(config)
    held = [stages_of(Layout.of(config.parallel), config.parallel, rank) for rank in range(2)]
    assert held == placed_stages(schedule, 2, virtual)
    assert sorted(stage for own in held for stage in own) == list(range(len(stages)))
    assert sorted(layer for own in held for stage in own for layer in stages[stage]) == list(range(7))


def test_counts_that_the_user_gives() -> None:
    assert stage_layers(run(4)) == [[0, 1, 2, 3]]
    assert stage_layers(run(4, pp=3, pp_partition=[0, 4, 0])) == [[], [0, 1, 2, 3], []]
    with pytest.raises(UserError, match=r"pp_partition: got \[1, 2\] \(2 stages, 3 layers\), expected 2 stages with 4"):
        stage_layers(run(4, pp=2, pp_partition=[1, 2]))
