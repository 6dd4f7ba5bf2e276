"""Layers to ranks by seconds, against every partition there is; and under the memory of each rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from modelworks.config import ModelConfig, ParallelConfig
from modelworks.hardware import device
from modelworks.layout import V_SHAPED
from modelworks.plan import Candidate, evaluate
from modelworks.plan.candidate import candidate_work, costs_of_stages
from modelworks.plan.constants import CONSTANTS
from modelworks.plan.held import stages_by_rank
from modelworks.plan.partition import best_partition, improved

# a head of many rows, so that seconds and FLOPs disagree
MODEL = ModelConfig(n_layers=7, d_model=512, n_heads=8, vocab_size=250_001, max_seq_len=2048)
SCHEDULES = [("1f1b", 1), ("interleaved", 2), ("zbv", 1), ("dualpipev", 1), ("interleaved-zb", 2)]


def candidate(**parallel: object) -> Candidate:
    return Candidate(MODEL, ParallelConfig(**{"pp": 3, **parallel}), device("A100"), 1, 16, 1024)  # type: ignore[arg-type]


def with_partition(one: Candidate, counts: list[int]) -> Candidate:
    return replace(one, parallel=one.parallel.model_copy(update={"pp_partition": counts}))


def partitions(stages: int) -> Iterator[list[int]]:
    """All of them: every inner stage has a layer."""
    for inner in itertools.product(range(1, 8), repeat=stages - 2):
        for first in range(8 - sum(inner)):
            yield [first, *inner, 7 - first - sum(inner)]


def load(one: Candidate, counts: list[int]) -> float:
    """Seconds of one micro-batch on the rank that has most to do."""
    costs, _ = costs_of_stages(candidate_work(one, CONSTANTS), counts)
    seconds = [sum(each) for each in zip(costs.forward, costs.backward_input, costs.backward_weight, strict=True)]
    parallel = one.parallel
    placed = stages_by_rank(parallel.pp_schedule, parallel.pp, parallel.pp_virtual)
    return max(sum(seconds[stage] for stage in rank) for rank in placed)


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
def test_no_other_partition_loads_its_fullest_rank_less(schedule: str, virtual: int) -> None:
    one = candidate(pp=2, pp_schedule=schedule, pp_virtual=virtual)
    chosen = best_partition(one)
    assert chosen is not None
    every = list(partitions(len(chosen)))
    least = min(load(one, counts) for counts in every)
    assert load(one, chosen) == pytest.approx(least, rel=1e-9)
    better = improved(one)
    if better is not None:
        assert better.parallel.pp_partition == chosen
    seconds = {tuple(each): evaluate(with_partition(one, each), timeline=False).step_seconds for each in every}
    assert seconds[tuple(chosen)] <= min(seconds.values()) * 1.05  # the schedule has a say too


def test_no_other_partition_of_single_stages_is_faster() -> None:
    one = candidate()
    times = [evaluate(with_partition(one, counts), timeline=False).step_seconds for counts in partitions(3)]
    chosen = best_partition(one)
    assert chosen is not None
    assert evaluate(with_partition(one, chosen), timeline=False).step_seconds <= min(times) * 1.001


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
def test_under_every_limit_of_memory_it_is_the_least_loaded_that_fits(schedule: str, virtual: int) -> None:
    one = candidate(pp=2, pp_schedule=schedule, pp_virtual=virtual)
    stages = 4 if schedule in V_SHAPED else 2 * virtual
    needs = {tuple(each): evaluate(with_partition(one, each), timeline=False).memory for each in partitions(stages)}
    for limit in sorted(needs.values())[:: len(needs) // 4]:
        headroom = 1.0 - limit * (1.0 + 1e-4) / 80e9
        chosen = best_partition(one, headroom=headroom)
        assert chosen is not None
        assert needs[tuple(chosen)] <= limit * (1.0 + 1e-3)
        fitting = [list(counts) for counts, need in needs.items() if need <= limit]
        assert load(one, chosen) <= min(load(one, counts) for counts in fitting) * (1.0 + 1e-9)


def test_nothing_is_chosen_where_nothing_fits() -> None:
    assert best_partition(candidate(), headroom=0.9999) is None
