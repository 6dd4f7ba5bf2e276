"""The page of a load on a server: what its latencies were, and how much was in flight and answered over time.

Made from the one object that `modelworks bench-serve --json` prints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modelworks.report import numbers
from modelworks.report.page import write_page
from modelworks.report.plan_charts import LogAxis

_WIDTH, _HEIGHT, _LEFT, _BELOW, _TOP, _RIGHT = 560, 260, 56, 34, 10, 14
_KINDS = (
    ("time_to_first_token", "time to first token", 0),
    ("inter_token_latency", "between tokens", 1),
    ("end_to_end", "whole request", 2),
)
_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


def write_load(path: Path, answer: Mapping[str, Any]) -> Path:
    """Write the page; one self-contained file. Returns its path. Raises OSError where it cannot be written."""
    load = answer["load"]
    kind = f"{load['concurrency']} requests in flight" if "concurrency" in load else f"{load['rate']:g} requests/s"
    timeline = answer["timeline"]
    return write_page(
        path,
        "load.html",
        title=f"Load on {answer['model'] or answer['url']}: {kind}",
        subtitle=f"{answer['url']} · {answer['endpoint']} · seed {answer['seed']}",
        tiles=_tiles(answer),
        late=answer["sent_late"] and numbers.figure(1e3 * answer["sent_late"]["p99"], 1),
        distribution=_distribution(answer["curves"]),
        over_time=[
            _over_time("Answered", "events with text / s", 0, timeline["events_per_second"], timeline["bin_seconds"]),
            _over_time("In flight", "requests", 1, timeline["in_flight"], timeline["bin_seconds"]),
        ]
        if timeline["bin_seconds"]
        else [],
        head=["milliseconds", *_COLUMNS],
        rows=[
            [label, *(numbers.figure(1e3 * answer[name][at], 1) for at in _COLUMNS)]
            for name, label in (*(pair[:2] for pair in _KINDS), ("time_per_output_token", "per token after the first"))
            if answer[name]
        ],
        errors=[[f"{error['count']:,}", error["error"], error["first"]] for error in answer["errors"]],
    )


def _tiles(answer: Mapping[str, Any]) -> list[dict[str, str]]:
    first = answer["time_to_first_token"]
    tiles = [
        ("requests", f"{answer['completed']:,}", f"of {answer['requests']:,} completed"),
        ("output", numbers.figure(answer["generated_tokens_per_second"], 1), "tokens/s"),
        ("prompts", numbers.figure(answer["prompt_tokens_per_second"], 0), "tokens/s"),
        ("first token, median", numbers.figure(first and 1e3 * first["p50"], 0), "ms"),
    ]
    return [{"label": label, "value": value, "detail": detail} for label, value, detail in tiles]


def _distribution(curves: Mapping[str, Sequence[float]]) -> dict[str, Any] | None:
    """Share of requests (or gaps) that took at most so long, time on a logarithmic axis. None without values."""
    shown = [(label, colour, curves[name]) for name, label, colour in _KINDS if any(v > 0 for v in curves[name])]
    if not shown:
        return None
    across = LogAxis([1e3 * value for _, _, curve in shown for value in curve if value > 0], _LEFT, _WIDTH - _RIGHT)
    up = _Linear(100.0)
    lines = []
    for label, colour, curve in shown:
        last = len(curve) - 1
        points = [(across.at(1e3 * v), up.at(100 * place / last)) for place, v in enumerate(curve) if v > 0]
        marks = [
            {"x": across.at(1e3 * curve[at]), "y": up.at(at), "title": f"{label}, p{at}: {1e3 * curve[at]:,.1f} ms"}
            for at in (50, 90, 99)
            if curve[at] > 0
        ]
        lines.append({"label": label, "colour": colour, "points": points, "marks": marks})
    return {
        **_frame("Latencies", "ms; share of all that took at most so long"),
        "x_ticks": [{"at": across.at(value), "text": f"{value:,.4g}"} for value in across.ticks()],
        "y_ticks": [{"at": up.at(share), "text": f"{share} %"} for share in (0, 25, 50, 75, 100)],
        "lines": lines,
    }


def _over_time(title: str, unit: str, colour: int, values: Sequence[float], width: float) -> dict[str, Any]:
    """A line through the bins' middles. width: of a bin, in seconds."""
    whole = width * len(values)
    up = _Linear(max(values) or 1.0)

    def across(seconds: float) -> float:
        return round(_LEFT + seconds / whole * (_WIDTH - _RIGHT - _LEFT), 1)

    points = [(across((place + 0.5) * width), up.at(value)) for place, value in enumerate(values)]
    return {
        **_frame(title, unit),
        "x_ticks": [{"at": across(value), "text": f"{value:g} s"} for value in _round_ticks(whole)],
        "y_ticks": [{"at": up.at(value), "text": f"{value:g}"} for value in _round_ticks(up.top)],
        "lines": [{"label": unit, "colour": colour, "points": points, "marks": []}],
    }


def _frame(title: str, unit: str) -> dict[str, Any]:
    return {
        "title": title,
        "unit": unit,
        "width": _WIDTH,
        "height": _HEIGHT,
        "left": _LEFT,
        "right": _WIDTH - _RIGHT,
        "bottom": _HEIGHT - _BELOW,
    }


class _Linear:
    """The vertical axis from 0 to `top`."""

    def __init__(self, top: float) -> None:
        self.top = top

    def at(self, value: float) -> float:
        return round(_HEIGHT - _BELOW - value / self.top * (_HEIGHT - _BELOW - _TOP), 1)


def _round_ticks(top: float) -> list[float]:
    """0 and three to six round numbers up to `top`."""
    step = 10.0 ** math.floor(math.log10(top))
    step = next(size for size in (step / 5, step / 2, step, 2 * step) if top / size <= 6)
    return [round(step * place, 9) for place in range(int(top / step + 1e-9) + 1)]
