"""`modelworks tune lr`: its answers, its refusals, and that no signal or kill costs a finished trial."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from modelworks.cli import main as frame
from modelworks.config import dump_yaml
from modelworks.records import read_records
from modelworks.train import train
from modelworks.tune import LocalRunner, setup

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
    assert not Path("runs/tiny/tune-lr/trials.jsonl").exists() or "Ray" in message


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
    assert frame.main([*command, "optimizer.weight_decay=0"]) == 2
    assert "something else (optimizer.weight_decay: 0.1 -> 0.0)" in capfd.readouterr().err


@pytest.mark.slow
def test_a_signal_or_a_kill_costs_no_finished_trial(config: Path) -> None:
    """Ended by SIGTERM after its first outcome, killed after its second, and then let go on."""
    command = [sys.executable, "-m", "modelworks", "tune", "lr", str(config), "--share", "10%", "--rates", RATES]
    command += ["--seeds", "1"]

    def ended_by(number: signal.Signals) -> tuple[int, str]:
        """After the first outcome that it tells; with its exit code and what it said then."""
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            assert any(line.startswith("rate ") for line in process.stdout)
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(number)
            said = process.stdout.read()
            code = process.wait()
        assert psutil.wait_procs(children, timeout=30)[1] == []
        return code, said

    def stored() -> list[dict[str, Any]]:
        lines = Path("runs/tiny/tune-lr/trials.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines[1:]]

    code, said = ended_by(signal.SIGTERM)
    assert code == 75
    assert "stopped by SIGTERM: 1 trials are kept in runs/tiny/tune-lr; the same command goes on with them" in said
    first = stored()
    assert [row["rate"] for row in first] == [1e-3]
    assert ended_by(signal.SIGKILL)[0] == -signal.SIGKILL
    assert stored()[:1] == first
    result = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, check=True, text=True).stdout
    assert len(json.loads(result.splitlines()[-1])["trials"]) == 3
    assert [row["rate"] for row in stored()] == [1e-3, 1e-2, 1e30]
