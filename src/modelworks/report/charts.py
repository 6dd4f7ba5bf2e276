"""Charts as data: which curves, in which unit, against which axis. `assets/chart.js` draws them.

A chart is embedded as JSON beside a table of the same numbers for readers who do not see it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from modelworks.report import numbers
from modelworks.report.run_data import Run, Series, TokenCounts, event_fields
from modelworks.report.series import downsample, smooth

Role = Literal["line", "faint", "points"]
# Curves of more runs than this repeat the colours, dashed.
COLOURS = 7
# With a place of their own, or none.
_NOT_CHARTED = ("data/", "baseline/", "memory/", "checkpoint/", "health/", "noise/")
TABLE_ROWS = 24


@dataclass(frozen=True)
class Curve:
    """One curve. colour: index into the palette of the style sheet. role: how it is drawn."""

    label: str
    series: Series
    colour: int = 0
    role: Role = "line"
    tokens: TokenCounts | None = None
    start: float = 0.0  # the run's first moment: seconds since the epoch

    def data(self) -> dict[str, Any]:
        points = downsample(self.series.steps, self.series.times, self.series.values)
        return {
            "label": self.label,
            "colour": self.colour % COLOURS,
            "dashed": self.colour >= COLOURS,
            "role": self.role,
            "tokens": self.tokens and [self.tokens.at(step) for step, _, _ in points],
            "step": [step for step, _, _ in points],
            "seconds": [round(max(0.0, time - self.start), 1) for _, time, _ in points],
            "value": [value for _, _, value in points],
        }


@dataclass(frozen=True)
class Reference:
    """A horizontal line that the curve is compared with."""

    label: str
    value: float


@dataclass(frozen=True)
class Mark:
    """A step at which something happened. seconds: since the run's first moment."""

    label: str
    step: int
    seconds: float


@dataclass(frozen=True)
class Chart:
    """One chart. note: a sentence the reader should know. zero: the axis starts at 0. log: it starts logarithmic."""

    title: str
    unit: str
    curves: list[Curve]
    note: str = ""
    references: list[Reference] = field(default_factory=list)
    zero: bool = False
    log: bool = False
    wide: bool = False
    marks: list[Mark] = field(default_factory=list)

    def data(self) -> dict[str, Any]:
        tokens = self.curves[0].tokens if self.curves else None
        return {
            "title": self.title,
            "unit": self.unit,
            "zero": self.zero,
            "log": self.log,
            "curves": [curve.data() for curve in self.curves],
            "references": [{"label": reference.label, "value": reference.value} for reference in self.references],
            "marks": {
                "label": [mark.label for mark in self.marks],
                "step": [mark.step for mark in self.marks],
                "seconds": [round(mark.seconds, 1) for mark in self.marks],
                "tokens": tokens and [tokens.at(mark.step) for mark in self.marks],
            },
        }

    def table(self) -> tuple[list[str], list[list[str]]]:
        """(head, rows): the curves at up to `TABLE_ROWS` steps, evenly spread over the steps that have values."""
        curves = [curve for curve in self.curves if curve.role != "faint"] or self.curves
        by_step = [dict(zip(c.series.steps, c.series.values, strict=True)) for c in curves]
        steps = sorted(set().union(*by_step)) if by_step else []
        if len(curves) > 1 and any(curve.role == "points" for curve in curves):
            # Sparse measurements are the ones to compare at.
            steps = sorted(
                {step for c, values in zip(curves, by_step, strict=True) if c.role == "points" for step in values}
            )
        rows = [
            [f"{step:,}", *(_cell(values.get(step), self.unit) for values in by_step)]
            for step in spread(steps, TABLE_ROWS)
        ]
        return ["step", *(curve.label for curve in curves)], rows

    def gaps(self) -> str:
        """A sentence about values that were not finite, empty if all were."""
        missing = {
            curve.label: [
                s for s, v in zip(curve.series.steps, curve.series.values, strict=True) if not math.isfinite(v)
            ]
            for curve in self.curves
            if curve.role != "line" or len(self.curves) == 1 or not any(c.role == "faint" for c in self.curves)
        }
        parts = [
            f"{label}: {len(steps):,} not finite, first at step {steps[0]:,}"
            for label, steps in missing.items()
            if steps
        ]
        return "; ".join(parts)


