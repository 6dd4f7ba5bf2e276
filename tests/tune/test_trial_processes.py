"""Trials in processes of their own: how each may end, two at a time, and that a split trial trains as a whole one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import trial_jobs

from modelworks.config import UserError, dump_yaml, parse_run_config
from modelworks.hardware import facts
from modelworks.layout import Layout
from modelworks.tune import LocalRunner, Outcome, Setup, Trial, local, trial_process

TRIALS = [Trial(1e-2, 0), Trial(1e-2, 1)]


@pytest.fixture
def run(
    tmp_path: Path, tiny_config: Callable[..., Any], tiny_machine: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[Outcome]]:
    """run(job, jobs=…): the outcomes of two trials whose processes run a function of `trial_jobs`."""
    monkeypatch.syspath_prepend(str(Path(trial_jobs.__file__).parent))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    setup = Setup(tiny_config(), 8, 8, tiny_machine, "key", (), ())

    def run(job: str, *, jobs: int = 1) -> list[Outcome]:
        monkeypatch.setattr(local, "TARGET", f"trial_jobs:{job}")
        return list(LocalRunner(setup, tmp_path, jobs).run(TRIALS))

    return run


def test_a_process_that_is_killed_is_a_failed_trial_whose_output_stays(
    run: Callable[..., list[Outcome]], tmp_path: Path
) -> None:
    outcomes = run("die")
    assert [outcome.status for outcome in outcomes] == ["failed", "failed"]
    assert outcomes[0].reason.startswith("its process was killed (SIGKILL)")
    assert (tmp_path / "failed-0.01-0.log").read_text() == "the last words\n"
    assert str(tmp_path / "failed-0.01-0.log") in outcomes[0].reason
    assert not (tmp_path / "trials").exists()


def test_an_error_is_told_in_one_line(run: Callable[..., list[Outcome]], tmp_path: Path) -> None:
    assert [outcome.reason for outcome in run("fail")] == ["RuntimeError: something else"] * 2
    assert not list(tmp_path.glob("*.log"))  # it had said nothing else


def test_what_the_user_can_fix_ends_the_search(run: Callable[..., list[Outcome]]) -> None:
    with pytest.raises(UserError, match=r"^model\.vocab_size is too small$"):
        run("refuse")


def test_two_trials_run_at_the_same_time_on_half_the_cores_each(
    run: Callable[..., list[Outcome]], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    threads = max(1, facts().cores // 2)
    outcomes = {outcome.trial: outcome.reason for outcome in run("meet", jobs=2)}
    assert outcomes == {
        Trial(1e-2, 0): f"hello with {threads} threads",
        Trial(1e-2, 1): f"5 with {threads} threads",
    }


def settings(tiny_config: Callable[..., Any], *overrides: str) -> str:
    return dump_yaml(tiny_config("train.duration=16 steps", "evaluate.every=16 steps", *overrides))


def rank(mesh: Any, config: str, directory: str, machine: dict[str, Any]) -> dict[str, Any]:
    return trial_process.train_trial(parse_run_config(config, ""), Path(directory), machine, mesh)


@pytest.mark.slow
def test_a_split_trial_trains_as_a_whole_one(
    tiny_config: Callable[..., Any], tiny_machine: Any, tmp_path: Path, workers: Any
) -> None:
    machine = asdict(tiny_machine)
    whole = trial_process.run(settings(tiny_config), str(tmp_path / "whole"), machine)
    config = settings(tiny_config, "parallel.dp_replicate=2")
    split, other = workers.run(rank, Layout(dp_replicate=2), config, str(tmp_path / "split"), machine)
    assert split == other
    assert whole["status"] == split["status"] == "finished"
    assert split["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert split["curve"] == [[step, pytest.approx(value, rel=1e-4)] for step, value in whole["curve"]]
    assert (split["steps"], len(split["curve"])) == (16, 16)
    assert not list(tmp_path.glob("*/checkpoints/step*"))


@pytest.mark.slow
def test_ranks_that_a_trial_starts_diverge_together(
    tiny_config: Callable[..., Any], tiny_machine: Any, tmp_path: Path
) -> None:
    config = settings(tiny_config, "parallel.dp_replicate=2", "optimizer.lr=1e30", "train.grad_clip=null")
    row = trial_process.run(config, str(tmp_path / "wild"), asdict(tiny_machine))
    assert (row["status"], row["loss"]) == ("diverged", None)
    assert row["steps"] < 16
    assert row["reason"]
