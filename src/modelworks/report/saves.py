"""What saving cost: a table of the checkpoints that were written, and how long training stood still for them."""

from __future__ import annotations

from typing import Any

from modelworks.report import numbers
from modelworks.report.charts import spread
from modelworks.report.run_data import Run, Series

ROWS = 24


def saves_section(run: Run) -> dict[str, Any] | None:
    """For the template: head, rows, note. None where nothing was saved."""
    sizes = run.series.get("checkpoint/bytes")
    if sizes is None or not sizes.steps:
        return None
    names = ("stall_seconds", "write_seconds", "bandwidth", "staging")
    by_step = {name: _by_step(run, f"checkpoint/{name}") for name in names}
    saved = dict(zip(sizes.steps, sizes.values, strict=True))
    rows = [
        [
            f"{step:,}",
            numbers.size(saved[step]),
            _seconds(by_step["stall_seconds"].get(step)),
            _seconds(by_step["write_seconds"].get(step)),
            _speed(by_step["bandwidth"].get(step)),
            numbers.size(by_step["staging"].get(step)),
        ]
        for step in spread(sizes.steps, ROWS)
    ]
    return {
        "head": ["step", "bytes", "training stood still", "written in", "bandwidth", "staging memory of rank 0"],
        "rows": rows,
        "note": _note(run, len(sizes.steps)),
    }


def _note(run: Run, count: int) -> str:
    """Totals in a sentence."""
    stalled = sum(run.series["checkpoint/stall_seconds"].values) if "checkpoint/stall_seconds" in run.series else 0.0
    parts = [f"{count:,} checkpoints" if count > 1 else "1 checkpoint"]
    parts[0] += f"; for {numbers.quantity(stalled, 's')} in all training stood still"
    if run.seconds:
        parts[0] += f", {numbers.percent(stalled / run.seconds, 2)} of the run"
    for name, words in (
        ("waited_seconds", "waited for the save before"),
        ("skipped", "left out while one was written"),
    ):
        times = len(run.series[f"checkpoint/{name}"].steps) if f"checkpoint/{name}" in run.series else 0
        if times:
            parts.append(f"{times:,} {words}")
    if len(run.series["checkpoint/bytes"].steps) > ROWS:
        parts.append(f"{ROWS} are shown")
    return "; ".join(parts) + "."


def _by_step(run: Run, name: str) -> dict[int, float]:
    series = run.series.get(name, Series(name, ""))
    return dict(zip(series.steps, series.values, strict=True))


def _seconds(value: float | None) -> str:
    return numbers.MISSING if value is None else numbers.quantity(value, "s")


def _speed(value: float | None) -> str:
    return numbers.MISSING if value is None else f"{numbers.size(value)}/s"
