"""The gradient noise scale: known distributions, a model's own gradients of single sequences, all layouts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import health_jobs
import pytest
import torch
from pool import WorkerPool
from run_files import series

from modelworks.config import Duration, dump_yaml, parse_run_config
from modelworks.layout import Layout, ShardSpec, split_evenly
from modelworks.records import read_records
from modelworks.train.health.elements import Elements
from modelworks.train.health.noise import MEASUREMENTS, NoiseEstimate, NoiseScale, Squares, estimate_noise


def squares_of(parts: torch.Tensor, shares: torch.Tensor) -> Squares:
    """parts: the mean gradients of the parts (parts, elements)."""
    scaled = parts * shares[:, None]
    return Squares(float(scaled.sum(0).square().sum()), float(scaled.square().sum()), float(shares.square().sum()))


@pytest.mark.parametrize("rows", [[4, 4, 4, 4], [8, 4, 2, 1, 1]])
def test_known_noise_is_found(rows: list[int]) -> None:
    """g_i = G + N(0, Sigma), Sigma diagonal and far from isotropic, in batches of 16 sequences of 10 tokens."""
    draw = torch.Generator().manual_seed(0)
    size, steps = 64, 3000
    mean = torch.randn(size, generator=draw, dtype=torch.float64) / math.sqrt(size)
    deviation = 0.3 + 2 * torch.rand(size, generator=draw, dtype=torch.float64)
    trace, square = float(deviation.square().sum()), float(mean.square().sum())
    scale, estimates = NoiseScale(), []
    for _ in range(steps):
        gradients = mean + deviation * torch.randn(16, size, generator=draw, dtype=torch.float64)
        parts = torch.stack([part.mean(0) for part in gradients.split(rows)])
        shares = torch.tensor(rows, dtype=torch.float64) / 16
        # Two groups of parameters, as where experts are spread: what is added is what is found of all together.
        half = [squares_of(parts[:, some], shares) for some in (slice(0, 20), slice(20, size))]
        found = estimate_noise(half, sequences=16, targets=160.0)
        whole = estimate_noise([squares_of(parts, shares)], sequences=16, targets=160.0)
        assert found is not None
        assert whole is not None
        assert found.trace == pytest.approx(whole.trace)
        assert found.square == pytest.approx(whole.square, abs=1e-9)
        estimates.append(found)
        scale.add(found)
    assert sum(one.trace for one in estimates) / steps == pytest.approx(trace, rel=0.02)
    assert sum(one.square for one in estimates) / steps == pytest.approx(square, rel=0.05)
    ratio = sum(one.trace for one in estimates) / sum(one.square for one in estimates)
    assert ratio == pytest.approx(trace / square, rel=0.05)
    assert scale.sequences == pytest.approx(trace / square, rel=0.4)  # of the last 50 alone
    assert scale.tokens == pytest.approx(10 * float(scale.sequences or 0))


def test_the_average_is_unbiased_from_the_first_measurement() -> None:
    scale = NoiseScale()
    assert scale.average is None
    assert scale.sequences is None
    for count in (1, 2, 3 * MEASUREMENTS):
        while scale.measurements < count:
            scale.add(NoiseEstimate(6.0, 2.0, 5.0))
        average = scale.average
        assert average is not None
        assert average.trace == pytest.approx(6.0)
        assert scale.sequences == pytest.approx(3.0)
        assert scale.tokens == pytest.approx(15.0)


def test_no_scale_where_there_is_none() -> None:
    assert estimate_noise([Squares(1.0, 1.0, 1.0)], sequences=8, targets=8.0) is None  # one part
    overflowed = estimate_noise([Squares(math.inf, 1.0, 0.5)], sequences=8, targets=8.0)
    assert overflowed is not None
    assert not overflowed.is_finite
    both = estimate_noise([Squares(1.0, 1.0, 1.0), Squares(3.0, 2.0, 0.5)], sequences=8, targets=8.0)
    assert both == NoiseEstimate(8.0, 2.0, 1.0)  # of the parameters that have parts
    scale = NoiseScale()
    scale.add(NoiseEstimate(1.0, -0.5, 1.0))  # as one step may well find
    assert scale.sequences is None
    assert scale.tokens is None


def test_state_goes_on_exactly() -> None:
    whole, first, second = NoiseScale(), NoiseScale(), NoiseScale()
    for place in range(20):
        found = NoiseEstimate(1.0 + place, 0.1 * place, 7.0)
        whole.add(found)
        if place == 9:
            second.load_state(json.loads(json.dumps(first.state())))
        (first if place < 9 else second).add(found)
    assert second.state() == whole.state()
    wrong = [{"measurements": -1}, {"trace": "1"}, {"square": math.nan}]
    for bad in [{}, *({**whole.state(), **one} for one in wrong)]:
        with pytest.raises((KeyError, TypeError, ValueError)):
            NoiseScale().load_state(bad)


ROWS = [[0], [1], [2], [3]]
EXPERTS = [
    "model.n_experts=4",
    "model.experts_per_token=2",
    "model.d_expert=16",
    "model.d_ff=16",
    "model.router_aux_loss=0",
    "model.router_z_loss=0",
]
DP2 = ["parallel.dp_replicate=2"]
ZERO3 = ["parallel.dp_shard=2", "parallel.zero=3", "parallel.pp=2"]
LAYOUTS: dict[str, tuple[list[str], list[list[int]], list[list[int]]]] = {
    # overrides, rows of each part, rows of each part of an expert
    "one": ([], ROWS, ROWS),
    "unequal-parts": (["train.micro_batch=3"], [[0, 1, 2], [3]], ROWS),
    "recompute": (["train.recompute=full", "model.tie_embeddings=true"], ROWS, ROWS),
    "selective": (["train.recompute=selective"], ROWS, ROWS),
    "tp2-dp2": (["parallel.tp=2", *DP2], ROWS, ROWS),
    "tp4-copied-heads": (["parallel.tp=4", "parallel.sequence_parallel=false"], ROWS, ROWS),
    "zero2-every": (["parallel.dp_shard=2", "parallel.zero=2", "parallel.accumulate_reduce=every"], ROWS, ROWS),
    "zero3-pp2-tied": ([*ZERO3, "model.tie_embeddings=true"], ROWS, ROWS),
    "cp2-dp2": (["parallel.cp=2", *DP2], ROWS, ROWS),
    "zbv-tied": (
        ["parallel.pp=2", "parallel.pp_schedule=zbv", "model.n_layers=4", "model.tie_embeddings=true"],
        ROWS,
        ROWS,
    ),
    "zb-h1-experts": (["parallel.pp=2", "parallel.pp_schedule=zb-h1", *EXPERTS], ROWS, ROWS),
    "ep2": (["parallel.ep=2", *DP2, *EXPERTS], ROWS, [[0, 2], [1, 3]]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_parts_of_every_layout_are_those_of_plain_autograd(workers: WorkerPool, name: str) -> None:
    overrides, dense, experts = LAYOUTS[name]
    layout = Layout.of(parse_run_config(health_jobs.NOISE, "test", overrides).parallel)
    dp = layout.dp_replicate * layout.dp_shard
    own = [list(range(4))[place * 4 // dp : (place + 1) * 4 // dp] for place in range(dp)]
    plain = [one for one in overrides if one.startswith("model.")]
    [(expected, distances)] = workers.run(health_jobs.plain_parts, Layout(), plain, dense, experts, own)
    for found in workers.run(health_jobs.parts, layout, overrides, n_kv_heads=2):
        noise, ranks = found[0]
        assert noise.trace == pytest.approx(expected.trace, rel=1e-10)
        assert noise.square == pytest.approx(expected.square, rel=1e-10)
        assert noise.targets == expected.targets
        assert ranks == (pytest.approx(distances, rel=1e-10) if dp > 1 else None)
        assert found[1][0].trace > 0  # hooks are there again


def test_samples_are_close(workers: WorkerPool) -> None:
    """Where summands of a part are on several ranks, a sample of its elements stands for all."""
    overrides = ["parallel.cp=2"]
    [expected] = workers.run(health_jobs.parts, Layout(), [])
    found = workers.run(health_jobs.parts, Layout(cp=2), overrides, False)[0]
    for (ours, _), (theirs, _) in zip(found, expected, strict=True):
        assert ours.trace == pytest.approx(theirs.trace, rel=0.2)
        assert ours.trace != theirs.trace


def test_a_run_records_it_and_goes_on_exactly(
    workers: WorkerPool, tiny_config: Callable[..., Any], tmp_path: Path
) -> None:
    settings = ["train.global_batch=8", "train.micro_batch=2", "health.layers_every=2"]
    settings += ["checkpoint.every=6 steps", "schedule.name=constant"]
    config = tiny_config("train.duration=12 steps", *settings)
    for name, steps in (("whole", 12), ("resumed", 6)):
        shorter = config.model_copy(
            update={"train": config.train.model_copy(update={"duration": Duration(steps, "steps")})}
        )
        workers.run(health_jobs.poisoned, Layout(), dump_yaml(shorter), str(tmp_path / name), {})
    workers.run(health_jobs.poisoned, Layout(), dump_yaml(config), str(tmp_path / "resumed"), {}, resume=True)
    for name in ("noise/trace", "noise/square", "noise/scale", "noise/tokens"):
        found = series(tmp_path / "whole", name)
        assert len(found) > 3
        assert found == series(tmp_path / "resumed", name)
    trace, square = dict(series(tmp_path / "whole", "noise/trace")), dict(series(tmp_path / "whole", "noise/square"))
    first = min(step for step, _ in series(tmp_path / "whole", "noise/scale"))
    assert first == 2
    assert dict(series(tmp_path / "whole", "noise/scale"))[2] == pytest.approx(trace[2] / square[2])


def test_one_part_is_told_once(workers: WorkerPool, tiny_config: Callable[..., Any], tmp_path: Path) -> None:
    config = tiny_config(
        "train.duration=4 steps", "health.layers_every=1", "train.micro_batch=8", "train.global_batch=8"
    )
    workers.run(health_jobs.poisoned, Layout(), dump_yaml(config), str(tmp_path), {})
    records = read_records(tmp_path / "records.jsonl")
    assert [one.step for one in records if "noise scale is not measured" in str(one.value)] == [1]
    assert not [one for one in records if one.name.startswith("noise/")]


@pytest.mark.parametrize(("shape", "limit"), [((), 4), ((7,), 100), ((50,), 8), ((12, 10), 16), ((4, 6, 9), 20)])
def test_elements_are_the_same_in_every_layout(shape: tuple[int, ...], limit: int) -> None:
    tensor = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    seen = set()
    for offset in range(3 * math.prod(shape) // limit + 3):
        whole = Elements(ShardSpec.whole("w", shape), limit, offset=offset)
        expected = whole.of(tensor)
        assert whole.n_local == len(expected) <= limit
        assert len(expected) * whole.weight == pytest.approx(tensor.numel())
        seen |= set(expected.tolist())
        for dimension, size in enumerate(shape):
            cut = []
            for place in range(3):
                bounds = [(0, each) for each in shape]
                bounds[dimension] = split_evenly(size, 3, place)
                spec = ShardSpec("w", shape, tuple(bounds))
                part = Elements(spec, limit, offset=offset)
                cut += part.of(tensor[spec.slices]).tolist()
                assert part.weight == whole.weight
            assert sorted(cut) == expected.tolist()
    assert len(seen) == tensor.numel()  # in turn, all of them
