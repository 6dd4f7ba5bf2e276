"""The critical batch from a run's records: McCandlish et al.'s relations, and what is said without records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modelworks.cli import main as frame
from modelworks.config import UserError
from modelworks.records import Record, RecordWriter
from modelworks.tune import examples_factor, read_critical_batch, steps_factor


def run_directory(tmp_path: Path, pairs: list[tuple[float, float]], batch: int = 32) -> Path:
    """A run of which step i has measured the pair (trace, square) i."""
    directory = tmp_path / "runs" / "noisy"
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(f"model: llama-tiny\ntrain: {{global_batch: {batch}}}\n")
    writer = RecordWriter(directory / "records.jsonl")
    for step, (trace, square) in enumerate(pairs, start=1):
        writer.write(Record(step, "noise/trace", trace), Record(step, "noise/square", square))
    writer.close()
    return directory


def test_the_parts_are_averaged_apart(tmp_path: Path) -> None:
    """A mean of ratios would be (20 + 60) / 2; an estimate of the square below 0 counts as it is."""
    found = read_critical_batch(run_directory(tmp_path, [(1.0, 1.0), (1.0, 1.0), (10.0, 0.5), (30.0, 0.5)]))
    assert found.noise_scale == pytest.approx(40.0)
    assert [(part.first, part.last, part.sequences) for part in found.stretches][-1] == (4, 4, 60.0)
    (tmp_path / "other").mkdir()
    noisy = read_critical_batch(run_directory(tmp_path / "other", [(1.0, 1.0), (1.0, 1.0), (10.0, -0.5), (30.0, 1.5)]))
    assert noisy.noise_scale == pytest.approx(40.0)
    assert noisy.stretches[2].sequences is None


def test_steps_and_examples_trade(tmp_path: Path) -> None:
    """(S / S_min - 1) (E / E_min - 1) = 1, the hyperbola of McCandlish et al.; both are 2 at the noise scale."""
    for batch in (1, 7, 64, 4096):
        assert (steps_factor(batch, 64.0) - 1) * (examples_factor(batch, 64.0) - 1) == pytest.approx(1.0)
    assert steps_factor(64, 64.0) == examples_factor(64, 64.0) == 2.0
    found = read_critical_batch(run_directory(tmp_path, [(64.0, 1.0)], batch=48))
    assert found.choices() == [8, 16, 32, 48, 64, 128, 256, 512]


def test_without_figures(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no gradient noise"):
        read_critical_batch(run_directory(tmp_path, []))
    (tmp_path / "other").mkdir()
    (tmp_path / "off").mkdir()
    off = run_directory(tmp_path / "off", [])
    with (off / "config.yaml").open("a") as file:
        file.write("health: {layers_every: null}\n")
    with pytest.raises(UserError, match=r"health.layers_every is null: 10 measures it"):
        read_critical_batch(off)
    with pytest.raises(UserError, match="noise hides the gradient"):
        read_critical_batch(run_directory(tmp_path / "other", [(1.0, -1.0)] * 4))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_directory(tmp_path, [(64.0, 1.0)] * 20)
    assert frame.main(["tune", "batch", "noisy", "--runs-dir", str(tmp_path / "runs"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["critical_batch"] == 64.0
    assert result["steps_factor"] == 3.0
    assert len(result["stretches"]) == 8
    page = tmp_path / "batch.html"
    assert frame.main(["tune", "batch", "noisy", "--runs-dir", str(tmp_path / "runs"), "--html", str(page)]) == 0
    text = capsys.readouterr().out
    assert "critical batch: 64 sequences" in text
    assert "twice as much saves a quarter of the steps" in text
    assert '<td class="number">3.00</td>' in page.read_text()
    assert frame.main(["tune", "batch", "noisy", "--runs-dir", str(tmp_path / "runs"), "--html", str(tmp_path)]) == 2
    assert "--html" in capsys.readouterr().err
    assert frame.main(["tune", "batch", "noisi", "--runs-dir", str(tmp_path / "runs")]) == 2
    assert "did you mean `noisy`?" in capsys.readouterr().err
