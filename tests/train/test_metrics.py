"""Figures of the passes and of consecutive gradients: against what is written out plainly, in every layout."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import health_jobs
import pytest
import torch
from pool import WorkerPool

from modelworks.config import dump_yaml, parse_run_config
from modelworks.layout import Layout, ShardSpec, split_evenly
from modelworks.optim import Split
from modelworks.records import read_records
from modelworks.train.health.cosine import ConsecutiveCosine, cosine
from modelworks.train.health.device import DeviceMeter

LAYOUTS = {
    "recompute": ["train.recompute=full"],
    "selective": ["train.recompute=selective"],
    "tp2": ["parallel.tp=2"],
    "ring": ["parallel.cp=2"],
    "ulysses": ["parallel.cp=2", "parallel.cp_mode=ulysses"],
    "zero3-pp2": ["parallel.dp_shard=2", "parallel.zero=3", "parallel.pp=2"],
}
WINDOW = ["model.sliding_window=5", "model.qk_norm=true"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_show_what_they_compute(workers: WorkerPool, layout: str) -> None:
    """Two rows a micro-batch; of two data-parallel ranks, both ranks' first ones."""
    overrides = ["train.micro_batch=2", *LAYOUTS[layout]]
    model = WINDOW if layout in ("ring", "recompute") else []
    split = Layout.of(parse_run_config(health_jobs.NOISE, "test", overrides).parallel)
    n_rows = 2 * split.dp_shard
    [(logits, sizes)] = workers.run(health_jobs.plainly_shown, Layout(), model, n_rows)
    [one] = workers.run(health_jobs.shown, Layout(), ["train.micro_batch=2", *model])
    for found in workers.run(health_jobs.shown, split, [*overrides, *model]):
        assert found[0].attention_logits == pytest.approx(logits, rel=1e-10)
        assert found[0].activations == pytest.approx(sizes, rel=1e-10)
        assert found[0].cosine is None  # nothing came before it
        for ours, theirs in zip(found[1:], one[1:], strict=True):
            assert ours.cosine == pytest.approx(theirs.cosine, rel=1e-9)


def test_narrow_numbers_are_measured_in_wide_ones(workers: WorkerPool) -> None:
    [(logits, sizes)] = workers.run(health_jobs.plainly_shown, Layout(), [], 1)
    for precision in ("bf16", "bf16-autocast"):
        [found] = workers.run(health_jobs.shown, Layout(), [], precision)
        assert found[0].attention_logits == pytest.approx(logits, rel=0.05)
        assert found[0].activations == pytest.approx(sizes, rel=0.02)


def test_the_cosine_of_a_sketch_is_close_and_small(workers: WorkerPool) -> None:
    """Of a small model it is exact; of a larger one it is near, in under 1 % of its bytes."""
    small = ["model.d_model=8", "model.d_ff=8", "model.vocab_size=32"]
    *exact, _ = workers.run(health_jobs.cosines, Layout(), small)[0]
    for ours, theirs in exact:
        assert ours == pytest.approx(theirs, abs=1e-6)
    wide = ["model.d_model=512", "model.d_ff=1024", "model.vocab_size=2048", "model.n_layers=1"]
    *near, (share, _) = workers.run(health_jobs.cosines, Layout(), wide)[0]
    assert share < 0.01
    for ours, theirs in near:
        assert ours == pytest.approx(theirs, abs=4 / math.sqrt(30_000))


@pytest.mark.parametrize("shared", ["nothing", "columns", "rows"])
def test_the_error_of_a_sketch_is_that_of_its_width(shared: str) -> None:
    """sqrt((1 + cos^2) / width), also where both gradients are large in the same few columns or rows, as they are."""
    shapes = {"norm": (640,), "w": (1024, 640)}
    split = Split({name: ShardSpec.whole(name, shape) for name, shape in shapes.items()}, shapes)
    sketched = ConsecutiveCosine(split, 4)
    wanted, n = 0.3, 40
    draw, errors = torch.Generator().manual_seed(0), []
    scale = torch.ones(1024, 640)
    if shared != "nothing":
        (scale if shared == "rows" else scale.T)[::100] *= 30.0
    for _ in range(n):
        one, other = torch.randn(2, 1024, 640, generator=draw) * scale
        other = wanted * one + (1 - wanted**2) ** 0.5 * other
        norms = torch.randn(2, 640, generator=draw)
        sketched.keep(1, {"norm": norms[0], "w": one})
        sketched.compare(2, {"norm": norms[1], "w": other})
        ours = cosine(sketched.sketches)
        assert ours is not None
        whole = [torch.cat([norm, matrix.flatten()]) for norm, matrix in zip(norms, (one, other), strict=True)]
        errors.append(ours - float(torch.nn.functional.cosine_similarity(*whole, dim=0)))
    expected = math.sqrt((1 + wanted**2) / sketched.width)
    assert abs(statistics.fmean(errors)) < 4 * expected / math.sqrt(n)
    # 1 of 640 places of a column, against all others: pieces meet there by chance.
    assert statistics.pstdev(errors) < 1.5 * expected
    assert sketched.n_bytes < 0.01 * 4 * (640 + 1024 * 640)


