"""The section about a run's health, from records alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from page_checks import check_page
from synthetic import START, write_run

from modelworks.records import Record, RecordWriter
from modelworks.report import write_report
from modelworks.report.charts import run_charts
from modelworks.report.health import COLUMNS, health_charts, health_section
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
    events += [
        layers(8, 1.0, updated=False),
        (7, "divergence", {"text": "the loss has risen to 4 from 3", "answer": "slow"}),
    ]
    events += [(5, "outlier", spike(5, "none")[2]), (5, "health/grad_norms", {"grad_norm": [9.0, 0.5, 0.5]})]
    more = [
        Record(step, name, value, "", "measured", {}, START)
        for step in (4, 8)
        for name, value in (("health/straggler", 1.0), ("health/imbalance", 0.25), ("health/clipped", 0.5))
    ]
    write_run(tmp_path / "run", losses=[3.0] * 8, events=events, more=more)
    section = health_section(read_run(tmp_path / "run"))
    assert section is not None
    assert section["sentence"].startswith("2 spikes, 2 of them answered by leaving the update out; the loss was found")
    assert section["sentence"].endswith(" 1 step had a gradient norm far above the usual and no other sign of trouble.")
    assert section["divergences"] == [["7", "the loss has risen to 4 from 3", "tighter clipping, lower rate"]]
    assert section["spikes"][0] == [
        "3",
        "loss 9, 20 deviations above 3",
        "update left out",
        "30 to 31",
        "books 6-7, 7-8",
    ]
    assert section["spikes"][1][3:] == ["32 to 39", "books 6-7, 7-8, 0-1"]
    assert [mark["x"] for mark in section["line"]["marks"]] == [375.0, 500.0, 625.0, 875.0]
    boxes = section["map"]["boxes"]
    assert len(boxes) == 5 * 3  # norms are known between steps that were measured, too
    assert "embedding, step 5: 9" in [box["title"] for box in boxes]
    strongest = max(boxes, key=lambda box: box["strength"])
    assert strongest["title"] == "head, step 6: 12"
    assert section["layers"]["step"] == "6"
    assert section["layers"]["rows"][2] == ["head", "12", "3", "0.003"]
    assert section["ranks"].startswith("Rank 1 was the slowest in 100\N{NO-BREAK SPACE}% of the")
    page = check_page(write_report(tmp_path / "run"))
    assert "<h2>Health</h2>" in page.source
    assert "Gradient norm of each layer" in page.text
    assert "health/layers" not in page.text


def test_what_was_undone_is_kept_and_marked(tmp_path: Path) -> None:
    """Steps 5 and 6 are made twice. The loss is that of the second time, the spike of the first is still there."""
    back = {"number": 1, "good": 4, "from": "memory", "restarted": 4, "samples": [16, 39]}
    rows = [
        *(
            Record(step, "train/loss", 9.0 if step > 4 else 3.0, "nats/token", time=START + step)
            for step in range(1, 7)
        ),
        Record(6, "spike", json.dumps(spike(6, "rollback")[2]), kind="event", time=START + 6),
        Record(6, "rollback", json.dumps(back), kind="event", time=START + 6),
    ]
    found = {"kind": "plateau", "subject": "", "text": "since about step 4 the loss is 2", "evidence": {"loss": 2.0}}
    later = [
        *(Record(step, "train/loss", 2.0, "nats/token", time=START + 2 + step) for step in range(5, 9)),
        Record(8, "judgement", json.dumps(found), kind="event", time=START + 10),
    ]
    write_run(tmp_path / "run", losses=[], more=[*rows, *later])
    run = read_run(tmp_path / "run")
    assert run.series["train/loss"].steps == list(range(1, 9))
    assert run.series["train/loss"].values == [3.0] * 4 + [2.0] * 4
    assert [(record.step, record.value) for record in run.undone] == [(5, 9.0), (6, 9.0)]
    section = health_section(run)
    assert section is not None
    assert section["sentence"] == (
        "1 spike, 1 of them answered by leaving the update out; the run went back once; it was judged: plateau."
    )
    assert section["spikes"][0][2] == "back to an earlier step (undone)"
    assert section["rollbacks"] == [["6", "4", "memory", "16 to 39"]]
    assert section["judgements"] == [["8", "plateau", "since about step 4 the loss is 2", "loss 2"]]
    [loss] = [chart for chart in run_charts(run) if chart.title == "Loss"]
    assert loss.data()["marks"]["step"] == [4]
    page = check_page(write_report(tmp_path / "run"))
    assert "since about step 4 the loss is 2" in page.text


def test_curves_of_health_and_the_search_for_the_rate(tmp_path: Path) -> None:
    more = [
        Record(step, name, 10.0 + step, "sequences", time=START + step)
        for step in range(1, 6)
        for name in ("noise/scale", "noise/trace", "health/cosine")
    ]
    write_run(tmp_path / "run", losses=[3.0] * 5, more=more)
    charts = health_charts(read_run(tmp_path / "run"))
    assert [chart.title for chart in charts] == ["Gradient noise scale", "Cosine"]
    assert charts[0].references[0].value == 4
    trials = tmp_path / "run" / "tune-lr" / "records.jsonl"
    writer = RecordWriter(trials)
    for rate in ("0.001", "0.01", "0.1"):
        writer.write(Record(9, "tune/loss", 3.0 + float(rate), "nats/token", tags={"rate": rate, "seed": 0}))
    writer.close()
    page = check_page(write_report(tmp_path / "run"))
    assert "Search for the learning rate" in page.text
    assert "Gradient noise scale" in page.text


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
