"""`modelworks tune coordinates` and what a run under µP says, as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelworks.cli.main import main
from modelworks.config import dump_yaml
from modelworks.train import preparation


@pytest.fixture
def config_file(tiny_config: Any, tiny_machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preparation, "measure_machine", lambda **_: tiny_machine)
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(tiny_config("model.d_model=32", "model.n_heads=4", "optimizer.lr=2e-3")))
    return path


def test_the_check_prints_and_draws(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tune", "coordinates", str(config_file), "--steps", "2", "--seeds", "2"]
    assert main([*arguments, "model.mup_base_width=16", "--html", "page.html", "--json"]) == 0
    values = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert values["widths"] == [16, 32, 64]
    assert len(values["activations"]["logits"][0]["sizes"]) == 3
    assert values["passed"], values["trends"]
    page = Path("page.html").read_text()
    assert "µP, base width 16" in page
    assert page.count("<svg") == len(values["trends"])

    assert main([*arguments, "--widths", "32,128"]) == 0
    shown = capsys.readouterr().out
    assert "grows as width^" in shown
    assert "see model.mup_base_width" in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--widths: missing, as model.mup_base_width is not set"),
        (["--widths", "a,b"], "--widths: got 'a,b', expected whole numbers"),
        (["--widths", "32"], "at least two different ones"),
        (["--widths", "32,36"], "width 36: model.n_heads (4) would be 4.5"),
        (["model.mup_base_width=32", "--widths", "16,32"], "width 16"),
        (["model.mup_base_width=16", "optimizer.name=lamb"], "trust ratio"),
        (["--widths", "32,64", "--html", "."], "--html: . is a directory"),
    ],
)
def test_mistakes(config_file: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "coordinates", str(config_file), *arguments]) == 2
    assert says in capsys.readouterr().err


def test_training_tells_the_multipliers(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(config_file), "model.mup_base_width=16", "--dry-run", "--json"]) == 0
    decisions = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["decisions"]
    told = {each["key"]: each for each in decisions if each["key"].startswith("µP")}
    assert told["µP: q, k, v, o, gate, up, down"]["value"] == "rate x0.5, initial values x0.7071"
    assert "weight decay x2" in told["µP: q, k, v, o, gate, up, down"]["reason"]
    assert told["µP: logits"]["value"] == "x1/2"