@pytest.mark.parametrize("shape", [(7, 900), (12, 30, 20)])
def test_parts_of_a_tensor_make_the_sketch_of_the_whole(shape: tuple[int, ...]) -> None:
    shapes = {"first": (50,), "w": shape}
    whole = {name: ShardSpec.whole(name, size) for name, size in shapes.items()}
    draw = torch.Generator().manual_seed(1)
    tensors = [
        {name: torch.randn(size, generator=draw, dtype=torch.float64) for name, size in shapes.items()}
        for _ in range(2)
    ]

    def sketches(specs: dict[str, ShardSpec]) -> torch.Tensor:
        sketched = ConsecutiveCosine(Split(specs, shapes), 4)
        for step, one in enumerate(tensors):
            held = {name: one[name][spec.slices] for name, spec in specs.items()}
            (sketched.compare if step else sketched.keep)(step + 1, held)
        return sketched.sketches

    expected = sketches(whole)
    assert expected.shape[1] < sum(map(math.prod, shapes.values()))
    for dimension, size in enumerate(shape):
        total = sketches({"first": whole["first"]})
        for place in range(3):
            bounds = [(0, each) for each in shape]
            bounds[dimension] = split_evenly(size, 3, place)
            total += sketches({"w": ShardSpec("w", shape, tuple(bounds))})
        torch.testing.assert_close(total, expected, rtol=0, atol=1e-12)


def test_a_gpu_is_asked_and_a_cpu_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 87)
    gpu = DeviceMeter(torch.device("cuda"))
    assert (gpu.name, gpu.share(), gpu.reason) == ("health/device_utilization", 0.87, None)

    def refuse(device: torch.device) -> int:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed.\nmore")

    monkeypatch.setattr(torch.cuda, "utilization", refuse)
    assert math.isnan(gpu.share())
    assert gpu.reason == "nvidia-ml-py does not seem to be installed."
    cpu = DeviceMeter(torch.device("cpu"))
    clock = iter([(10.0, 4.0), (12.0, 5.0)])
    monkeypatch.setattr(DeviceMeter, "_now", lambda self: next(clock))
    cpu._before = (8.0, 4.0)
    assert cpu.name == "health/cpu_share"
    assert cpu.share() == 0.0
    assert cpu.share() == 0.5 / torch.get_num_threads()


def test_a_run_records_all_of_it(workers: WorkerPool, tiny_config: Callable[..., Any], tmp_path: Path) -> None:
    config = tiny_config("train.duration=6 steps", "parallel.dp_replicate=2", "health.layers_every=3")
    workers.run(health_jobs.poisoned, Layout(dp_replicate=2), dump_yaml(config), str(tmp_path), {})
    records = [one for one in read_records(tmp_path / "records.jsonl") if one.name.split("/")[0] in ("health", "noise")]
    steps = defaultdict(list)
    for record in records:
        steps[record.name].append(record.step)
    both = (
        "gradient_cosine",
        "attention_logit_max",
        "activation_rms",
        "clipped",
        "disagreement",
        "straggler",
        "imbalance",
    )
    for name in both:
        assert steps[f"health/{name}"] == [3, 6], name
    for name in ("rank_busy", "rank_disagreement"):
        assert steps[f"health/{name}"] == [3, 3, 6, 6], name
    assert steps["health/cpu_share"] == [3, 3, 3, 6, 6, 6]  # of each and their mean
    layers = json.loads(str(next(one.value for one in records if one.name == "health/layers")))
    for name in ("attention_logit_max", "activation_rms"):
        places = {
            layer: value for layer, value in zip(layers["layers"], layers[name], strict=True) if value is not None
        }
        assert list(places) == [layer for layer in layers["layers"] if layer.startswith("blocks.")]
        assert all(math.isfinite(value) for value in places.values())
    shares = [float(one.value) for one in records if one.name == "health/disagreement"]
    each = [float(one.value) for one in records if one.name == "health/rank_disagreement" and one.step == 3]
    assert shares[0] == pytest.approx(math.hypot(*each) / math.sqrt(2))
