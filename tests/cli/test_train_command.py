"""`modelworks train` and `modelworks eval` as a user meets them: exit codes, the JSON line, one-line errors."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from modelworks.checkpoint.faults import at_each_point
from modelworks.cli.main import main
from modelworks.config import dump_yaml
from modelworks.train import loop, preparation


@pytest.fixture
def config_file(tiny_config: Any, tiny_machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration in the current directory of a machine that need not be measured."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preparation, "measure_machine", lambda **_: tiny_machine)
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(tiny_config("train.duration=4 steps")))
    return path


def last_json(text: str) -> dict[str, Any]:
    return dict(json.loads(text.strip().splitlines()[-1]))


def test_train_prints_one_object_and_writes_a_report(
    config_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["train", str(config_file), "--json"]) == 0
    values = last_json(capsys.readouterr().out)
    wanted = "steps tokens train_loss val_loss val_bits_per_byte tokens_per_second mfu seconds checkpoint report"
    assert set(wanted.split()) <= set(values)
    assert values["steps"] == 4
    assert Path(values["report"]).is_file()
    assert Path(values["checkpoint"]).is_dir()
    assert json.loads(Path("runs/tiny/summary.json").read_text())["steps"] == 4

    assert main(["train", str(config_file)]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main(["train", str(config_file), "train.duration=5 steps", "--resume", "--json"]) == 0
    assert last_json(capsys.readouterr().out)["steps"] == 5

    text = tmp_path / "text.txt"
    text.write_bytes(b"the cat sat on a mat and then dogs ran over it.\r\n")
    assert main(["eval", "tiny", "--data", str(text), "--json"]) == 0
    values = last_json(capsys.readouterr().out)
    assert values["bytes"] == 49  # both bytes of the line's end
    assert 0 < values["bits_per_byte"] < 10


def test_a_dry_run_counts_and_leaves_nothing(
    config_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["train", str(config_file), "--dry-run", "--json"]) == 0
    values = last_json(capsys.readouterr().out)
    assert values["steps"] == 4
    assert values["parameters"] == sum(values["parameters_by_component"].values())
    assert values["memory"]["total"] > 0
    assert not (tmp_path / "runs").exists()
    assert main(["train", str(config_file), "init_from=/nowhere", "--dry-run"]) == 2
    assert "/nowhere: no such model" in capsys.readouterr().err
    assert main(["train", str(config_file), "train.duration=1 epochs", "--dry-run"]) == 2
    assert "is known only with the data" in capsys.readouterr().err


def test_a_signal_exits_with_75_and_says_how_to_go_on(
    config_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loop.train_step

    def step(*arguments: Any, step: int, **rest: Any) -> Any:
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments, step=step, **rest)

    monkeypatch.setattr(loop, "train_step", step)
    assert main(["train", str(config_file), "train.duration=3 steps"]) == 75
    line = capsys.readouterr().out.strip().splitlines()[-1]
    assert line.startswith("stopped by SIGTERM at step 2, saved runs/tiny/checkpoints/step-00000002; go on with: ")
    assert line.endswith(f" train {config_file} 'train.duration=3 steps' --resume")


def test_a_run_whose_last_save_failed_is_a_failure(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def full(point: str) -> None:
        if point == "before a shard file":
            raise OSError(errno.ENOSPC, "No space left on device")

    with at_each_point(full):
        assert main(["train", str(config_file)]) == 1
    assert "the last checkpoint could not be written" in capsys.readouterr().out


def test_a_diverged_run_is_a_failure_without_a_traceback(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(config_file), "optimizer.lr=1e38", "schedule.warmup=0 steps"]) == 1
    captured = capsys.readouterr()
    assert "nothing was updated" in captured.err
    assert "Traceback" not in captured.err + captured.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "absent", "--data", "x.txt"], "absent"),
        (["eval", "absent"], "nothing to measure: give --data FILE or --tasks NAME"),
        (["eval", "absent", "--data", "x.txt", "--limit", "3"], "--limit belong to --tasks"),
        (["train", "absent.yaml"], "absent.yaml: no such file"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("optimizer.name=lamp", ["optimizer.name", "got 'lamp'", "lamb"]),
        ("optimizer.name=adamw_8bit", ["optimizer.name", "adamw8bit"]),
        ("optimizer.lr=-1e-3", ["optimizer.lr: got -0.001", "at least 0"]),
        ("optimizer.weight_decay=-0.1", ["optimizer.weight_decay: got -0.1", "at least 0"]),
        ("optimizer.betas=[0.9, 1.0]", ["optimizer.betas", "got 1.0", "below 1"]),
        ("optimizer.no_decay=['*.bais']", ["optimizer.no_decay", "*.bais", "matches"]),
        (
            "optimizer.groups=[{pattern: 'block.*', lr_multiplier: 2}]",
            ["optimizer.groups.0.pattern", "block.*", "matches"],
        ),
        ("optimizer.groups=[{pattern: 'blocks.*', lr_multiplier: -2}]", ["optimizer.groups.0.lr_multiplier", "got -2"]),
        ("optimizer.trust_coefficient=0.1", ["optimizer.trust_coefficient", "adamw"]),
    ],
)
@pytest.mark.parametrize("command", ["train", "verify"])
def test_mistakes_in_the_optimiser_are_one_line_and_exit_code_2(
    command: str, setting: str, said: list[str], config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(config_file), setting]) == 2
    [line] = [line for line in capsys.readouterr().err.strip().splitlines() if "optimizer." in line]
    for part in said:
        assert part in line
