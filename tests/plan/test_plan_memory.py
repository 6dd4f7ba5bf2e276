"""Memory from first principles, from the paper's formulas, and against what our own runs are held to."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from modelworks.config import ModelConfig, ParallelConfig, TrainConfig, count_parameters, preset
from modelworks.hardware import device
from modelworks.layout import Layout, data_parallel_memory, plan_parameters
from modelworks.layout.pipeline import Costs
from modelworks.plan import (
    FSDP,
    MEGATRON_2021,
    MODELWORKS,
    Candidate,
    Numerics,
    Shape,
    Split,
    Work,
    evaluate,
    layer_activations,
    memory,
    stored,
    work_of,
)
from modelworks.plan.memory import stored_bytes
from modelworks.plan.pipeline import in_flight, simulated
from modelworks.plan.stored import stages
from modelworks.train.memory import activation_bytes

A100 = device("A100")
GPT = ModelConfig(family="gpt2", n_layers=4, d_model=1024, n_heads=16, vocab_size=50304, max_seq_len=512)


def split(**changes: float) -> Split:
    return Split(**{"micro_batch": 1.0, "global_batch": 64.0, "seq_len": 512.0, **changes})


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 112.0), (1, 14 + 14 + 84 / 8), (2, 14 + 98 / 8), (3, 14.0)])
def test_seven_billion_parameters_under_adam(zero: int, gigabytes: float) -> None:
    """7e9 parameters, 2 + 2 + 12 bytes of each: 14 + 14 + 84 GB, and an eighth of what each stage of ZeRO shards."""
    billions = Shape(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 7e9, 2.0, tied=1.0, norms=0.0)
    narrow = MODELWORKS.with_(wide_gradients=0.0)
    work = Work(billions, split(dp_shard=8.0, zero=float(zero)), None, Numerics.of("bf16"), narrow)  # type: ignore[arg-type]
    assert sum(stored_bytes(work, 0.0, 1.0, 1.0)) == pytest.approx(gigabytes * 1e9, rel=1e-6)


@pytest.mark.parametrize(
    "name", ["gpt2-small", "llama-tiny", "llama-3-8b", "qwen3-0.6b", "mixtral-tiny", "qwen3-30b-a3b"]
)
def test_parameters_are_those_of_the_model(name: str) -> None:
    assert Shape.of(preset(name)).parameters == count_parameters(preset(name)).total


@pytest.mark.parametrize(
    ("tp", "sequence", "recompute", "expected"),
    [
        (1, 0, 0, "s * b * h * (34 + 5 * a * s / h)"),
        (8, 0, 0, "s * b * h * (10 + 24 / t + 5 * a * s / (h * t))"),
        (8, 1, 0, "s * b * h / t * (34 + 5 * a * s / h)"),
        (8, 1, 1, "34 * s * b * h / t"),
        (8, 0, 1, "s * b * h * (10 + 24 / t)"),
        (8, 0, 2, "2 * s * b * h"),
        (8, 1, 2, "2 * s * b * h / t"),
    ],
)
def test_activations_of_korthikanti(tp: int, sequence: int, recompute: int, expected: str) -> None:
    """2205.05198, equations 1 to 5 and the end of section 5, for the 530-billion model."""
    s, b, h, a, t = 2048, 1, 20480, 128, tp
    shape = Shape(105.0, float(h), float(a), float(a), h / a, 4.0 * h, 51200.0, 2.0, norms=2.0, dropout=1.0, rotary=0.0)
    layout = split(seq_len=s, tp=float(tp), sequence_parallel=float(sequence), recompute=float(recompute))
    work = Work(shape, layout, None, Numerics.of("bf16"), MEGATRON_2021)  # type: ignore[arg-type]
    wanted = eval(expected, {"s": s, "b": b, "h": h, "a": a, "t": t})
    assert float(layer_activations(work)) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    "name", ["llama-tiny", "gpt2-small", "smollm2-135m", "qwen3-0.6b", "mixtral-tiny", "llama-2-7b"]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-autocast"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_activations_are_what_autograd_keeps(name: str, precision: str, recompute: str) -> None:
    config, train = preset(name), TrainConfig(recompute=recompute, device="cuda")  # type: ignore[arg-type]
    kept = activation_bytes(config, train, precision=precision, micro_batch=2, seq_len=1024)
    layout = Split.of(ParallelConfig(), micro_batch=2, global_batch=4, seq_len=1024, recompute=recompute)
    assert float(memory(work_of(config, layout, A100, precision=precision)).activations) == pytest.approx(kept, rel=0.1)


LAYOUTS = [
    {"dp_shard": 4, "zero": 1},
    {"dp_shard": 4, "zero": 2, "tp": 2},
    {"dp_shard": 2, "zero": 3, "cp": 2},
    {"dp_replicate": 2, "dp_shard": 2, "zero": 3, "pp": 2},
    {"dp_shard": 3, "zero": 3},
    {"pp": 4, "tp": 2},
    {"tp": 4, "dp_replicate": 2, "accumulate_reduce": "every"},
    {"pp": 2, "pp_schedule": "zbv", "dp_shard": 2, "zero": 1},
    {"dp_shard": 4, "zero": 1, "offload": "cpu"},
]


@pytest.mark.parametrize("keys", LAYOUTS)
@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_stored_bytes_are_the_layouts_own(name: str, keys: dict[str, int]) -> None:
    config, parallel = preset(name), ParallelConfig(**keys)  # type: ignore[arg-type]
    layout, numerics = Layout.of(parallel), Numerics.of("bf16")
    for rank in range(layout.world_size):
        plans = plan_parameters(config, layout, parallel, rank, stages(config, parallel, 256))
        data = data_parallel_memory(
            plans, layout, rank, zero=parallel.zero, accumulate=parallel.accumulate_reduce, micro_batches=4, itemsize=2
        )
        found = stored(config, parallel, rank, numerics=numerics, seq_len=256, micro_batches=4)
        assert found.parameters == data.parameters
        assert found.gradients == max(data.accumulating, data.gradients)
        state = 12 * sum(plan.stored.n_local for plan in plans.values())
        assert found.optimizer == (0 if parallel.offload == "cpu" else state)


def test_experts_are_stored_where_they_live() -> None:
    """Four ranks of two experts each hold half of the experts' parameters that one rank holds, and all of the rest."""
    config, numerics = preset("mixtral-tiny"), Numerics.of("bf16")
    one, halved = (
        stored(config, ParallelConfig(dp_shard=4, ep=ep), 0, numerics=numerics, seq_len=256, micro_batches=1)
        for ep in (1, 2)
    )
    experts = 2 * float(Shape.of(config).expert_weights * config.n_layers)
    assert one.parameters - halved.parameters == experts / 2


