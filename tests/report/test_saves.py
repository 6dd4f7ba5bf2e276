"""The section about what saving cost, from records alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from page_checks import check_page
from synthetic import START, write_run

from modelworks.records import Record
from modelworks.report import write_report
from modelworks.report.run_data import read_run
from modelworks.report.saves import saves_section


def figure(step: int, name: str, value: float, unit: str = "") -> Record:
    return Record(step, f"checkpoint/{name}", value, unit, "measured", {}, START + step)


def save(step: int, stall: float) -> list[Record]:
    return [
        figure(step, "bytes", 3 * 1024**2, "bytes"),
        figure(step, "stall_seconds", stall, "s"),
        figure(step, "write_seconds", 0.5, "s"),
        figure(step, "bandwidth", 6 * 1024**2, "bytes/s"),
        figure(step, "staging", 2 * 1024**2, "bytes"),
    ]


def run_with(directory: Path, more: list[Record]) -> Any:
    write_run(directory, losses=[3.0, 2.0, 1.0], more=more)
    return read_run(directory)


def test_what_each_save_cost(tmp_path: Path) -> None:
    busy = [figure(3, "waited_seconds", 1.5, "s"), figure(2, "skipped", 1)]
    run = run_with(tmp_path / "run", [*save(1, 0.25), *save(2, 0.125), *save(3, 0.125), *busy])
    section = saves_section(run)
    assert section is not None
    assert section["rows"][0] == ["1", "3 MiB", "0.25 s", "0.5 s", "6 MiB/s", "2 MiB"]
    assert [row[0] for row in section["rows"]] == ["1", "2", "3"]
    assert section["note"].startswith("3 checkpoints; for 0.5 s in all training stood still, ")
    assert section["note"].endswith("; 1 waited for the save before; 1 left out while one was written.")
    page = check_page(write_report(tmp_path / "run"))
    assert "<h2>Checkpoints</h2>" in page.source
    assert "Time of saves" in page.source


def test_a_run_that_saved_nothing_has_no_such_section(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", [])
    assert saves_section(run) is None
    assert "<h2>Checkpoints</h2>" not in write_report(tmp_path / "run").read_text()


def test_figures_that_are_missing(tmp_path: Path) -> None:
    """Of a run that was cut off, say."""
    section = saves_section(run_with(tmp_path / "run", [figure(1, "bytes", 1024.0, "bytes")]))
    assert section is not None
    assert section["rows"] == [["1", "1 KiB", "–", "–", "–", "–"]]
    assert section["note"].startswith("1 checkpoint; for 0 s in all")
