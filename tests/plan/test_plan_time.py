"""Step time from first principles: what must be so whatever the constants are."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from planned import A100, MACHINE, split

from modelworks.config import ModelConfig, ParallelConfig, UserError, preset, training_flops_per_token
from modelworks.layout.pipeline import Costs, bubble_formula
from modelworks.plan import (
    CONSTANTS,
    MEGATRON_2021,
    MODELWORKS,
    Candidate,
    Split,
    evaluate,
    model_flops,
    step_time,
    work_of,
)
from modelworks.plan.communication import all_reduce, all_to_all, bus_bandwidth, gather_or_scatter
from modelworks.plan.compute import layer_time, utilisation
from modelworks.plan.pipeline import makespan, simulated, stage_counts
from modelworks.plan.topology import Group, group


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_ring_sends_its_share(ranks: int) -> None:
    """2 (N - 1) / N of the bytes for an all-reduce, which is a reduce-scatter and an all-gather."""
    machine, size = MACHINE.with_(link_latency=0.0), 1e9
    ring = Group(float(ranks), float(ranks))
    rate = machine.link_bandwidth * CONSTANTS.link
    assert float(all_reduce(machine, ring, size, CONSTANTS)) == pytest.approx(2 * (ranks - 1) / ranks * size / rate)
    halves = 2 * float(gather_or_scatter(machine, ring, size, CONSTANTS))
    assert halves == pytest.approx(float(all_reduce(machine, ring, size, CONSTANTS)))


def test_nobody_waits_alone() -> None:
    alone = Group(1.0, 1.0)
    for exchange in (all_reduce, gather_or_scatter, all_to_all):
        assert float(exchange(MACHINE, alone, 1e9, CONSTANTS)) == 0.0


def test_a_group_over_nodes_has_the_adapters_of_its_ranks() -> None:
    two_nodes, spread = group(MACHINE, 1.0, 16.0), group(MACHINE, 8.0, 2.0)
    assert (float(two_nodes.inside), float(spread.inside)) == (8.0, 1.0)
    one = MACHINE.network_bandwidth * CONSTANTS.network
    assert float(bus_bandwidth(MACHINE, spread, CONSTANTS)) == pytest.approx(one)
    assert float(bus_bandwidth(MACHINE, two_nodes, CONSTANTS)) == pytest.approx(8 * one)


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt3-6.7b", "mixtral-8x7b", "mistral-7b"])
def test_flops_are_those_of_the_model(name: str) -> None:
    config = preset(name)
    causal, full = model_flops(work_of(config, split(), A100))
    counted = training_flops_per_token(config, 2048)
    assert float(causal) == pytest.approx(counted.training, rel=1e-9)
    assert float(full) == pytest.approx(counted.training_full_attention, rel=1e-9)


@pytest.mark.parametrize("micro_batches", [8, 32])
@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 4)])
def test_bubble(micro_batches: int, schedule: str, virtual: int) -> None:
    """(p - 1) / (v m + p - 1) of the time: closed form, formula and the trainer's own schedule agree."""
    p, names = 4, ("gpipe", "1f1b", "interleaved")
    layers = preset("gpt2-medium").model_copy(update={"n_layers": 16})
    layout = split(
        pp=float(p), virtual=float(virtual), global_batch=float(micro_batches), schedule=float(names.index(schedule))
    )
    stages = stage_counts(work_of(layers, layout, A100).shape, layout, 0.0)
    busy, idle = makespan(layout, stages, 1.0, 1.0, 1.0, 0.0)
    closed = float(idle / (busy + idle))
    expected = (p - 1) / (virtual * micro_batches + p - 1)
    assert closed == pytest.approx(expected)
    assert bubble_formula(schedule, p, micro_batches, virtual) == pytest.approx(expected)
    timeline = simulated(schedule, Costs.even(p * virtual), p, micro_batches, virtual)
    assert timeline.bubble_fraction == pytest.approx(expected)


def test_recomputing_everything_costs_one_more_forward_pass() -> None:
    """A third of the products' time, as a forward pass is a third of a step's FLOPs."""
    layers = preset("gpt3-13b")
    none, full = (step_time(work_of(layers, split(micro_batch=8.0, recompute=mode), A100)) for mode in (0.0, 2.0))
    assert float(full.recompute / none.linear) == pytest.approx(1 / 3, abs=0.06)
    assert float(none.recompute) == 0.0
    assert float(full.linear) == float(none.linear)


def test_halving_the_work_of_a_rank_does_not_cost_more() -> None:
    layers = preset("llama-3-8b")
    times = [float(step_time(work_of(layers, split(dp_shard=float(n), zero=1.0), A100)).total) for n in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)


