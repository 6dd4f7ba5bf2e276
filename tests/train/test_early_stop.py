"""A run that overfits ends where it is told to, is complete, and stays at its end when it is resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_files import newest

from modelworks.records import read_records
from modelworks.train import hooks, train
from modelworks.train.evaluation.validation import score_split

Config = Callable[..., Any]


def test_overfitting_ends_the_run(
    tiny_config: Config, tiny_machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [0]

    def worse_each_time(*arguments: Any, **named: Any) -> Any:
        asked[0] += 1
        return replace(score_split(*arguments, **named), loss=3.0 + 0.1 * asked[0])

    monkeypatch.setattr(hooks, "score_split", worse_each_time)
    keys = ["train.duration=120 steps", "evaluate.every=20 steps", "checkpoint.every=50 steps"]
    config = tiny_config(*keys, "health.overfitting=stop")
    result = train(config, tmp_path / "run", machine=tiny_machine)
    assert (result.steps, result.stopped_by) == (80, None)
    assert newest(tmp_path / "run").step == 80
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 80
    [found] = [row for row in read_records(tmp_path / "run" / "records.jsonl") if row.name == "judgement"]
    assert found.step == 80
    assert json.loads(str(found.value))["kind"] == "overfitting"
    again = train(config, tmp_path / "run", machine=tiny_machine, resume=True)
    assert again.steps == 80
    assert again.train_loss == result.train_loss
    on = train(tiny_config(*keys), tmp_path / "run", machine=tiny_machine, resume=True)
    assert on.steps == 120
