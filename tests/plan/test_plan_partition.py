"""Layers to stages by seconds, against every partition there is; and under the memory of each rank."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from modelworks.config import ModelConfig, ParallelConfig
from modelworks.hardware import device
from modelworks.plan import Candidate, evaluate
from modelworks.plan.partition import best_partition, improved

# a head of many rows, so that seconds and FLOPs disagree
MODEL = ModelConfig(n_layers=7, d_model=512, n_heads=8, vocab_size=250_001, max_seq_len=2048)


def candidate(**parallel: object) -> Candidate:
    return Candidate(MODEL, ParallelConfig(**{"pp": 3, **parallel}), device("A100"), 1, 16, 1024)  # type: ignore[arg-type]


def seconds(one: Candidate, counts: list[int]) -> float:
    parallel = one.parallel.model_copy(update={"pp_partition": counts})
    return evaluate(replace(one, parallel=parallel), timeline=False).step_seconds


def test_no_other_partition_is_faster() -> None:
    one = candidate()
    every = [
        [first, second, 7 - first - second]
        for first, second in itertools.product(range(8), range(1, 8))
        if first + second <= 7
    ]
    times = {tuple(counts): seconds(one, counts) for counts in every}
    chosen = best_partition(one)
    assert chosen is not None
    assert times[tuple(chosen)] <= min(times.values()) * 1.001
    better = improved(one)
    if better is not None:
        assert better.parallel.pp_partition == chosen
        assert evaluate(better, timeline=False).step_seconds <= evaluate(one, timeline=False).step_seconds


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("interleaved", 2), ("zbv", 1), ("interleaved-zb", 2)])
def test_what_it_chooses_fits(schedule: str, virtual: int) -> None:
    """Under the tightest of a few limits that allow any, also with several stages on a rank."""
    one = candidate(pp=2, pp_schedule=schedule, pp_virtual=virtual)
    default = evaluate(one, timeline=False)
    limits = [1.0 - share * default.memory / 80e9 for share in (0.9, 0.95, 0.999, 1.001, 1.2)]
    headroom, counts = next((limit, found) for limit in limits if (found := best_partition(one, headroom=limit)))
    parallel = one.parallel.model_copy(update={"pp_partition": counts})
    assert evaluate(replace(one, parallel=parallel), headroom=headroom, timeline=False).fits


def test_nothing_is_chosen_where_nothing_fits() -> None:
    assert best_partition(candidate(), headroom=0.9999) is None
