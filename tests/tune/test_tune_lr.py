"""`modelworks tune lr`: its answers, its refusals, and that no signal or kill costs a finished trial."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from modelworks.cli import main as frame
from modelworks.config import dump_yaml
from modelworks.records import read_records
from modelworks.train import train
from modelworks.tune import LocalRunner, Outcome, Trial, setup

RATES = "1e-3,1e-2,1e30"


@pytest.fixture
def config(tmp_path: Path, tiny_config: Callable[..., Any], tiny_machine: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in the present directory; this machine is not measured."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(setup, "measure", lambda *args, **options: tiny_machine)
    text = dump_yaml(tiny_config("train.duration=400 steps", "train.grad_clip=null", "schedule.warmup=5%"))
    (tmp_path / "tiny.yaml").write_text(text)
    return Path("tiny.yaml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--share", "0%"], "--share: got 0%, expected a percentage"),
        (["--share", "0.02"], "--share: got 0.02, expected a percentage of the run's tokens above 0%, such as 2%"),
        (["--share", "101%"], "--share: got 101%, expected a percentage"),
        (["--share", "1%"], "--share: 0.01 of 400 steps are 4, expected 8 at least: use --share 2%"),
        (["--rates", "-1e-3,1e-3"], "--rates: got -1e-3, expected numbers above 0"),
        (["--rates", "1e-3,,1e-2"], "--rates: got nothing, expected numbers above 0"),
        (["--rates", "1e-3,nan"], "--rates: got nan, expected numbers above 0"),
        (["--rates", "1e-3"], "--rates: got 1e-3, expected at least two different rates"),
        (["--seeds", "0"], "--seeds: got 0, expected 1 to 16"),
        (["--jobs", "0"], "--jobs: got 0, expected at least 1"),
        (["optimizer.lr=0"], "optimizer.lr is 0, and the search begins there"),
        (["optimizer.lr=-1"], "optimizer.lr"),
        (["parallel.tp=3"], "parallel.tp"),
        (["--ray"], "--ray needs Ray Tune"),
    ],
)
def test_mistakes_are_told_in_one_line(
    config: Path, arguments: list[str], message: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert frame.main(["tune", "lr", str(config), *arguments]) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert message in error
    store = Path("runs/tiny/tune-lr/trials.jsonl")
    assert "Ray" in message or not store.exists() or store.stat().st_size == 0


def test_torchrun_is_refused(config: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert frame.main(["tune", "lr", str(config)]) == 2
    assert "starts the ranks of its trials itself" in capfd.readouterr().err


@pytest.mark.slow
def test_trials_train_as_a_run_does_and_are_kept(
    config: Path,
    tiny_config: Callable[..., Any],
    tiny_machine: Any,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    command = ["tune", "lr", str(config), "--share", "10%", "--rates", RATES, "--seeds", "1", "--json"]
    assert frame.main(command) == 0
    captured = capfd.readouterr()
    result = json.loads(captured.out.splitlines()[-1])
    assert (result["steps"], result["whole_steps"]) == (40, 400)
    assert result["best"]["rate"] == result["largest_stable"] == 1e-2
    assert result["diverges"] == 1e30
    assert [row["status"] for row in result["trials"]] == ["finished", "finished", "diverged"]
    assert "usual are 1% to 5%" in captured.err
    # The same run written by hand: a tenth of the steps, and of the warmup.
    by_hand = tiny_config(
        *("train.duration=40 steps", "schedule.warmup=2 steps", "train.grad_clip=null"), "evaluate.every=40 steps"
    )
    alone = train(by_hand, tmp_path / "alone", machine=tiny_machine)
    assert result["best"]["loss"] == pytest.approx(alone.val_loss, rel=1e-6)
    records = list(read_records(Path("runs/tiny/tune-lr/records.jsonl")))
    assert [(each.tags["rate"], each.step) for each in records if each.name == "tune/loss"] == [
        ("0.001", 40),
        ("0.01", 40),
    ]
    assert Path(result["html"]).read_text().startswith("<!doctype html>")
    assert not list(Path("runs/tiny/tune-lr").glob("**/checkpoints"))
    # Again: nothing is left to do.
    monkeypatch.setattr(LocalRunner, "run", lambda self, trials: pytest.fail("a trial was made again"))
    assert frame.main(command) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["trials"] == result["trials"]
    # Trials of another configuration are not taken for these.
    assert frame.main([*command, "optimizer.eps=1e-7"]) == 2
    assert "something else (optimizer.eps: 1e-08 -> 1e-07)" in capfd.readouterr().err


def test_a_signal_ends_the_search_and_keeps_what_is_finished(
    config: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_and_a_signal(self: LocalRunner, trials: Sequence[Trial]) -> Iterator[Outcome]:
        yield Outcome(trials[0], "finished", 3.0, 3.0, 40, 1.0)
        os.kill(os.getpid(), signal.SIGTERM)
        yield pytest.fail("the search went on")

    monkeypatch.setattr(LocalRunner, "run", one_and_a_signal)
    assert frame.main(["tune", "lr", str(config), "--share", "10%", "--rates", RATES, "--json"]) == 75
    captured = capfd.readouterr()
    assert "stopped by SIGTERM: 1 trials are kept in runs/tiny/tune-lr; the same command goes on" in captured.err
    result = json.loads(captured.out.splitlines()[-1])
    assert (result["stopped_by"], [row["rate"] for row in result["trials"]]) == ("SIGTERM", [1e-3])
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.slow
def test_a_kill_costs_no_finished_trial_and_leaves_no_process(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Killed after its first outcome, while the second trial runs; then let go on."""
    arguments = ["tune", "lr", str(config), "--share", "10%", "--rates", "1e-3,1e-2", "--seeds", "1"]
    command = [sys.executable, "-m", "modelworks", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        assert any(line.startswith("rate ") for line in process.stdout)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert psutil.wait_procs(children, timeout=30)[1] == []
    store = Path("runs/tiny/tune-lr/trials.jsonl")
    before = store.read_text()
    assert frame.main([*arguments, "--json"]) == 0
    assert store.read_text().startswith(before)
    trials = json.loads(capfd.readouterr().out.splitlines()[-1])["trials"]
    assert [(row["rate"], row["status"]) for row in trials] == [(1e-3, "finished"), (1e-2, "finished")]
    assert trials[0]["loss"] == json.loads(before.splitlines()[1])["loss"]
    assert len(store.read_text().splitlines()) == 3
