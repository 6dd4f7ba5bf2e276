"""The section about how a run was split, from records alone."""

from __future__ import annotations

from typing import Any

import pytest
from page_checks import check_page
from synthetic import START, write_run

from modelworks.records import Record
from modelworks.report import write_report
from modelworks.report.run_data import read_run
from modelworks.report.split import ranks_text, split_section

PARALLEL = {"pp": 2, "dp_shard": 2, "zero": 2, "pp_schedule": "1f1b"}


def tagged(name: str, measured: float, predicted: float, step: int = 5, unit: str = "", **tags: Any) -> list[Record]:
    return [
        Record(step, name, measured, unit, "measured", tags, START),
        Record(step, name, predicted, unit, "predicted", tags, START),
    ]


def split_records() -> list[Record]:
    rows = []
    for rank in range(4):
        sent = {"rank": rank, "axis": "shard", "kind": "reduce_scatter"}
        rows += tagged("collectives/calls", 3.0, 3.0, **sent) + tagged("collectives/bytes", 2048.0, 2048.0, **sent)
        rows += tagged("collectives/bytes", 1.0, 1.0, step=3, **sent)  # an earlier step
        for name, size in (("parameters", 4096.0), ("gradients", 2048.0), ("optimizer", 8192.0)):
            rows += tagged(f"rank_memory/{name}", size + 1024 * (rank == 3), size, rank=rank)
        rows += tagged("pipeline/held", 2.0 - rank // 2, 2.0 - rank // 2, rank=rank)
    rows.append(Record(3, "pipeline/bubble", 0.31, "", "measured", {}, START))
    rows += [
        Record(3, "pipeline/bubble", value, "", "predicted", {"formula": name}, START)
        for name, value in (("simple", 0.2), ("schedule", 0.21), ("simulated", 0.22))
    ]
    return rows


def timeline() -> dict[str, Any]:
    return {
        "unit": "microseconds",
        "ranks": [
            [["forward", 0, 0, 0, 400], ["receive_backward", 0, 0, 400, 500], ["backward", 0, 0, 900, 800]],
            [["receive_forward", 1, 0, 0, 420], ["forward", 1, 0, 420, 400], ["backward", 1, 0, 820, 60]],
        ],
    }


@pytest.fixture
def run(tmp_path: Any) -> Any:
    return write_run(
        tmp_path / "split",
        losses=[3.0, 2.0, 1.0],
        config={"parallel": PARALLEL},
        more=split_records(),
        events=[(3, "pipeline/timeline", timeline())],
    )


def test_the_page_shows_measured_beside_predicted(run: Any) -> None:
    page = check_page(write_report(run))
    for text in (
        "How the run was split", "4 ranks: pp 2 (1f1b) × dp_shard 2 (zero 2)", "0-3", "reduce_scatter", "2 KiB",
        "31.0\u00a0%", "20.0\u00a0%", "21.0\u00a0%", "22.0\u00a0%", "What each rank sent in step 5", "optimiser state",
    ):  # fmt: skip
        assert text in page.text, text
    assert "pipeline/timeline" not in page.text  # not among the events


def test_ranks_with_the_same_figures_are_one_entry(run: Any) -> None:
    section = split_section(read_run(run))
    assert section is not None
    assert section["collectives"] == [["0-3", "shard", "reduce_scatter", "3", "3", "2 KiB", "2 KiB", "1.000"]]
    assert [entry["ranks"] for entry in section["memory"]] == ["0-2", "3"]
    measured, predicted = section["memory"][1]["bars"]
    assert [part["size"] for part in measured["parts"]] == ["5 KiB", "3 KiB", "9 KiB"]
    assert sum(part["width"] for part in measured["parts"]) == pytest.approx(100, abs=0.1)
    assert sum(part["width"] for part in predicted["parts"]) == pytest.approx(100 * 14 / 17, abs=0.1)
    assert section["held"] == [["0-1", "2", "2"], ["2-3", "1", "1"]]


def test_the_drawing_has_a_box_for_each_computation(run: Any) -> None:
    section = split_section(read_run(run))
    assert section is not None
    drawing = section["timeline"]
    first, backward, other, _ = drawing["boxes"]
    assert [box["label"] for box in (first, backward)] == ["F0", "B0"]
    assert backward["width"] == pytest.approx(2 * first["width"], abs=0.02)
    assert other["x"] - first["x"] == pytest.approx(first["width"] * 420 / 400, abs=0.02)
    assert first["y"] < other["y"]
    assert max(box["x"] + box["width"] for box in drawing["boxes"]) == pytest.approx(drawing["width"], abs=0.1)
    assert drawing["milliseconds"] == "1.7"
    assert check_page(write_report(run)).tags.count("rect") == 4


def test_figures_of_ranks_are_no_curves(run: Any) -> None:
    read = read_run(run)
    assert not any(name.startswith(("collectives/", "rank_memory/")) for name in [*read.series, *read.predicted])


def test_a_split_run_that_has_measured_nothing_yet(tmp_path: Any) -> None:
    run = write_run(tmp_path / "early", losses=[3.0], config={"parallel": PARALLEL})
    assert "No step has been measured yet" in check_page(write_report(run)).text


@pytest.mark.parametrize("parallel", [{}, {"pp": 1}, None, "nonsense"])
def test_a_run_of_one_process_has_no_such_section(tmp_path: Any, parallel: Any) -> None:
    run = write_run(tmp_path / "one", losses=[3.0], config={"parallel": parallel})
    assert "How the run was split" not in check_page(write_report(run)).text


def test_ranks_in_words() -> None:
    assert ranks_text([3, 0, 1, 5]) == "0-1, 3, 5"
