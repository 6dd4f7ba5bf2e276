"""The page of a search for a rate, and its drawing, from records alone."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from page_checks import chart, check_page

from modelworks.records import Record, RecordWriter
from modelworks.report import write_rates
from modelworks.report.rates import rate_drawing

LOSSES = {1e-3: (3.4, 3.5), 1e-2: (3.0, 3.1), 1e-1: (3.2, 3.3), 1.0: (30.0,)}
PROPOSAL = {
    "best": {"rate": 1e-2, "loss": 3.05, "standard_error": 0.05, "seeds": 2},
    "largest_stable": 1.0,
    "diverges": 10.0,
    "remarks": ["trials had <2%> of the tokens"],
    "steps": 40,
    "whole_steps": 2000,
    "tokens": 36_000,
    "optimizer": "adamw",
}


def records() -> list[Record]:
    rows = []
    for rate, losses in LOSSES.items():
        for seed, loss in enumerate(losses):
            tags: dict[str, str | int] = {"rate": repr(rate), "seed": seed}
            rows += [Record(step, "tune/curve", loss + 20 / step, "nats/token", tags=tags) for step in (20, 40)]
            rows.append(Record(40, "tune/loss", loss, "nats/token", tags=tags))
            rows.append(Record(40, "tune/train_loss", loss + 0.5, "nats/token", tags=tags))
    rows.append(Record(7, "tune/diverged", "the loss <rose>", kind="event", tags={"rate": "10.0", "seed": 0}))
    rows.append(Record(0, "tune/proposal", json.dumps(PROPOSAL), kind="event"))
    return rows


def write(directory: Path, rows: list[Record]) -> Path:
    writer = RecordWriter(directory / "records.jsonl")
    writer.write(*rows)
    writer.close()
    return directory / "records.jsonl"


def test_the_page_tells_the_search(tmp_path: Path) -> None:
    page = check_page(write_rates(write(tmp_path, records()), tmp_path / "rates.html", name="small"))
    assert "8 trials at 5 rates · adamw" in page.text
    assert "validation loss 3.0500 ± 0.05 nats/token" in page.text
    assert "trials had <2%> of the tokens" in page.text
    assert "diverged: the loss <rose>" in page.text
    curves = chart(page, "Training loss of the trials")["curves"]
    assert [(curve["label"], curve["step"]) for curve in curves] == [
        (label, [20, 40]) for label in ("0.001", "0.01", "0.1", "1")
    ]
    assert curves[0]["value"] == [4.4, 3.9]  # of the first seed


def test_the_drawing_puts_low_losses_low_and_rates_by_their_logarithm() -> None:
    drawing = rate_drawing(records())
    assert drawing is not None
    means = drawing["means"]
    gaps = [after["x"] - before["x"] for before, after in pairwise(means)]
    assert max(gaps) - min(gaps) <= 0.2  # a decade each
    assert max(means, key=lambda dot: dot["y"]) == means[1]
    assert [dot["best"] for dot in means] == [False, True, False, False]
    heights = [dot["y"] for dot in means]
    assert heights[3] < heights[0] < heights[2] < heights[1] <= drawing["bottom"]
    assert heights[0] - heights[3] < 4 * (heights[1] - heights[0])  # the rate that learns nothing is cut off
    assert [dot["high"] for dot in drawing["dots"]] == [False] * 6 + [True]
    assert drawing["diverged"][0]["x"] > means[3]["x"]
    assert drawing["stable"] == means[3]["x"]


def test_a_search_without_a_loss_or_an_end_has_a_page_too(tmp_path: Path) -> None:
    diverged = [row for row in records() if row.name == "tune/diverged"]
    assert rate_drawing(diverged) is None
    page = check_page(write_rates(write(tmp_path, diverged), tmp_path / "rates.html", name="small"))
    assert "No trial came to an end with a loss." in page.text
    damaged = Record(0, "tune/proposal", "not json", kind="event")
    nonsense = Record(1, "tune/loss", 3.0, tags={"rate": "fast", "seed": 0})
    path = write(tmp_path / "other", [damaged, nonsense])
    check_page(write_rates(path, tmp_path / "other.html", name="small"))
