"""`modelworks runs`: figures from the summary or the records, differences, damaged runs."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest

from modelworks.cli import main as frame
from modelworks.config import dump_yaml, parse_run_config
from modelworks.records import Record, RecordWriter

SUMMARY = {"steps": 100, "tokens": 1_638_400, "train_loss": 3.25, "val_loss": 3.5, "val_bits_per_byte": 1.4}
SUMMARY |= {"tokens_per_second": 5123.4, "mfu": 0.5, "seconds": 3661.0}


def make_run(root: Path, name: str, *overrides: str, summary: dict[str, Any] | None = None) -> Path:
    directory = root / "runs" / name
    directory.mkdir(parents=True)
    config = parse_run_config(f"model: llama-tiny\nname: {name}", "run.yaml", overrides)
    (directory / "config.yaml").write_text(dump_yaml(config))
    if summary:
        (directory / "summary.json").write_text(json.dumps(summary))
    return directory


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(capfd: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert frame.main(["runs", *arguments]) == code
    out, err = capfd.readouterr()
    return err if code else out


def test_no_runs(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "no runs in runs/" in call(capfd, "ls")
    assert json.loads(call(capfd, "ls", "--json")) == {"runs": []}
    assert "there are none in runs/" in call(capfd, "show", "x", code=2)


def test_a_finished_run(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_run(here, "one", summary=SUMMARY)
    row = call(capfd, "ls").splitlines()[1].split()
    assert row == ["one", "done", "llama", "15.7M", "100", "3.2500", "3.5000", "1.4000", "5,123", "50.0%", "1:01:01"]
    assert json.loads(call(capfd, "ls", "--json"))["runs"][0]["val_loss"] == 3.5
    shown = call(capfd, "show", "one")
    assert "val_bits_per_byte    1.4000" in shown
    assert call(capfd, "show", "runs/one") == shown


def test_a_run_without_summary_is_read_from_its_records(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    directory = make_run(here, "one")
    writer = RecordWriter(directory / "records.jsonl")
    for step in range(1, 31):
        writer.write(Record(step, "train/loss", 5.0 - step / 10), Record(step, "decision", "text", kind="event"))
    writer.write(Record(20, "val/loss", 4.5))
    writer.close()
    with (directory / "records.jsonl").open("a") as file:
        file.write('{"step": 31, "name": "tr')  # killed in the middle of a line
    found = json.loads(call(capfd, "show", "one", "--json"))
    assert (found["state"], found["steps"], found["train_loss"], found["val_loss"]) == ("stopped", 30, 2.0, 4.5)
    assert found["tokens"] == 30 * 64 * 256

    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert json.loads(call(capfd, "show", "one", "--json"))["state"] == "running"
    os.close(lock)
    assert json.loads(call(capfd, "show", "one", "--json"))["state"] == "stopped"


def test_a_damaged_run_does_not_hide_the_others(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_run(here, "one", summary=SUMMARY)
    broken = make_run(here, "two")
    (broken / "config.yaml").write_text("model: [")
    (broken / "summary.json").write_text("{")
    (broken / "records.jsonl").write_bytes(b"\xff\xfe\n[]\n")
    listing = call(capfd, "ls")
    assert "one" in listing
    assert "not readable" in listing
    assert "runs/two: runs/two/config.yaml" in call(capfd, "compare", "one", "two", code=2)


def test_compare(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_run(here, "one", summary=SUMMARY)
    make_run(here, "two", "optimizer.lr=0.01", summary={**SUMMARY, "val_loss": 3.0})
    make_run(here, "three", "model.n_layers=4", summary=SUMMARY)
    text = call(capfd, "compare", "one", "two", "three")
    assert [line.split() for line in text.splitlines() if line.startswith(("val_loss", "optimizer", "model."))] == [
        ["val_loss", "3.5000", "3.0000", "3.5000"],
        ["optimizer.lr", "0.0003", "0.01", "0.0003"],
        ["model.n_layers", "8", "8", "4"],
    ]
    found = json.loads(call(capfd, "compare", "one", "two", "--json"))
    assert found["differences"] == {"optimizer.lr": {"one": 0.0003, "two": 0.01}}
    assert "the same" in call(capfd, "compare", "one", "one")
    assert "at least two" in call(capfd, "compare", "one", code=2)
    assert "no ordinary file" in call(capfd, "compare", "one", "two", "--html", str(here), code=2)
    assert "did you mean `three`" in call(capfd, "compare", "one", "thre", code=2)


def test_a_directory_of_runs_that_is_not_there_is_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    for name, reason in (("file", "not a directory"), ("nowhere", "not there")):
        assert frame.main(["runs", "ls", "--runs-dir", name]) == 2
        assert capsys.readouterr().err == f"error: --runs-dir: {name} is {reason}\n"
    assert frame.main(["runs", "ls"]) == 0