def run_charts(run: Run) -> list[Chart]:
    """The charts of one run; a chart without data is left out."""

    def curve(name: str, label: str, colour: int = 0, role: Role = "line") -> list[Curve]:
        series = run.series.get(name)
        return [Curve(label, series, colour, role, run.tokens, run.first_time or 0.0)] if series else []

    def smoothed(name: str, label: str = "", colour: int = 0) -> list[Curve]:
        prefix = f"{label}, " if label else ""
        series = run.series.get(name)
        if series is None or len(series.steps) < 20:
            return curve(name, label or "each step", colour)
        average = Series(name, series.unit, series.steps, smooth(series.values), series.times)
        line = Curve(f"{prefix}smoothed", average, colour, "line", run.tokens, run.first_time or 0.0)
        return [*curve(name, f"{prefix}each step", colour, "faint"), line]

    references = [
        Reference(name, value)
        for name in ("bz2", "xz")
        if (value := run.last(f"baseline/{name}_bits_per_byte")) is not None
    ]
    bits = curve("val/bits_per_byte", "validation", 1, "points")
    charts = [
        Chart(
            "Loss",
            "nats/token",
            smoothed("train/loss", "train") + curve("val/loss", "validation", 1, "points"),
            wide=True,
            log=True,
            marks=_rollback_marks(run),
        ),
        Chart("Validation against compressors", "bits/byte", bits, references=references if bits else []),
        Chart("Learning rate", "", curve("train/lr", "learning rate"), zero=True),
        Chart("Gradient norm", "", smoothed("train/grad_norm"), *_clipping(run)),
        Chart("Throughput", "tokens/s", smoothed("train/tokens_per_second"), zero=True),
        Chart("Model FLOPs utilisation", "%", [_scaled(c, 100.0) for c in smoothed("train/mfu")], zero=True),
        Chart(
            "Memory",
            "GiB",
            [
                _scaled(c, 1 / 1024**3)
                for c in curve("memory/resident", "resident")
                + curve("memory/peak", "peak", 1)
                + curve("memory/cuda_allocated", "GPU, allocated", 2)
                + curve("memory/cuda_peak", "GPU, peak", 3)
            ],
            zero=True,
        ),
    ]
    saves = curve("checkpoint/stall_seconds", "training stood still") + curve(
        "checkpoint/write_seconds", "written in", 1
    )
    if any(len(each.series.steps) > 2 for each in saves):
        charts.append(Chart("Time of saves", "s", saves, zero=True))
    shown = {"val/perplexity", *(curve.series.name for chart in charts for curve in chart.curves)}
    for name, series in sorted(run.series.items()):
        # Whatever else was measured often enough to have a shape.
        if name not in shown and len(series.steps) > 2 and not name.startswith(_NOT_CHARTED):
            charts.append(Chart(name, series.unit, curve(name, name)))
    return [chart for chart in charts if chart.curves]


def _rollback_marks(run: Run) -> list[Mark]:
    """Where the run went on after going back, with the loss that it left there."""
    marks = []
    for event in run.events_named("rollback"):
        fields = event_fields(event)
        label = f"rollback: from step {event.step:,} back to {fields.get('good')}"
        seconds = max(0.0, event.time - (run.first_time or event.time))
        if isinstance(fields.get("good"), int):
            marks.append(Mark(label, fields["good"], seconds))
    return marks


def comparison_charts(labels: Sequence[str], runs: Sequence[Run]) -> list[Chart]:
    """The same quantities of several runs laid over each other, one colour a run."""

    def chart(
        title: str,
        unit: str,
        name: str,
        *,
        average: bool = False,
        role: Role = "line",
        scale: float = 1.0,
        **options: Any,
    ) -> Chart:
        curves = []
        for colour, (label, run) in enumerate(zip(labels, runs, strict=True)):
            if (series := run.series.get(name)) is None:
                continue
            values = smooth(series.values) if average else series.values
            shown = Series(name, series.unit, series.steps, [scale * value for value in values], series.times)
            curves.append(Curve(label, shown, colour, role, run.tokens, run.first_time or 0.0))
        return Chart(title, unit, curves, **options)

    charts = [
        chart("Training loss, smoothed", "nats/token", "train/loss", average=True, wide=True, log=True),
        chart("Validation loss", "nats/token", "val/loss", role="points"),
        chart("Validation bits per byte", "bits/byte", "val/bits_per_byte", role="points"),
        chart("Gradient norm, smoothed", "", "train/grad_norm", average=True),
        chart("Learning rate", "", "train/lr", zero=True),
        chart("Throughput, smoothed", "tokens/s", "train/tokens_per_second", average=True, zero=True),
        chart("Model FLOPs utilisation, smoothed", "%", "train/mfu", average=True, scale=100.0, zero=True),
    ]
    return [item for item in charts if item.curves]


def spread(items: Sequence[int], count: int) -> list[int]:
    """At most `count` of the items, evenly spread, first and last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _scaled(curve: Curve, factor: float) -> Curve:
    s = curve.series
    scaled = Series(s.name, s.unit, s.steps, [factor * value for value in s.values], s.times)
    return Curve(curve.label, scaled, curve.colour, curve.role, curve.tokens, curve.start)


def _clipping(run: Run) -> tuple[str, list[Reference]]:
    """How often the norm was clipped, and the line it was clipped at if any step reached it."""
    limit = run.setting("train.grad_clip")
    series = run.series.get("train/grad_norm")
    if not isinstance(limit, (int, float)) or not series:
        return "", []
    over = sum(1 for value in series.values if not value <= limit)
    note = f"{numbers.percent(over / len(series.values))} of the steps were above the limit of {limit:g}."
    return note, [Reference("clipped at", float(limit))] if over else []


def _cell(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if abs(value) < 1000 or not math.isfinite(value) else f"{value:,.0f}"
