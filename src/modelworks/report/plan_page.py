"""The page of a plan: the best layouts, where their time and memory go, the schedule and the whole search.

Made from the one object that `modelworks plan --json` prints, so that a saved answer can be drawn at any time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelworks.report import numbers
from modelworks.report.page import write_page
from modelworks.report.plan_charts import gantt, scatter, stacked_bars, steps
from modelworks.report.split import ranks_text

# What is shown as one: (words, colour of the style sheet, keys of the answer)
Groups = tuple[tuple[str, int, tuple[str, ...]], ...]
MEMORY: Groups = (
    ("parameters", 0, ("parameters",)),
    ("gradients", 1, ("gradients",)),
    ("optimiser", 2, ("optimizer",)),
    ("activations", 3, ("activations", "working")),
    ("logits and loss", 4, ("loss",)),
    ("exchange buffers", 5, ("gather", "buffers")),
    ("allocator and driver", 6, ("slack", "context")),
)
TIME: Groups = (
    ("matrix products", 0, ("linear", "head")),
    ("attention", 4, ("attention",)),
    ("elementwise", 2, ("elementwise",)),
    ("recomputed", 5, ("recompute",)),
    ("exchanges that nothing hides", 1, ("tensor", "context", "experts", "gather", "sends", "data")),
    ("idle in the pipeline", 6, ("idle",)),
    ("optimiser and overhead", 3, ("optimizer", "overhead")),
)


def write_plan(path: Path, answer: Mapping[str, Any]) -> Path:
    """Write the page; one self-contained file. Returns its path. Raises OSError where it cannot be written."""
    job, winner = answer["job"], answer["winner"]
    layouts = answer["layouts"]
    return write_page(
        path,
        "plan.html",
        title=f"{job['model']} on {_devices(job)}",
        subtitle=_subtitle(job),
        assumed=answer["assumed"],
        attempts=_attempts(answer["nothing_fits"]),
        winner=winner,
        tiles=_tiles(answer),
        explanation=answer["explanation"] or (winner or {"reasons": []})["reasons"],
        layouts=[_row(place, found) for place, found in enumerate(layouts, 1)],
        goals=[[*_row(name, found), f"{found['gpus']:,}"] for name, found in answer["goals"].items()],
        neighbours=[[each["change"], each["verdict"], each["why"]] for each in answer["neighbours"]],
        time=_time(layouts),
        memory=_memory(winner) if winner else None,
        gantt=gantt(winner["timeline"]) if winner and winner["timeline"] else None,
        undrawn=bool(winner and not winner["timeline"] and len(winner["stage_bytes"]) > 1),
        over_time=_over_time(winner) if winner else None,
        on_host=_gigabytes(size) if winner and (size := winner.get("host_memory_bytes")) else None,
        scatter=_scatter(answer),
        search=answer["search"],
        notes=_notes(answer),
    )


def _devices(job: Mapping[str, Any]) -> str:
    return f"{job['gpus']:,} × {job['hardware']}" if job["gpus"] > 1 else str(job["hardware"])


def _subtitle(job: Mapping[str, Any]) -> str:
    parts = [
        f"{numbers.count(job['parameters'])} parameters",
        f"{job['global_batch_rows']:,} rows of {job['seq_len']:,} tokens a step",
        job["precision"],
        job["optimizer"],
    ]
    return " · ".join(parts)


def _tiles(answer: Mapping[str, Any]) -> list[dict[str, str]]:
    winner = answer["winner"]
    if not winner:
        return []
    tiles = [
        ("step", _seconds(winner["step_seconds"]), ""),
        ("throughput", f"{numbers.count(winner['tokens_per_second'])} tokens/s", ""),
        ("model FLOPs utilisation", numbers.percent(winner["mfu"]), "causal attention, nothing recomputed"),
        ("fullest rank", _gigabytes(winner["memory_bytes"]), f"of {_gigabytes(winner['memory_limit_bytes'])}"),
        ("bubble", numbers.percent(winner["bubble"]), "of the pipeline, mean over ranks"),
    ]
    if run := answer["run"]:
        tiles.append(("whole run", numbers.duration(run["seconds"]), f"{numbers.count(run['tokens'])} tokens"))
    elif answer["price"]:
        tiles.append(("a million tokens", f"${winner['usd_per_million_tokens']:.2g}", "at list prices or --price"))
    return [{"label": label, "value": value, "detail": detail} for label, value, detail in tiles]


def _row(place: int | str, found: Mapping[str, Any]) -> list[str]:
    return [
        str(place),
        _spaced(found["layout"]),
        _seconds(found["step_seconds"]),
        numbers.count(found["tokens_per_second"]),
        numbers.percent(found["mfu"]),
        _gigabytes(found["memory_bytes"]) + ("" if found["fits"] else ", too much"),
        numbers.percent(found["bubble"]),
    ]


def _spaced(layout: str) -> str:
    """With a place to break the line after each key; lists stay as they are written."""
    return re.sub(r",(?![^\[]*\])", " ", layout)


def _attempts(nothing: Mapping[str, Any] | None) -> list[list[str]]:
    """Where nothing fits: what was changed, the layout that needs least then, and how it ends."""
    if nothing is None:
        return []
    return [
        [
            each["change"],
            _spaced(each["layout"]),
            f"{_gigabytes(each['memory_bytes'])} of {_gigabytes(each['memory_limit_bytes'])}",
            "fits" if each["fits"] else f"{_gigabytes(each['short_by_bytes'])} too much",
        ]
        for each in nothing["attempts"]
    ]


def _notes(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Sections of the run as a whole: title, table, sentences."""
    notes = []
    if price := answer["price"]:
        notes.append({"title": "Cost", "rows": _costs(answer), "head": ["", "US dollars"], "text": [price["source"]]})
    if failures := answer["reliability"]:
        rows = [
            ["one failure in", numbers.duration(3600 * failures["mean_hours_between_failures"])],
            [
                "save every",
                f"{numbers.duration(failures['save_every_seconds'])}, {failures['save_every_steps']:,} steps",
            ],
            ["time that is training", numbers.percent(failures["goodput"])],
        ]
        notes.append(
            {
                "title": "Failures",
                "rows": rows,
                "head": ["", ""],
                "text": [failures["assumptions"], *failures["reasons"]],
            }
        )
    if advice := answer["frameworks"]:
        rows = [[each["framework"], each["fit"], each["reason"], each["source"]] for each in advice]
        head = ["framework", "", "why", "source"]
        notes.append({"title": "Programs that could run it", "rows": rows, "head": head, "text": []})
    if hyper := answer["hyper"]:
        rows = [
            [each["name"].replace("_", " "), _value(each), each["reason"], each["source"]]
            for each in hyper["suggestions"]
        ]
        head = ["start from", "", "why", "source"]
        notes.append({"title": "Settings to start from", "rows": rows, "head": head, "text": [hyper["caution"]]})
    return notes


