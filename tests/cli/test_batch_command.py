"""`modelworks batch` as a user meets it, its engine in a thread."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))

from fake_engine import build_fake

from modelworks.cli.main import main
from modelworks.serve import start, supervisor


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of three requests, one of them wrong, and an engine without a model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start.ModelStart, "__call__", lambda self: build_fake(name=self.name))
    monkeypatch.setattr(supervisor, "Supervisor", partial(supervisor.Supervisor, process=False))
    path = tmp_path / "asked.jsonl"
    body = {"prompt": "hello", "max_tokens": 4}
    rows: list[dict[str, Any]] = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {**body, **more}}
        for name, more in (("a", {}), ("b", {"model": "fake"}), ("c", {"temperature": 9}))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_batch_and_what_is_left_of_it(asked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["batch", "asked.jsonl", "out/answers.jsonl", "--model", "models/fake.gguf", "--json"]
    assert main(arguments) == 0
    said = capsys.readouterr()
    values = json.loads(said.out.strip().splitlines()[-1])
    assert (values["completed"], values["failed"], values["generated_tokens"]) == (2, 1, 8)
    assert values["errors"] == {"HTTP 400 temperature": 1}
    assert "failed: 1 x HTTP 400 temperature" in said.err
    target = Path("out/answers.jsonl")
    whole = target.read_text()
    target.write_text("\n".join(whole.splitlines()[:2])[:-5])  # killed within the second line
    assert main(arguments) == 0
    values = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (values["answered_before"], values["completed"] + values["failed"]) == (1, 2)
    assert len(target.read_text().splitlines()) == 3
    assert main(arguments) == 0
    values = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (values["answered_before"], values["completed"], values["generated_tokens_per_second"]) == (3, 0, None)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["none.jsonl", "out.jsonl"], "none.jsonl: cannot be read"),
        (["asked.jsonl", "asked.jsonl"], "OUT: asked.jsonl is the file of requests"),
        (["asked.jsonl", "."], ".: cannot be written"),
        (["asked.jsonl", "out.jsonl", "--dtype", "bf6"], "--dtype: got 'bf6'"),
        (["asked.jsonl", "out.jsonl", "--native", "of"], "native: got 'of', expected auto, on, off"),
        (["asked.jsonl", "out.jsonl", "--kv-cache", "much"], "--kv-cache: got 'much', expected a size"),
    ],
)
def test_mistakes(asked: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["batch", *arguments, "--model", "fake"]) == 2
    assert says in capsys.readouterr().err
