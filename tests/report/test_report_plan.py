"""The page of a plan: whole, escaped, and what the answer says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from page_checks import check_page

from modelworks.report import write_plan
from modelworks.report.plan_charts import gantt, scatter, stacked_bars, steps
from modelworks.report.plan_page import MEMORY, TIME

NAME = "<script>alert(1)</script> & co"
TIMES = {
    "linear": 1.0, "head": 0.1, "attention": 0.2, "elementwise": 0.1, "recompute": 0.0, "tensor": 0.3, "context": 0.0,
    "experts": 0.0, "gather": 0.0, "sends": 0.0, "data": 0.0, "idle": -0.01, "optimizer": 0.05, "overhead": 0.05,
}  # fmt: skip
BYTES = {"parameters": 1e9, "gradients": 2e9, "optimizer": 3e9, "activations": 4e9, "working": 1e9, "loss": 5e8,
         "gather": 0.0, "buffers": 1e8, "slack": 3e8, "context": 1e9}  # fmt: skip

CURVES = [[[0.0, 1e9], [1.4, 4e9], [1.8, 0.0]], [[0.1, 2e9], [1.4, 2e9], [1.6, 0.0]]]


def layout(step: float = 1.8, fits: bool = True) -> dict[str, Any]:
    return {
        "layout": "tp=2,pp=2,micro_batch=1", "keys": {}, "gpus": 8, "step_seconds": step, "tokens_per_second": 9e3,
        "mfu": 0.4, "bubble": 0.1, "memory_bytes": 13e9, "memory_limit_bytes": 16e9, "fits": fits,
        "usd_per_million_tokens": 1.5, "time_seconds": TIMES, "reasons": ["most of it <b>computing</b>"],
    }  # fmt: skip


def timeline() -> dict[str, Any]:
    ranks = [
        [["forward", 0, 0, 0.0, 0.1], ["backward", 0, 9, 1.6, 1.8]],
        [["forward", 1, 0, 0.1, 0.2], ["backward_input", 1, 9, 1.4, 1.5], ["backward_weight", 1, 9, 1.5, 1.6]],
    ]
    return {
        "makespan_seconds": 1.8, "left_out": 37, "left_out_from_seconds": 0.2, "left_out_to_seconds": 1.4,
        "ranks": ranks,
    }  # fmt: skip


def answer(**changes: Any) -> dict[str, Any]:
    points = {"step_seconds": [1.8, 2.5, 20.0], "memory_bytes": [13e9, 9e9, 40e9], "fits": [True, True, False]}
    whole = {
        "job": {
            "model": NAME, "parameters": 8e9, "hardware": "A100", "gpus": 8, "seq_len": 2048, "global_batch_rows": 64,
            "precision": "bf16", "optimizer": "adamw",
        },
        "assumed": ["precision <i>bf16</i>"],
        "layouts": [layout(), layout(2.5)],
        "winner": {**layout(), "stage_bytes": [BYTES, {**BYTES, "activations": 2e9}], "timeline": timeline(),
                   "activation_bytes_over_time": CURVES, "host_memory_bytes": 7e11},
        "goals": {"fastest": layout(), "least memory": layout(2.5)},
        "explanation": [],
        "neighbours": [{"change": "tp=4 instead of 2", "verdict": "does not fit", "why": "stage <0> needs more"}],
        "nothing_fits": None,
        "search": {"evaluated": 1234, "fitting": 1000, "points": points},
        "price": {"usd_per_device_hour": 2.0, "source": "a list"},
        "run": {"tokens": 10**12, "steps": 10, "seconds": 3600.0, "usd": 16.0},
        "reliability": None,
        "frameworks": [],
        "hyper": None,
    }  # fmt: skip
    return whole | changes


def test_everything_is_there_and_nothing_is_loaded(tmp_path: Path) -> None:
    page = check_page(write_plan(tmp_path / "plan.html", answer()))
    for text in (
        f"{NAME} on 8 × A100", "Where the time of a step goes", "Memory along the pipeline", "stage 0", "stage 1",
        "One step of the pipeline", "37 computations",
        "Memory over the step, by rank", "700.0\u00a0GB wait in each host",
        "The whole search", "1,234 layouts", "One step away",
        "tp=4 instead of 2", "stage <0> needs more", "least memory", "most of it <b>computing</b>",
    ):  # fmt: skip
        assert text in page.text, text
    assert page.tags.count("circle") == 3 + 2
    assert page.tags.count("rect") == 5
    assert "b" not in page.tags
    assert "i" in page.tags  # keys of legends only


def test_without_a_pipeline_a_search_or_a_price(tmp_path: Path) -> None:
    one = {**layout(), "stage_bytes": [BYTES], "timeline": None}
    alone = answer(layouts=[layout()], winner=one, goals={}, neighbours=[], search=None, price=None, run=None)
    page = check_page(write_plan(tmp_path / "plan.html", alone))
    assert "every rank" in page.text
    for text in ("One step of the pipeline", "The whole search", "One step away", "Cost", "the best for each goal"):
        assert text not in page.text
    assert "svg" not in page.tags
    assert "not drawn" not in page.text


def test_a_step_too_long_to_be_drawn_says_so(tmp_path: Path) -> None:
    long = {**layout(), "stage_bytes": [BYTES, BYTES], "timeline": None, "activation_bytes_over_time": None}
    page = check_page(write_plan(tmp_path / "plan.html", answer(winner=long)))
    assert "not drawn" in page.text
    assert "Memory over the step" not in page.text


def test_a_page_where_nothing_fits_says_what_is_missing(tmp_path: Path) -> None:
    attempts = [
        {**layout(fits=False), "change": "as asked for", "short_by_bytes": 5e9},
        {**layout(), "change": "16 devices", "short_by_bytes": 0.0},
    ]
    nothing = {"attempts": attempts, "smallest": "16 devices"}
    bare = answer(
        layouts=[], winner=None, goals={}, neighbours=[], run=None, nothing_fits=nothing, explanation=["nothing <fits>"]
    )
    page = check_page(write_plan(tmp_path / "plan.html", bare))
    for text in ("Nothing fits", "nothing <fits>", "as asked for", "5.0\u00a0GB too much", "16 devices"):
        assert text in page.text, text


def test_settings_and_failures_are_told(tmp_path: Path) -> None:
    suggestion = {
        "name": "learning_rate",
        "value": 3e-4,
        "unit": "",
        "reason": "because",
        "source": "2001",
        "range": None,
    }
    failures = {
        "mean_hours_between_failures": 10.0, "save_every_seconds": 600.0, "save_every_steps": 20, "goodput": 0.98,
        "assumptions": "assumed: 600 s to restart", "reasons": ["one failure in 10 h"],
    }  # fmt: skip
    hyper = {"suggestions": [suggestion], "overrides": {}, "caution": "starting points"}
    page = check_page(write_plan(tmp_path / "plan.html", answer(reliability=failures, hyper=hyper)))
    for text in ("assumed: 600 s to restart", "learning rate", "0.0003", "starting points"):
        assert text in page.text, text


def test_bars_are_to_scale_and_complete() -> None:
    groups: Any = (("one", 0, ("a",)), ("two", 1, ("b",)), ("never", 2, ("c",)))
    chart = stacked_bars([("x", [1.0, 3.0, 0.0]), ("y", [2.0, 0.0, 0.0])], groups, str, limit=5.0)
    widths = [[part["width"] for part in bar["parts"]] for bar in chart["bars"]]
    assert widths == [[20.0, 60.0], [40.0, 0.0]]
    assert chart["limit"] == 100.0
    assert [key["name"] for key in chart["legend"]] == ["one", "two"]
    assert chart["rows"] == [["x", "1.0", "3.0", "4.0"], ["y", "2.0", "0.0", "2.0"]]
    assert [bar["over"] for bar in stacked_bars([("x", [6.0, 0.0, 0.0])], groups, str, limit=5.0)["bars"]] == [True]


def test_every_cause_and_kind_is_in_one_group() -> None:
    assert sorted(key for _, _, keys in TIME for key in keys) == sorted(TIMES)
    assert sorted(key for _, _, keys in MEMORY for key in keys) == sorted(BYTES)


def test_the_schedule_is_drawn_around_the_cut() -> None:
    drawn = gantt(timeline())
    assert drawn is not None
    assert drawn["cut"] is not None
    boxes = drawn["boxes"]
    assert all(box["x"] + box["width"] <= drawn["width"] + 0.5 for box in boxes)
    before, after = [box for box in boxes if box["x"] < drawn["cut"]], [box for box in boxes if box["x"] > drawn["cut"]]
    assert (len(before), len(after)) == (2, 3)
    ratio = boxes[1]["width"] / boxes[0]["width"]
    assert ratio == pytest.approx(2.0, rel=1e-3)
    assert gantt({**timeline(), "ranks": [[], []]}) is None


def test_memory_over_a_step_stands_over_the_schedule() -> None:
    drawn, schedule = steps(timeline(), CURVES), gantt(timeline())
    assert drawn is not None
    assert schedule is not None
    assert drawn["cut"] == schedule["cut"]
    first, second = (re.findall(r"[HMV]?([\d.]+)", path["d"]) for path in drawn["paths"])
    boxes = {box["title"].split()[0] + box["title"].split(",")[1][7]: box["x"] for box in schedule["boxes"]}
    assert float(second[0]) == pytest.approx(boxes["forward1"], abs=0.1)  # from its first computation on
    (top, most), (bottom, _) = ((float(first[5]), 4e9), (float(first[1]), 0.0))
    assert float(second[3]) == pytest.approx(bottom + (top - bottom) * 2e9 / most, abs=0.1)
    assert [tick["text"] for tick in drawn["ticks"]] == ["0", "1", "2", "3", "4"]
    many = steps({**timeline(), "ranks": timeline()["ranks"] * 32}, CURVES * 32)
    assert many is not None
    assert [many["paths"][place]["text"] for place in (0, -1)] == ["stage 0", "stage 63"]
    assert len(many["paths"]) == 7
    assert steps(timeline(), [[], []]) is None


def test_the_scatter_puts_the_best_where_they_are() -> None:
    points = {"step_seconds": [1.0, 10.0], "memory_bytes": [1e9, 1e11], "fits": [True, False]}
    drawn = scatter(points, [(1e9, 1.0, "tp=2")], 8e10)
    (grey, blue), (best,) = drawn["dots"], drawn["best"]
    assert (grey["fits"], blue["fits"]) == (False, True)
    assert (best["x"], best["y"]) == (blue["x"], blue["y"])
    assert blue["x"] < drawn["limit"] < grey["x"]
    assert blue["y"] > grey["y"]
    assert [tick["text"] for tick in drawn["y_ticks"]] == ["1", "2", "5", "10"]


def test_names_cannot_become_markup(tmp_path: Path) -> None:
    text = write_plan(tmp_path / "plan.html", answer()).read_text(encoding="utf-8")
    assert not re.search(r"<script>alert", text)