def _value(suggestion: Mapping[str, Any]) -> str:
    value = suggestion["value"]
    if value is None:
        return "not known"
    return f"{numbers.count(value) if value >= 1000 else f'{value:.3g}'} {suggestion['unit']}".strip()


def _costs(answer: Mapping[str, Any]) -> list[list[str]]:
    rows = [["an hour of one device", f"{answer['price']['usd_per_device_hour']:,.2f}"]]
    if answer["winner"]:
        rows.append(["a million tokens", f"{answer['winner']['usd_per_million_tokens']:,.2f}"])
    if answer["run"]:
        rows.append([f"the run of {numbers.count(answer['run']['tokens'])} tokens", f"{answer['run']['usd']:,.0f}"])
    return rows


def _time(layouts: list[Mapping[str, Any]]) -> dict[str, Any]:
    rows = [
        (f"{place}. {_spaced(found['layout'])}", _grouped(found["time_seconds"], TIME))
        for place, found in enumerate(layouts, 1)
    ]
    return stacked_bars(rows, TIME, _seconds)


def _memory(winner: Mapping[str, Any]) -> dict[str, Any]:
    """Bars of the ranks along the pipeline; those alike and side by side are one."""
    rows: list[tuple[str, list[float]]] = []
    spans: list[tuple[int, int]] = []
    for rank, sizes in enumerate(winner["stage_bytes"]):
        grouped = _grouped(sizes, MEMORY)
        if rows and rows[-1][1] == grouped:
            spans[-1] = (spans[-1][0], rank)
        else:
            rows.append(("", grouped))
            spans.append((rank, rank))
    single = len(winner["stage_bytes"]) == 1
    labels = ["every rank" if single else f"stage {ranks_text(range(first, last + 1))}" for first, last in spans]
    named = [(label, row) for label, (_, row) in zip(labels, rows, strict=True)]
    return stacked_bars(named, MEMORY, _gigabytes, limit=winner["memory_limit_bytes"])


def _over_time(winner: Mapping[str, Any]) -> dict[str, Any] | None:
    timeline, curves = winner["timeline"], winner.get("activation_bytes_over_time")
    return steps(timeline, curves) if timeline and curves else None


def _scatter(answer: Mapping[str, Any]) -> dict[str, Any] | None:
    search = answer["search"]
    if not search or not search["points"]["step_seconds"]:
        return None
    best = [(found["memory_bytes"], found["step_seconds"], found["layout"]) for found in answer["layouts"]]
    limit = answer["winner"]["memory_limit_bytes"] if answer["winner"] else None
    return scatter(search["points"], best, limit)


def _grouped(values: Mapping[str, float], groups: Groups) -> list[float]:
    return [sum(max(values.get(key, 0.0), 0.0) for key in keys) for _, _, keys in groups]


def _seconds(value: float) -> str:
    if value < 1:
        return f"{value * 1e3:.3g}\u00a0ms"
    return f"{value:,.3g}\u00a0s" if value < 1000 else f"{value:,.0f}\u00a0s"


def _gigabytes(value: float) -> str:
    return f"{value / 1e9:,.1f}\u00a0GB" if value >= 1e8 else f"{value / 1e6:,.3g}\u00a0MB"
