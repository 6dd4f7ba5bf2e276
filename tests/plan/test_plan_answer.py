"""What a plan found as plain values: layouts that read back, points thinned, timelines cut."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from modelworks.config import ParallelConfig, RunConfig, parse_run_config, preset
from modelworks.hardware import device
from modelworks.layout.pipeline import Costs, build_program, simulate
from modelworks.plan import Candidate, evaluate
from modelworks.plan.answer import POINTS, details_answer, layout_answer, thinned
from modelworks.plan.held import held_over_time
from modelworks.plan.job import OF_PARALLEL, OF_TRAIN
from modelworks.plan.layout_keys import LAYOUT_KEYS, layout_of, layout_overrides, layout_text
from modelworks.plan.prices import price_of
from modelworks.plan.search import Points
from modelworks.plan.timeline_cut import PER_RANK, cut_curves, cut_timeline

PARALLEL = ParallelConfig(tp=2, pp=2, pp_partition=[9, 7], dp_shard=2, zero=1, sequence_parallel=False)


def candidate(parallel: ParallelConfig = PARALLEL) -> Candidate:
    return Candidate(preset("llama-3.2-1b"), parallel, device("A100"), 2, 32, 2048, recompute="full")


def test_the_keys_are_those_of_the_search() -> None:
    assert set(LAYOUT_KEYS) == {*OF_PARALLEL, *OF_TRAIN}
    assert layout_of(candidate()).keys() == set(LAYOUT_KEYS)


def test_a_layout_is_written_so_that_the_configuration_reads_it_back() -> None:
    one = candidate()
    assert layout_text(one) == (
        "tp=2,sequence_parallel=false,pp=2,pp_partition=[9,7],dp_shard=2,zero=1,micro_batch=2,recompute=full"
    )
    text = "model: llama-3.2-1b\ndata: {tokenizer: none}\n"
    run: RunConfig = parse_run_config(text, "here", layout_overrides(one))
    assert run.parallel == PARALLEL
    assert (run.train.micro_batch, run.train.recompute) == (2, "full")
    assert layout_text(candidate(ParallelConfig())) == "micro_batch=2,recompute=full"


def test_an_answer_is_json_and_adds_up() -> None:
    one = candidate()
    prediction = evaluate(one)
    answer = layout_answer(one, prediction, price=price_of(one.device, 3.6)) | details_answer(prediction)
    assert json.loads(json.dumps(answer, allow_nan=False)).keys() == answer.keys()
    assert answer["usd_per_million_tokens"] == pytest.approx(8 * 1e-3 * 1e6 / prediction.tokens_per_second)
    assert max(sum(each.values()) for each in answer["stage_bytes"]) == prediction.memory
    assert len(answer["stage_bytes"]) == len(answer["timeline"]["ranks"]) == 2
    for sizes, curve in zip(answer["stage_bytes"], answer["activation_bytes_over_time"], strict=True):
        assert max(size for _, size in curve) == sizes["activations"]
    assert answer["host_memory_bytes"] == 0.0


def points(count: int) -> Points:
    generator = np.random.default_rng(7)
    step, memory = np.exp(generator.normal(size=(2, count)))
    step[::10] = np.nan
    return Points(step, memory * 1e9, memory < 1.0)


def test_few_points_stay_as_they_are() -> None:
    found = thinned(points(50))
    assert len(found["step_seconds"]) == 45
    assert all(size < 1e9 for size, fits in zip(found["memory_bytes"], found["fits"], strict=True) if fits)


def test_many_points_are_thinned_to_a_picture_that_keeps_the_best() -> None:
    every = points(200_000)
    found = thinned(every)
    assert 300 < len(found["step_seconds"]) <= POINTS
    assert np.isfinite(found["step_seconds"]).all()
    assert min(found["step_seconds"]) == np.nanmin(every.step)
    assert min(found["memory_bytes"]) == every.memory[np.isfinite(every.step)].min()
    shown = set(zip(found["step_seconds"], found["memory_bytes"], strict=True))
    assert shown <= set(zip(every.step.tolist(), every.memory.tolist(), strict=True))


def test_no_points() -> None:
    assert thinned(points(1)) == {"step_seconds": [], "memory_bytes": [], "fits": []}


@pytest.mark.parametrize("micro_batches", [4, 200])
def test_long_timelines_lose_their_middle(micro_batches: int) -> None:
    timeline = simulate(build_program("1f1b", 4, micro_batches, 1), Costs.even(4))
    cut = cut_timeline(timeline)
    kept = sum(map(len, cut["ranks"]))
    assert kept + cut["left_out"] == 4 * 2 * micro_batches
    assert cut["makespan_seconds"] == timeline.makespan
    if micro_batches == 4:
        assert cut["left_out"] == 0
        assert cut["left_out_from_seconds"] is None
        return
    assert kept <= 4 * 44 + 8
    begin, end = cut["left_out_from_seconds"], cut["left_out_to_seconds"]
    assert 0 < begin < end < timeline.makespan
    assert all(stop <= begin or start >= end for rank in cut["ranks"] for *_, start, stop in rank)
    last = max(row[2] for row in cut["ranks"][0])
    assert last == micro_batches - 1


@pytest.mark.parametrize("micro_batches", [4, 200])
def test_curves_lose_the_same_middle(micro_batches: int) -> None:
    """What is left of a curve has its values everywhere outside the middle, and few points."""
    timeline = simulate(build_program("1f1b", 4, micro_batches, 1), Costs.even(4, backward_weight=1.3))
    curves = held_over_time(timeline, (1, 2, 3, 4))
    cut = cut_timeline(timeline)
    short = cut_curves(curves, cut)
    if micro_batches == 4:
        assert short == [[list(point) for point in curve] for curve in curves]
        return
    assert sum(map(len, short)) <= 4 * (PER_RANK + 4)
    begin, end = cut["left_out_from_seconds"], cut["left_out_to_seconds"]
    for curve, kept in zip(curves, short, strict=True):
        for moment in np.linspace(0.0, timeline.makespan, 4001):
            if not begin < moment < end:
                assert value_at(kept, moment) == value_at(curve, moment)


def value_at(curve: list[Any], moment: float) -> float:
    return next((value for seconds, value in reversed(curve) if seconds <= moment), 0.0)