def test_a_transfer_inside_the_node_is_cheaper() -> None:
    layers = preset("llama-3-70b")
    inside, across = (float(step_time(work_of(layers, split(tp=tp), A100)).tensor) for tp in (8.0, 16.0))
    assert across > 1.3 * inside


def test_products_that_fill_tiles_are_faster() -> None:
    work = work_of(preset("llama-3-8b"), split(), A100)
    full, ragged = (float(utilisation(work, 4096.0, n, 4096.0)) for n in (4096.0, 4097.0))
    assert 0.0 < ragged < full <= 1.0


def test_flash_attention_is_faster_where_sequences_are_long() -> None:
    long = split(seq_len=8192.0)
    flash, unfused = (
        float(layer_time(work_of(preset("llama-3-8b"), long, A100, software=each)).attention.total)
        for each in (MODELWORKS, MEGATRON_2021)
    )
    assert unfused > 2 * flash


def test_one_candidate_is_simulated_on_the_schedule() -> None:
    parallel = ParallelConfig(tp=2, pp=4, dp_shard=2, zero=1)
    candidate = Candidate(preset("llama-3-8b"), parallel, A100, micro_batch=1, global_batch=64, seq_len=4096)
    found = evaluate(candidate)
    assert found.timeline is not None
    assert 0.0 < found.bubble < 0.3
    assert found.step_seconds == pytest.approx(sum(found.parts.values()))
    assert 0.1 < found.mfu < 0.7
    layout = Split.of(parallel, micro_batch=1, global_batch=64, seq_len=4096)
    assert float(step_time(work_of(candidate.model, layout, A100)).total) == pytest.approx(found.step_seconds, rel=0.05)
    assert any("fits" in reason or "does not fit" in reason for reason in found.reasons)


def test_ten_thousands_of_devices_are_planned_like_a_few() -> None:
    """No list of ranks is made: a hundred thousand shards of ZeRO-3 are counted. None is less than a row."""
    few, many = (
        evaluate(Candidate(preset("llama-3-8b"), ParallelConfig(dp_shard=n, zero=3), A100, 1, n, 4096))
        for n in (64, 2**17)
    )
    assert many.bytes["optimizer"] < few.bytes["optimizer"] / 64
    assert many.step_seconds > few.step_seconds


def test_a_batch_that_does_not_divide_is_refused() -> None:
    candidate = Candidate(preset("llama-3-8b"), ParallelConfig(dp_replicate=3), A100, 1, 64, 4096)
    with pytest.raises(UserError, match="global_batch: got 64, expected a multiple of 3"):
        evaluate(candidate)
    with pytest.raises(UserError, match="precision: got 'bf8', expected one of"):
        evaluate(replace(candidate, parallel=ParallelConfig(), precision="bf8"))


def test_published_step_times() -> None:
    """A few well-known measurements (Narayanan et al. 2021, table 1; Korthikanti et al. 2022, table 5): within 15 %."""
    rows = [
        # layers, width, heads, tp, pp, virtual, dp, rows of a micro-batch, of a batch, recompute, seconds
        (36, 4096, 32, 4, 1, 1, 32, 16, 512, 2, 3.696),
        (48, 8192, 64, 8, 2, 1, 32, 4, 1536, 2, 14.453),
        (80, 12288, 96, 8, 8, 2, 24, 2, 2304, 2, 24.817),
        (96, 12288, 96, 8, 8, 3, 1, 1, 64, 1, 13.75),
        (105, 20480, 128, 8, 35, 3, 1, 1, 280, 1, 37.83),
    ]
    for n_layers, d_model, n_heads, tp, pp, virtual, dp, micro, batch, recompute, seconds in rows:
        shape = ModelConfig(
            family="gpt2", n_layers=n_layers, d_model=d_model, n_heads=n_heads, vocab_size=51200, max_seq_len=2048
        )
        layout = split(
            tp=float(tp), pp=float(pp), virtual=float(virtual), dp_replicate=float(dp), micro_batch=float(micro),
            global_batch=float(batch), recompute=float(recompute), schedule=2.0 if virtual > 1 else 1.0, even=1.0,
            sequence_parallel=float(recompute == 1),
        )  # fmt: skip
        predicted = step_time(work_of(shape, layout, A100, software=MEGATRON_2021)).total
        assert float(predicted) == pytest.approx(seconds, rel=0.15)


def test_thousands_of_layouts_at_once() -> None:
    """A search evaluates arrays, in one call."""
    rng = np.random.default_rng(0)
    count = 20_000
    layout = split(**{name: 2.0 ** rng.integers(0, 4, count) for name in ("tp", "pp", "dp_shard", "micro_batch")})  # type: ignore[arg-type]
    total = step_time(work_of(preset("llama-3-70b"), layout, A100)).total
    assert total.shape == (count,)
    assert np.isfinite(total).all()


def test_importing_the_room_imports_no_torch() -> None:
    code = "import sys, modelworks.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
