"""The section about a run's health, from records alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from page_checks import check_page
from synthetic import START, write_run

from modelworks.records import Record
from modelworks.report import write_report
from modelworks.report.health import COLUMNS, health_section
from modelworks.report.run_data import read_run

NAMES = ["embedding", "blocks.0", "head"]


def spike(step: int, answer: str, **more: Any) -> tuple[int, str, Any]:
    documents = [{"sample": 8 * step + row, "source": "books", "documents": [row, row + 1]} for row in (6, 7, 0)]
    fields = {
        "reason": "loss 9, 20 deviations above 3",
        "answer": answer,
        "samples": [8 * step, 8 * step + 7],
        "highest_loss": [8 * step + 6, 8 * step + 7],
        "documents": documents,
    }
    return step, "spike", {**fields, **more}


def layers(step: int, norm: float, *, updated: bool = True) -> tuple[int, str, Any]:
    fields = {"layers": NAMES, "grad_norm": [norm, 2 * norm, 4 * norm]}
    moved = {"weight_norm": [1.0, 2.0, 3.0], "update_ratio": [0.001, 0.002, 0.003]}
    return step, "health/layers", {**fields, **moved} if updated else fields


def test_spikes_with_their_documents_and_a_map_of_layers(tmp_path: Path) -> None:
    events = [spike(3, "skip"), spike(4, "clip", highest_loss=None), *(layers(step, 0.5 * step) for step in (2, 4, 6))]
    events += [layers(8, 1.0, updated=False), (7, "divergence", {"text": "the loss has risen to 4 from 3"})]
    more = [
        Record(step, name, value, "", "measured", {}, START)
        for step in (4, 8)
        for name, value in (("health/straggler", 1.0), ("health/imbalance", 0.25), ("health/clipped", 0.5))
    ]
    write_run(tmp_path / "run", losses=[3.0] * 8, events=events, more=more)
    section = health_section(read_run(tmp_path / "run"))
    assert section is not None
    assert section["sentence"].startswith("2 spikes, 2 of them answered by leaving the update out; the loss was found")
    assert section["spikes"][0] == [
        "3",
        "loss 9, 20 deviations above 3",
        "update left out",
        "30 to 31",
        "books 6-7, 7-8",
    ]
    assert section["spikes"][1][3:] == ["32 to 39", "books 6-7, 7-8, 0-1"]
    assert [mark["x"] for mark in section["line"]["marks"]] == [375.0, 500.0, 875.0]
    boxes = section["map"]["boxes"]
    assert len(boxes) == 4 * 3
    strongest = max(boxes, key=lambda box: box["strength"])
    assert strongest["title"] == "head, step 6: 12"
    assert section["layers"]["step"] == "6"
    assert section["layers"]["rows"][2] == ["head", "12", "3", "0.003"]
    assert section["ranks"].startswith("Rank 1 was the slowest in 100\N{NO-BREAK SPACE}% of the")
    page = check_page(write_report(tmp_path / "run"))
    assert "<h2>Health</h2>" in page.source
    assert "Gradient norm of each layer" in page.text
    assert "health/layers" not in page.text


def test_a_long_run_fits_into_the_map_and_keeps_its_peaks(tmp_path: Path) -> None:
    events = [layers(10 * step, 100.0 if step == 477 else 1.0) for step in range(1, 1001)]
    write_run(tmp_path / "run", losses=[3.0], events=[*events, layers(4770, 100.0)])
    section = health_section(read_run(tmp_path / "run"))
    assert section is not None
    assert len(section["map"]["boxes"]) == COLUMNS * 3
    peaks = [box for box in section["map"]["boxes"] if box["title"].startswith("head") and box["strength"] == 1.0]
    assert len(peaks) == 1
    assert section["sentence"] == "No spike and no divergence."
    assert section["line"] is None


def test_a_run_that_was_not_watched_has_no_such_section(tmp_path: Path) -> None:
    write_run(tmp_path / "run", losses=[3.0, 2.0])
    assert health_section(read_run(tmp_path / "run")) is None
    assert "<h2>Health</h2>" not in write_report(tmp_path / "run").read_text()


def test_layers_that_are_not_finite_or_zero(tmp_path: Path) -> None:
    events = [layers(1, float("nan")), layers(2, 0.0), layers(3, 1.0)]
    write_run(tmp_path / "run", losses=[3.0] * 3, events=events)
    section = health_section(read_run(tmp_path / "run"))
    assert section is not None
    assert [box["bad"] for box in section["map"]["boxes"] if box["title"].startswith("head")] == [True, False, False]
    check_page(write_report(tmp_path / "run"))
