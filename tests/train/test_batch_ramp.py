"""A batch ramp and a scaled rate in a run: the samples, the rate, resumption, and the same on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import split_jobs
from pool import WorkerPool
from run_files import assert_same_weights, series

from modelworks.config import UserError, dump_yaml
from modelworks.data import TrainLoader, build_dataset
from modelworks.layout import Layout, check_layout
from modelworks.train import derive, train

# Three stages of 256 tokens, which are 8 rows; the last one's second step goes beyond it.
RAMP = ["train.global_batch=8", "train.batch_ramp={start: 2, increment: 2, over: 768 tokens}", "train.micro_batch=2"]
SIZES = [2, 2, 2, 2, 4, 4, 6, 6]  # and 8 from there on
SCALED = ["optimizer.lr_scaling=sqrt", "optimizer.base_batch=2", "schedule.name=constant", "schedule.warmup=0 steps"]
LENGTH = ["train.duration=10 steps"]


@pytest.fixture(scope="module")
def whole(tiny_config: Any, tiny_machine: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    train(tiny_config(*RAMP, *SCALED, *LENGTH), run_dir, machine=tiny_machine)
    return run_dir


def test_the_samples_are_those_of_any_other_batch(tiny_config: Any) -> None:
    """Numbered through: cut into other steps, the run sees the same rows in the same order."""
    config = tiny_config(*RAMP)
    dataset = build_dataset(config.data, progress=False)
    ramped = TrainLoader(dataset, config.data, config.seed, config.batches)
    single = TrainLoader(dataset, config.data, config.seed, 1)
    sample = 0
    for step, rows in enumerate(SIZES):
        batch = ramped.batch(step)
        assert batch.n_rows == rows
        for row in range(rows):
            assert batch.rows(slice(row, row + 1)).tokens.equal(single.batch(sample).tokens)
            sample += 1
        assert ramped.consumed(step + 1) == sample
        assert ramped.tokens(step + 1) == 32 * sample


def test_lengths_in_tokens_are_exact(tiny_config: Any, tiny_machine: Any) -> None:
    """1,184 tokens are 37 rows: 28 in the eight steps above, and two more steps of eight."""
    config = tiny_config(
        *RAMP, "train.duration=1184 tokens", "schedule.warmup=10%", "schedule.name=wsd", "schedule.decay=320 tokens"
    )
    derived = derive(config, tiny_machine)
    assert derived.total_steps == 10
    assert derived.batches.first_sample(10) == 44
    assert derived.warmup_steps == 2  # 4 of 44 rows
    assert derived.decay_steps == 2  # the last 10 rows: one step has 8 of them
    [ramp] = [decision for decision in derived.decisions if decision.key == "batch ramp"]
    assert ramp.value == "2 to 8 sequences"
    assert "3 stages in the first 8 steps, 896 tokens" in ramp.reason
    short = derive(tiny_config(*RAMP, "train.duration=3 steps"), tiny_machine)
    assert any("the run ends before it does, with steps of 2" in decision.reason for decision in short.decisions)


def test_epochs(tiny_config: Any, tiny_machine: Any) -> None:
    config = tiny_config(*RAMP, "train.duration=2 epochs")
    derived = derive(config, tiny_machine, samples_per_epoch=25)
    assert (
        derived.batches.first_sample(derived.total_steps - 1) < 50 <= derived.batches.first_sample(derived.total_steps)
    )


def test_the_rate_goes_by_samples_and_follows_the_batch(tiny_config: Any, tiny_machine: Any, whole: Path) -> None:
    factors = [(rows / 2) ** 0.5 for rows in [*SIZES, 8, 8]]
    assert [value for _, value in series(whole, "train/lr")] == pytest.approx([1e-2 * factor for factor in factors])
    plain = derive(
        tiny_config(*RAMP, "schedule.name=linear", "schedule.floor=0", "schedule.warmup=0 steps"), tiny_machine
    )
    total = plain.batches.first_sample(plain.total_steps)
    done = [sum(SIZES[:step]) for step in range(8)]
    assert [plain.schedule(step) for step in range(8)] == pytest.approx([1e-2 * (1 - n / total) for n in done])
    warm = derive(tiny_config(*RAMP, "schedule.warmup=5 steps"), tiny_machine)
    assert [warm.schedule(step) for step in range(5)] == pytest.approx([1e-2 * n / 12 for n in (2, 4, 6, 8, 12)])


def test_it_resumes_across_a_boundary_bit_for_bit(
    tiny_config: Any, tiny_machine: Any, whole: Path, tmp_path: Path
) -> None:
    """Stopped within a stage and at the end of one, where the checkpoint is."""
    for stop in (3, 6):
        run_dir = tmp_path / f"at-{stop}"
        first = tiny_config(*RAMP, *SCALED, f"train.duration={stop} steps")
        train(first, run_dir, machine=tiny_machine)
        train(tiny_config(*RAMP, *SCALED, *LENGTH), run_dir, machine=tiny_machine, resume=True)
        assert series(run_dir, "train/loss") == series(whole, "train/loss")
        assert_same_weights(run_dir, whole)


@pytest.mark.parametrize(
    "layout", [["parallel.dp_replicate=2"], ["parallel.dp_shard=2", "parallel.zero=2"], ["parallel.pp=2"]], ids=str
)
def test_the_number_of_ranks_changes_nothing(
    layout: list[str], tiny_config: Any, whole: Path, workers: WorkerPool, tmp_path: Path
) -> None:
    """Ranks share the batch of each stage; batch, samples, rate and losses are those of one process."""
    rows = ["train.micro_batch=1"]  # every stage gives each rank whole micro-batches, which a pipeline needs
    config = tiny_config(*RAMP, *SCALED, *LENGTH, *rows, *layout)
    results = workers.run(split_jobs.run, Layout.of(config.parallel), dump_yaml(config), str(tmp_path / "run"))
    assert results[0]["tokens"] == 32 * (sum(SIZES) + 16)
    for name in ("train/loss", "train/lr", "train/grad_norm", "val/loss"):
        ours, theirs = series(tmp_path / "run", name), series(whole, name)
        assert [value for _, value in ours] == pytest.approx([value for _, value in theirs], rel=1e-4), name


def test_every_stage_must_be_shared_evenly(tiny_config: Any, tiny_machine: Any) -> None:
    ramp = ["train.global_batch=8", "train.batch_ramp={start: 2, increment: 2, over: 768 tokens}"]
    with pytest.raises(UserError, match=r"train.batch_ramp: 2 rows cannot be shared by dp_replicate \* dp_shard = 4"):
        check_layout(tiny_config(*ramp, "parallel.dp_replicate=4"))
    with pytest.raises(UserError, match=r"train.micro_batch: got 4, expected a divisor of the 2 rows of a rank in the"):
        check_layout(tiny_config(*ramp, "parallel.pp=2", "train.micro_batch=4"))
    assert derive(tiny_config(*ramp), tiny_machine).micro_batch == 2  # divides all of them
