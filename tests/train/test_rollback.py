"""Going back: to which step, from memory or a checkpoint, on every layout; and the same run however it was cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import health_jobs
import pytest
from pool import WorkerPool
from run_files import assert_same_weights, series

from modelworks.config import Duration, dump_yaml
from modelworks.layout import Layout
from modelworks.records import read_records

Config = Callable[..., Any]
RUN = [
    "train.duration=120 steps",
    "schedule.name=constant",
    "schedule.warmup=3 steps",
    "optimizer.lr=2e-3",
    "checkpoint.every=35 steps",
    "evaluate.every=120 steps",
    "train.global_batch=8",
    "train.micro_batch=4",
    "health.threshold=15",
    "health.window=64",
    "health.spikes=rollback",
    "health.calm=20",
    "health.layers_every=null",
]
RUINED = {79 * 8: "rate"}  # the update of step 80: 81 is the first spike


def run(workers: WorkerPool, config: Any, run_dir: Path, bad: dict[int, str], **flags: Any) -> dict[str, Any]:
    layout = Layout.of(config.parallel)
    result: dict[str, Any] = workers.run(health_jobs.spoiled, layout, dump_yaml(config), str(run_dir), bad, **flags)[0]
    return result


def events(run_dir: Path, name: str) -> list[tuple[int, dict[str, Any]]]:
    found = [record for record in read_records(run_dir / "records.jsonl") if record.name == name]
    return [(record.step, json.loads(str(record.value))) for record in found]


def lasting(config: Any, steps: int) -> Any:
    return config.model_copy(update={"train": config.train.model_copy(update={"duration": Duration(steps, "steps")})})


@pytest.fixture(scope="module")
def whole(workers: WorkerPool, tiny_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody stops."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    result = run(workers, tiny_config(*RUN), run_dir, RUINED)
    assert result["steps"] == 120
    return run_dir


@pytest.fixture(scope="module")
def clean_loss(workers: WorkerPool, tiny_config: Config, tmp_path_factory: pytest.TempPathFactory) -> float:
    """For validation, of the run without trouble."""
    run_dir = tmp_path_factory.mktemp("runs") / "clean"
    result = run(workers, tiny_config(*RUN), run_dir, {})
    assert events(run_dir, "spike") == []
    loss: float = result["val_loss"]
    return loss


@pytest.mark.slow
def test_weights_that_one_update_ruined_are_restored(whole: Path, clean_loss: float) -> None:
    """Skipping is of no use: the weights are bad. Going back is, and the run ends as well as one without trouble."""
    assert [(step, row["answer"]) for step, row in events(whole, "spike")] == [
        (81, "skip"),
        (82, "clip"),
        (83, "slow"),
        (84, "rollback"),
    ]
    # 60 is the last multiple of 20 at least 20 steps before 81; behind step 84, 20 more batches are left out.
    [(step, row)] = events(whole, "rollback")
    assert (step, row["good"], row["restarted"], row["from"]) == (84, 60, 60, "memory")
    assert row["samples"] == [60 * 8, 104 * 8 - 1]
    result = json.loads((whole / "summary.json").read_text())
    assert result["val_loss"] == pytest.approx(clean_loss, rel=0.01)
    steps = [step for step, _ in series(whole, "train/loss")]
    assert steps == [*range(1, 85), *range(61, 121)]
    losses = dict(series(whole, "train/loss"))  # of a step made twice the last
    assert max(losses[step] for step in range(61, 121)) < 1.2 * losses[60]


@pytest.mark.slow
def test_a_stretch_of_bad_data_is_left_behind(
    workers: WorkerPool, tiny_config: Config, tmp_path: Path, clean_loss: float
) -> None:
    """Garbage and NaN in turn, longer than the milder rungs have answers."""
    bad = {8 * batch: "nan" if batch % 2 else "garbage" for batch in range(79, 90)}
    result = run(workers, tiny_config(*RUN), tmp_path / "run", bad)
    found = [(step, row["answer"]) for step, row in events(tmp_path / "run", "spike")]
    assert found == [(80, "skip"), (81, "clip"), (82, "slow"), (83, "rollback")]
    [(_, row)] = events(tmp_path / "run", "rollback")
    assert row["samples"][1] >= 8 * 90 - 1
    assert result["val_loss"] == pytest.approx(clean_loss, rel=0.01)


@pytest.mark.slow
def test_a_loss_that_creeps_up_makes_the_run_go_back(workers: WorkerPool, tiny_config: Config, tmp_path: Path) -> None:
    """To before it rose, and on at a lower rate without the data in between. No step of it is a spike. What memory
    holds is from after the rise began, so the state is a checkpoint's, and the steps from there are made as they were.
    """
    bad = {8 * batch: f"creep {0.02 * (batch - 40)}" for batch in range(40, 70)}
    config = tiny_config(
        *RUN, "train.duration=90 steps", "health.calm=10", "health.threshold=1000", "evaluate.every=90 steps"
    )
    result = run(workers, config, tmp_path / "run", bad, drift=8)
    assert events(tmp_path / "run", "spike") == []
    [(told, found)], [(step, row)] = events(tmp_path / "run", "divergence"), events(tmp_path / "run", "rollback")
    assert (found["answer"], step, row["from"]) == ("rollback", told, "step-00000035")
    good = row["good"]
    assert (good, row["restarted"]) == (40, 35)
    assert row["samples"] == [8 * good, 8 * (told + 10) - 1]
    rates = dict(series(tmp_path / "run", "train/lr"))  # of steps made twice, the second time's
    assert {at for at, rate in rates.items() if at > 3 and rate < rates[good]} == set(range(good + 1, told + 11))
    assert result["steps"] == 90
    assert result["val_loss"] < found["lowest"]


def test_the_last_rung_stops_a_run_whose_weights_are_ruined(
    workers: WorkerPool, tiny_config: Config, tmp_path: Path
) -> None:
    """And names what came before."""
    result = run(workers, tiny_config(*RUN, "health.spikes=stop"), tmp_path / "run", RUINED)
    assert result["failed"].startswith("step 84: loss ")
    assert "(steps 81, 82, 83, 84, whose updates were left out)" in result["failed"]
    assert "the last good checkpoint is step-00000035" in result["failed"]


@pytest.mark.slow
@pytest.mark.parametrize("cut", [35, 70, 75, 105])
def test_a_run_cut_anywhere_ends_as_the_one_that_was_not(
    workers: WorkerPool, tiny_config: Config, tmp_path: Path, whole: Path, cut: int
) -> None:
    """Before the good step, between it and the spike (where no snapshot is left), and after the rollback. From disk the
    steps from 35 to 60 are made again."""
    config = tiny_config(*RUN)
    run(workers, lasting(config, cut), tmp_path / "cut", RUINED)
    run(workers, config, tmp_path / "cut", RUINED, resume=True)
    assert_same_weights(tmp_path / "cut", whole)
    ours, theirs = events(tmp_path / "cut", "rollback"), events(whole, "rollback")
    assert [(step, row["good"], row["samples"]) for step, row in ours] == [
        (step, row["good"], row["samples"]) for step, row in theirs
    ]
    if cut in (70, 75):
        assert (ours[0][1]["from"], ours[0][1]["restarted"]) == ("step-00000035", 35)
    losses = dict(series(tmp_path / "cut", "train/loss"))
    assert losses == dict(series(whole, "train/loss"))


LAYOUTS = {
    "zero2": ["parallel.dp_shard=2", "parallel.zero=2"],
    "tp2-pp2": ["parallel.tp=2", "parallel.pp=2"],
    "zero3": ["parallel.dp_shard=2", "parallel.zero=3", "health.rollback_from=disk"],
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_goes_back_alike(
    workers: WorkerPool, tiny_config: Config, tmp_path: Path, whole: Path, layout: str
) -> None:
    config = lasting(tiny_config(*RUN, *LAYOUTS[layout]), 90)
    ranks = workers.run(
        health_jobs.spoiled, Layout.of(config.parallel), dump_yaml(config), str(tmp_path / "run"), RUINED
    )
    assert len({rank["train_loss"] for rank in ranks}) == 1
    [(step, ours)], [(_, of_whole)] = events(tmp_path / "run", "rollback"), events(whole, "rollback")
    assert (step, ours["good"], ours["samples"]) == (84, of_whole["good"], of_whole["samples"])
    assert ours["from"] == ("step-00000035" if layout == "zero3" else "memory")
    losses, theirs = dict(series(tmp_path / "run", "train/loss")), dict(series(whole, "train/loss"))
    assert [*losses] == [*range(1, 91)]
    assert losses == pytest.approx({step: theirs[step] for step in losses}, rel=1e-3)
    if layout == "zero2":  # and cut: a snapshot is one rank's own, a checkpoint is everybody's
        run(workers, lasting(config, 75), tmp_path / "cut", RUINED)
        run(workers, config, tmp_path / "cut", RUINED, resume=True)
        assert_same_weights(tmp_path / "cut", tmp_path / "run")


@pytest.mark.slow
def test_trouble_that_comes_back_ends_the_run_with_a_report(
    workers: WorkerPool, tiny_config: Config, tmp_path: Path
) -> None:
    """One rollback is allowed. The second time the report names what was seen both times."""
    bad = {**RUINED, 8 * (104 + 15): "rate"}  # it goes on at batch 104
    result = run(workers, tiny_config(*RUN, "health.rollback_limit=1"), tmp_path / "run", bad)
    assert "1 rollbacks have not helped" in result["failed"]
    assert (
        "the last good checkpoint is step-00000035; what came after may be ruined (step-00000070)" in result["failed"]
    )
    answers = [row["answer"] for _, row in events(tmp_path / "run", "spike")]
    assert answers == ["skip", "clip", "slow", "rollback", "skip", "clip", "slow", "stop"]
    text = (tmp_path / "run" / "stopped.md").read_text()
    assert text.startswith("# run stopped at step 80\n")
    for _, row in events(tmp_path / "run", "spike"):
        first, last = row["samples"]
        assert f"| {first:,} to {last:,} |" in text
    assert f"| back to step 60 | {60 * 8:,} to" in text
    assert "of words begins: " in text
    assert "modelworks data inspect" in text
