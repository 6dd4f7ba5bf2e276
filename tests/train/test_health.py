"""Figures of layers in every layout, poisoned batches in whole runs, resuming between the answers to them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import health_jobs
import pytest
from health_jobs import STEPS
from pool import WorkerPool
from run_files import assert_same_weights, series

from modelworks.config import dump_yaml, parse_run_config
from modelworks.layout import Layout
from modelworks.records import read_records

LAYOUTS = {
    "tp2-dp2": ["parallel.tp=2", "parallel.dp_replicate=2"],
    "zero1": ["parallel.dp_shard=2", "parallel.zero=1"],
    "zero3-pp2": ["parallel.dp_shard=2", "parallel.zero=3", "parallel.pp=2"],
    "cp2": ["parallel.cp=2"],
}


@pytest.fixture(scope="module")
def expected(workers: WorkerPool) -> list[dict[str, Any]]:
    [found] = workers.run(health_jobs.figures, Layout(), [])
    return found


def test_figures_of_one_process_are_those_of_its_tensors(expected: list[dict[str, Any]]) -> None:
    for row in expected:
        assert row["layers"] == ["embedding", "blocks.0", "blocks.1", "final_norm", "head"]
        assert math.hypot(*row["grad_norm"]) == pytest.approx(row["norm"], rel=1e-12)
        for place, layer in enumerate(row["layers"]):
            own = [name for name in row["moved"] if name.startswith(f"{layer}.")]
            weights = math.hypot(*(row["weights"][name] for name in own))
            assert row["weight_norm"][place] == pytest.approx(weights, rel=1e-12), layer
            moved = math.hypot(*(row["moved"][name] for name in own)) / weights
            # Sampled where a tensor is larger than the sample, as 96 x 128 is.
            assert row["update_ratio"][place] == pytest.approx(moved, rel=0.1), layer
        assert row["update_ratio"][3] == pytest.approx(row["moved"]["final_norm.weight"] / row["weight_norm"][3])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_figures_of_one_process(
    workers: WorkerPool, expected: list[dict[str, Any]], layout: str
) -> None:
    overrides = LAYOUTS[layout]
    ranks = workers.run(health_jobs.figures, Layout.of(parse_run_config(STEPS, "test", overrides).parallel), overrides)
    for found in ranks:
        for ours, theirs in zip(found, expected, strict=True):
            for key in ("grad_norm", "weight_norm", "update_ratio"):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-10), key


def test_norms_of_layers_do_not_depend_on_the_order_of_the_norm_that_is_clipped(
    workers: WorkerPool, expected: list[dict[str, Any]]
) -> None:
    overrides = ["parallel.dp_shard=2", "parallel.zero=1", "train.grad_clip_norm=inf"]
    for found in workers.run(health_jobs.figures, Layout(dp_shard=2), overrides):
        assert found[0]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=1e-10)
        assert found[0]["norm"] < expected[0]["norm"]


def test_figures_are_of_master_weights(workers: WorkerPool, expected: list[dict[str, Any]]) -> None:
    """Updates of bf16 parameters are often too small for them to show."""
    [found] = workers.run(health_jobs.figures, Layout(), [], "bf16")
    for key, tolerance in (("grad_norm", 0.1), ("weight_norm", 0.01), ("update_ratio", 0.05)):
        assert found[0][key] == pytest.approx(expected[0][key], rel=tolerance)


Config = Callable[..., Any]
LONG = [
    "train.duration=100 steps",
    "schedule.name=constant",
    "optimizer.lr=3e-3",
    "checkpoint.every=75 steps",
    "evaluate.every=100 steps",
    "train.global_batch=8",
    "train.micro_batch=2",
    "health.threshold=12",
    "health.window=32",
]
BAD = {60: "garbage", 61: "nan", 62: "garbage", 72: "nan", 73: "garbage", 74: "nan", 90: "nan"}
ANSWERS = {60: "skip", 61: "clip", 62: "slow", 72: "skip", 73: "clip", 74: "slow", 90: "skip"}


def run(workers: WorkerPool, config: Any, run_dir: Path, bad: dict[int, str], **flags: Any) -> dict[str, Any]:
    layout = Layout.of(config.parallel)
    return workers.run(health_jobs.poisoned, layout, dump_yaml(config), str(run_dir), bad, **flags)[0]


def spikes(run_dir: Path) -> list[tuple[int, dict[str, Any]]]:
    found = [record for record in read_records(run_dir / "records.jsonl") if record.name == "spike"]
    return [(record.step, json.loads(str(record.value))) for record in found]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [[], ["parallel.dp_shard=2", "parallel.zero=2"]])
def test_poisoned_batches_are_left_out(
    workers: WorkerPool, tiny_config: Config, tmp_path: Path, layout: list[str]
) -> None:
    """Garbage and NaN on each rung that leaves an update out: found where they were planted and nowhere else, named,
    and without effect on where the run ends."""
    # A rate at which little is left to learn at the end: seven updates fewer are 7 % of the run.
    config = tiny_config(*LONG, *layout, "health.spikes=slow", "health.calm=5", "optimizer.lr=1e-2")
    clean = run(workers, config, tmp_path / "clean", {})
    ours = run(workers, config, tmp_path / "ours", BAD)
    assert spikes(tmp_path / "clean") == []
    found = spikes(tmp_path / "ours")
    assert {step: row["answer"] for step, row in found} == ANSWERS
    for step, row in found:
        first = (step - 1) * 8
        assert row["samples"] == [first, first + 7]
        assert row["highest_loss"] == [first + 6, first + 7]  # the last micro-batch
        assert row["documents"][0]["sample"] == first + 6
        assert row["documents"][0]["source"] == "words"
    assert ours["val_loss"] == pytest.approx(clean["val_loss"], rel=0.01)
    rates = dict(series(tmp_path / "ours", "train/lr"))
    slowed = {step for step, rate in rates.items() if step > 3 and rate < rates[50]}
    assert slowed == {*range(63, 68), *range(75, 80)}  # the `calm` steps behind a third spike


@pytest.mark.slow
def test_without_an_answer_a_warning(workers: WorkerPool, tiny_config: Config, tmp_path: Path) -> None:
    config = tiny_config(*LONG, "health.spikes=warn")
    run(workers, config, tmp_path / "warned", {80: "garbage"})
    assert [(step, row["answer"]) for step, row in spikes(tmp_path / "warned")] == [(80, "none")]
    unwatched = [key for key in LONG if not key.startswith("health.")]
    run(workers, tiny_config(*unwatched, "health.spikes=off"), tmp_path / "off", {80: "garbage"})
    assert spikes(tmp_path / "off") == []
    assert_same_weights(tmp_path / "warned", tmp_path / "off")  # watching changes nothing


@pytest.mark.slow
def test_a_resumed_run_goes_on_as_it_would_have(workers: WorkerPool, tiny_config: Config, tmp_path: Path) -> None:
    """From a checkpoint between the first spike and the second."""
    bad = {70: "garbage", 79: "garbage", 85: "garbage"}
    config = tiny_config(*LONG, "health.spikes=slow", "health.calm=20")
    run(workers, config, tmp_path / "whole", bad)
    shorter = config.model_copy(update={"train": config.train.model_copy(update={"duration": _steps(75)})})
    run(workers, shorter, tmp_path / "resumed", bad)
    run(workers, config, tmp_path / "resumed", bad, resume=True)
    assert [row["answer"] for _, row in spikes(tmp_path / "whole")] == ["skip", "clip", "slow"]
    assert spikes(tmp_path / "resumed") == spikes(tmp_path / "whole")
    assert series(tmp_path / "resumed", "train/lr") == series(tmp_path / "whole", "train/lr")
    assert_same_weights(tmp_path / "resumed", tmp_path / "whole")


def test_the_last_rung_names_the_steps(workers: WorkerPool, tiny_config: Config, tmp_path: Path) -> None:
    config = tiny_config(*LONG, "health.spikes=stop")
    bad = {step: "nan" if step % 2 else "garbage" for step in range(80, 100)}
    result = run(workers, config, tmp_path / "run", bad)
    assert result["failed"].startswith("step 83: loss nan")
    assert "(steps 80, 81, 82, 83, whose updates were left out)" in result["failed"]
    assert [row["answer"] for _, row in spikes(tmp_path / "run")] == ["skip", "clip", "slow", "stop"]


def test_who_is_slow_and_how_often_gradients_were_clipped(
    workers: WorkerPool, tiny_config: Config, tmp_path: Path
) -> None:
    config = tiny_config("train.duration=8 steps", "parallel.dp_replicate=2", "health.layers_every=4")
    run(workers, config, tmp_path / "run", {})
    limit, norms = config.train.grad_clip, dict(series(tmp_path / "run", "train/grad_norm"))
    shares = {4: sum(norms[s] > limit for s in range(1, 5)) / 4, 8: sum(norms[s] > limit for s in range(5, 9)) / 4}
    assert dict(series(tmp_path / "run", "health/clipped")) == shares
    records = list(read_records(tmp_path / "run" / "records.jsonl"))
    layers = {row.step: json.loads(str(row.value))["grad_norm"] for row in records if row.name == "health/grad_norms"}
    assert [*layers] == [1, 2, 3, 5, 6, 7]  # every step: those of the measured ones are in health/layers
    for step, found in layers.items():
        assert math.hypot(*found) == pytest.approx(norms[step], rel=1e-3)
    jitter = [(row.step, row.tags["rank"]) for row in records if row.name == "health/rank_jitter" and row.value > 0]
    busy = [record for record in records if record.name == "health/rank_busy"]
    assert jitter == [(record.step, record.tags["rank"]) for record in busy]
    assert [(record.step, record.tags["rank"]) for record in busy] == [(4, 0), (4, 1), (8, 0), (8, 1)]
    for step, slowest in series(tmp_path / "run", "health/straggler"):
        seconds = [float(record.value) for record in busy if record.step == step]
        assert seconds[int(slowest)] == max(seconds) > 0


def _steps(count: int) -> Any:
    from modelworks.config import Duration

    return Duration(count, "steps")