@pytest.mark.parametrize(
    "keys", [{}, {"dp_shard": 4, "zero": 1}, {"dp_shard": 8, "zero": 3}, {"tp": 4}, {"tp": 2, "zero": 3, "dp_shard": 4}]
)
def test_closed_form_of_parameters_agrees_with_the_plans(keys: dict[str, int]) -> None:
    config, parallel = preset("llama-3-8b"), ParallelConfig(**keys)  # type: ignore[arg-type]
    exact = stored(config, parallel, 0, numerics=Numerics.of("bf16"), seq_len=4096, micro_batches=1)
    layout = Split.of(parallel, micro_batch=1, global_batch=64, seq_len=4096)
    fast = memory(work_of(config, layout, A100))
    assert float(fast.parameters) == pytest.approx(exact.parameters, rel=2e-3)
    assert float(fast.optimizer) == pytest.approx(exact.optimizer, rel=2e-3)


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8])
def test_a_stage_holds_no_more_than_those_before_the_first_returns(rank: int, micro_batches: int) -> None:
    """Stage k of p holds min(p - k, m) micro-batches under 1F1B: simulated, and at both ends in closed form."""
    assert simulated("1f1b", Costs.even(4), 4, micro_batches).peak_held[rank] == min(4 - rank, micro_batches)
    layout = split(pp=4.0, global_batch=float(micro_batches))
    if rank in (0, 3):
        assert float(in_flight(layout, last=rank == 3)) == min(4 - rank, micro_batches)


def test_interleaving_holds_more() -> None:
    """By the factor 1 + (p - 1) / (p v) (Narayanan et al. 2021)."""
    p, v = 8.0, 4.0
    plain = float(in_flight(split(pp=p, global_batch=64.0)))
    interleaved = float(in_flight(split(pp=p, virtual=v, schedule=2.0, global_batch=64.0)))
    assert interleaved / plain == pytest.approx(1 + (p - 1) / (p * v))


def test_columns_give_what_rows_give() -> None:
    tp = np.array([1.0, 2.0, 4.0, 8.0])
    whole = memory(work_of(GPT, split().with_(tp=tp), A100)).total
    single = [float(memory(work_of(GPT, split(tp=float(each)), A100)).total) for each in tp]
    assert whole == pytest.approx(single, rel=1e-12)
    assert all(math.isfinite(each) for each in single)


def test_what_is_offloaded_is_no_longer_on_the_device() -> None:
    """Optimiser state and ZeRO-3's shards, and all but two layers' activations."""
    layout = split(dp_shard=8.0, zero=3.0, micro_batch=4.0)
    kept = memory(work_of(GPT, layout, A100))
    away = work_of(GPT, layout.with_(offload=1.0, offload_params=1.0, offload_activations=1.0), A100)
    left = memory(away)
    assert float(left.optimizer) == float(left.parameters) == 0.0
    layers = 4 * float(layer_activations(away))
    assert float(kept.activations - left.activations) == pytest.approx(layers / 2)


@pytest.mark.parametrize(
    ("keys", "recompute"),
    [
        ({"pp_schedule": "1f1b"}, "none"),
        ({"pp_schedule": "interleaved", "pp_virtual": 2}, "selective"),
        ({"pp_schedule": "zbv"}, "full"),
        ({"pp_schedule": "gpipe"}, "none"),
        ({"pp_schedule": "1f1b", "pp_partition": [9, 8, 8, 7]}, "none"),
    ],
    ids=["1f1b", "interleaved", "zbv", "gpipe", "partition"],
)
def test_memory_over_a_step_peaks_at_what_each_rank_needs(keys: dict[str, Any], recompute: str) -> None:
    """Two ways: step by step through the schedule's times, and the most that its orders hold at once."""
    parallel = ParallelConfig(pp=4, dp_shard=2, zero=1, **keys)
    one = Candidate(preset("llama-3-8b"), parallel, A100, 1, 32, 4096, recompute=recompute)
    found = evaluate(one)
    assert found.timeline is not None
    assert found.activations_over_time is not None
    for sizes, curve in zip(found.bytes_by_stage, found.activations_over_time, strict=True):
        assert max(size for _, size in curve) == pytest.approx(sizes["activations"], rel=1e-12)
        assert curve[-1][1] == min(size for _, size in curve) < 0.5 * sizes["activations"]
        assert 0.0 <= curve[0][0] < curve[-1][0] <= found.timeline.makespan
        assert [seconds for seconds, _ in curve] == sorted(seconds for seconds, _ in curve)
    assert evaluate(one, timeline=False).activations_over_time is None


@pytest.mark.parametrize(
    ("keys", "hosts"),
    [
        ({"dp_shard": 8, "zero": 1}, 1),
        ({"pp": 4, "dp_shard": 2, "zero": 1}, 1),  # the stages share a host
        ({"tp": 2, "pp": 4, "dp_shard": 2, "zero": 1}, 2),
        ({"dp_replicate": 2, "dp_shard": 8, "zero": 1}, 1),  # each host has a copy
    ],
)
def test_offload_tells_what_a_host_must_hold(keys: dict[str, Any], hosts: int) -> None:
    """All state of adamw (two moments and a copy in float32) of the model, over the hosts; the fullest may hold more
    than its share, as the last stages have the head."""
    one = Candidate(preset("llama-3-8b"), ParallelConfig(**keys, offload="cpu"), A100, 1, 16, 2048)
    state = 12.0 * count_parameters(one.model).total
    found = evaluate(one)
    assert found.host_memory == pytest.approx(state / hosts, rel=2e-3 if hosts == 1 else 0.06)
    assert found.host_memory >= state / hosts * 0.999
    assert found.bytes["optimizer"] == 0.0
    for offload in ("none", "nvme"):
        other = replace(one, parallel=one.parallel.model_copy(update={"offload": offload}))
        assert evaluate(other).host_memory == 0.0
    waits = {"offload": "none", "zero": 3, "offload_params": True}
    other = replace(one, parallel=one.parallel.model_copy(update=waits))
    assert evaluate(other).host_memory == pytest.approx(found.host_memory / 6, rel=1e-6)


def test_operands_in_8_bits_are_kept_in_8_bits() -> None:
    wide, narrow = (
        float(layer_activations(work_of(preset("llama-3-8b"), split(), device("H100"), precision=each, software=FSDP)))
        for each in ("bf16", "fp8")
    )
    assert 0.6 * wide < narrow < 0.9 * wide
