"""The health of a run: its spikes on a line of time with their documents, what was judged of its course, curves of what
was measured, a map of gradient norms by layer, and the search for its rate.

Read from the events `spike`, `outlier`, `rollback`, `divergence`, `judgement`, `health/layers` and `health/grad_norms`
and the figures `health/*` and `noise/*`, which docs/health.md lists; and from `tune-lr/records.jsonl` in the run's
directory.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from modelworks.records import Record, read_records
from modelworks.report import numbers
from modelworks.report.charts import Chart, Curve, Reference
from modelworks.report.page import chart_items
from modelworks.report.rates import rate_drawing
from modelworks.report.run_data import Run, event_fields

HEALTH_EVENTS = ("spike", "outlier", "divergence", "rollback", "judgement", "health/layers", "health/grad_norms")
SPIKES = 200  # rows of the table
COLUMNS, ROWS = 60, 128  # of the map, at most
WIDTH, MARGIN, CELL = 1000, 90, 16  # of the drawings, in their own units
ANSWERS = {
    "none": "recorded",
    "new level": "taken for a new level",
    "skip": "update left out",
    "clip": "left out, tighter clipping",
    "slow": "left out, tighter clipping, lower rate",
    "rollback": "back to an earlier step",
    "stop": "left out, run stopped",
}
AGAINST = {
    "none": "recorded",
    "clip": "tighter clipping",
    "slow": "tighter clipping, lower rate",
    "rollback": "back to before the rise, lower rate",
    "stop": "run stopped",
}
_NO_CURVES = ("health/straggler", "noise/trace", "noise/square")
_CURVES = {
    "health/clipped": "Share of steps clipped",
    "health/imbalance": "Slowest rank over the mean, less 1",
}


def health_section(run: Run) -> dict[str, Any] | None:
    """What the template shows; None where nothing was watched."""
    spikes, outliers = _once(run, "spike"), _once(run, "outlier")
    divergences = _once(run, "divergence")
    rollbacks, judgements = _once(run, "rollback"), _once(run, "judgement")
    layers = _layers(run)
    curves, rates = health_charts(run), _rates(run)
    if not any((spikes, outliers, divergences, rollbacks, judgements, layers, curves, rates)):
        return None
    return {
        "sentence": _sentence(spikes, divergences, rollbacks, judgements) + _aside(outliers),
        "line": _line(run, [*spikes, *outliers, *divergences, *rollbacks, *judgements]),
        "rollbacks": [_rollback(event) for event in rollbacks],
        "judgements": [_judgement(event) for event in judgements],
        "curves": chart_items(curves),
        "rates": rates,
        "spikes": [_row(event) for event in spikes[-SPIKES:]],
        "spikes_note": f"{len(spikes) - SPIKES:,} earlier ones are left out." if len(spikes) > SPIKES else "",
        "divergences": [_divergence(event) for event in divergences],
        "map": _map(layers),
        "layers": _latest(layers),
        "ranks": _ranks(run),
    }


def health_charts(run: Run) -> list[Chart]:
    """Of everything that was measured of the run's health often enough to have a shape; the noise scale first."""
    charts = []
    for name, series in sorted(run.series.items(), key=lambda row: (row[0] != "noise/scale", row[0])):
        if not name.startswith(("health/", "noise/")) or len(series.steps) < 3 or name in _NO_CURVES:
            continue
        curve = Curve(name, series, 0, "line", run.tokens, run.first_time or 0.0)
        if name != "noise/scale":
            title = _CURVES.get(name) or name.partition("/")[2].replace("_", " ").capitalize()
            charts.append(Chart(title, series.unit, [curve]))
            continue
        batch = run.setting("train.global_batch")
        reference = [Reference("this run's batch", float(batch))] if isinstance(batch, int) else []
        note = "The critical batch: far below it twice the batch saves half of the steps, far above it nearly none."
        charts.append(Chart("Gradient noise scale", series.unit, [curve], note, reference, log=True))
    return charts


def _rates(run: Run) -> dict[str, Any] | None:
    """Loss against rate, where a search was made for this run."""
    records = run.directory / "tune-lr" / "records.jsonl"
    return rate_drawing(list(read_records(records))) if records.is_file() else None


def _once(run: Run, name: str) -> list[Record]:
    """Events of that name, in order. Of one that was written again after a crash the last."""
    found: dict[tuple[Any, ...], Record] = {}
    for event in run.events_named(name):
        what = event_fields(event)
        found[event.step, event.tags.get("undone"), what.get("kind"), what.get("subject"), what.get("number")] = event
    return sorted(found.values(), key=lambda event: (int(event.tags.get("undone", 1 << 30)), event.step))


def _layers(run: Run) -> list[tuple[int, dict[str, Any]]]:
    """Of each step that is known, those between two that were measured with norms of gradients only."""
    measured, between = (
        [(event.step, event_fields(event)) for event in _once(run, name) if "undone" not in event.tags]
        for name in ("health/layers", "health/grad_norms")
    )
    measured = [(step, row) for step, row in measured if isinstance(row.get("layers"), list) and row.get("grad_norm")]
    if not measured:
        return []
    names = measured[-1][1]["layers"]
    named = [(step, {**row, "layers": names}) for step, row in between if len(row.get("grad_norm", [])) == len(names)]
    return sorted([*measured, *named], key=lambda row: row[0])


def _sentence(
    spikes: Sequence[Record],
    divergences: Sequence[Record],
    rollbacks: Sequence[Record],
    judgements: Sequence[Record],
) -> str:
    if not any((spikes, divergences, rollbacks, judgements)):
        return "No spike and no divergence."
    parts = []
    if spikes:
        skipped = sum(event_fields(event).get("answer") not in ("none", "new level") for event in spikes)
        parts.append(
            f"{len(spikes):,} {'spike' if len(spikes) == 1 else 'spikes'}, {skipped:,} of them answered by leaving the "
            "update out"
        )
    if divergences:
        parts.append(f"the loss was found to diverge at step {divergences[0].step:,}")
    if rollbacks:
        parts.append(f"the run went back {'once' if len(rollbacks) == 1 else f'{len(rollbacks):,} times'}")
    if judgements:
        kinds = dict.fromkeys(str(event_fields(event).get("kind")) for event in judgements)
        parts.append(f"it was judged: {', '.join(kinds)}")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _aside(outliers: Sequence[Record]) -> str:
    """What is worth telling and is no trouble."""
    if not outliers:
        return ""
    many = "step" if len(outliers) == 1 else "steps"
    return f" {len(outliers):,} {many} had a gradient norm far above the usual and no other sign of trouble."


def _divergence(event: Record) -> list[str]:
    fields = event_fields(event)
    answer = str(fields.get("answer", "none"))
    return [f"{event.step:,}", str(fields.get("text", "")), AGAINST.get(answer, answer)]


def _rollback(event: Record) -> list[str]:
    fields = event_fields(event)
    return [f"{event.step:,}", str(fields.get("good", "")), str(fields.get("from", "")), _span(fields.get("samples"))]


def _judgement(event: Record) -> list[str]:
    fields = event_fields(event)
    evidence = fields.get("evidence")
    shown = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in (evidence or {}).items())
    undone = " (undone)" if "undone" in event.tags else ""
    return [f"{event.step:,}", f"{fields.get('kind', '')}{undone}", str(fields.get("text", "")), shown]


def _line(run: Run, events: Sequence[Record]) -> dict[str, Any] | None:
    """Marks at the steps of events, those of spikes tall."""
    if not events:
        return None
    last = max([run.steps, *(event.step for event in events)])
    marks = []
    for event in events:
        fields = event_fields(event)
        text = str(fields.get("reason") or fields.get("text") or f"{event.name}, to {fields.get('good')}")
        x = round(event.step / max(1, last) * WIDTH, 1)
        marks.append(
            {"x": min(x, WIDTH - 3), "bad": event.name == "spike", "title": f"step {event.step:,}: {text}"},
        )
    return {"marks": marks, "width": WIDTH, "last": f"{last:,}"}


def _row(event: Record) -> list[str]:
    fields = event_fields(event)
    answer = str(fields.get("answer", ""))
    return [
        f"{event.step:,}",
        str(fields.get("reason", "")),
        ANSWERS.get(answer, answer) + (" (undone)" if "undone" in event.tags else ""),
        _span(fields.get("highest_loss") or fields.get("samples")),
        _documents(fields),
    ]


def _span(samples: Any) -> str:
    return f"{samples[0]:,} to {samples[1]:,}" if isinstance(samples, list) and len(samples) == 2 else numbers.MISSING


def _documents(fields: Mapping[str, Any]) -> str:
    """Those of the samples with the highest loss, else of all."""
    rows, suspects = fields.get("documents"), fields.get("highest_loss")
    if not isinstance(rows, list):
        return numbers.MISSING
    if isinstance(suspects, list):
        rows = [row for row in rows if suspects[0] <= row["sample"] <= suspects[1]]
    by_source: dict[str, list[str]] = defaultdict(list)
    for row in rows[:8]:
        first, last = row["documents"]
        by_source[row["source"]].append(f"{first:,}" if first == last else f"{first:,}-{last:,}")
    left = len(rows) - 8
    text = "; ".join(f"{source} {', '.join(spans)}" for source, spans in by_source.items())
    return f"{text} and {left:,} more rows" if left > 0 else text


def _map(layers: Sequence[tuple[int, dict[str, Any]]]) -> dict[str, Any] | None:
    """Boxes, one for a layer and a span of steps: the largest gradient norm there, its logarithm as strength."""
    if len(layers) < 2:
        return None
    names = layers[-1][1]["layers"][:ROWS]
    count = min(COLUMNS, len(layers))
    columns = [layers[i * len(layers) // count : (i + 1) * len(layers) // count] for i in range(count)]
    values: dict[tuple[int, int], float] = {}
    for x, rows in enumerate(columns):
        for y, name in enumerate(names):
            found = [norm for _, row in rows if (norm := _norm(row, name)) is not None]
            if found:
                values[x, y] = max(found)
    logs = {key: math.log(value) for key, value in values.items() if value > 0 and math.isfinite(value)}
    if not logs:
        return None
    low, high = min(logs.values()), max(logs.values())
    width = (WIDTH - MARGIN) / count
    boxes = []
    for (x, y), value in values.items():
        steps = [step for step, _ in columns[x]]
        span = f"step {steps[0]:,}" if len(steps) == 1 else f"steps {steps[0]:,} to {steps[-1]:,}"
        logarithm = logs.get((x, y))
        strength = 0.0 if logarithm is None else (logarithm - low) / (high - low) if high > low else 0.5
        boxes.append(
            {
                "x": round(MARGIN + x * width, 2),
                "y": y * CELL,
                "width": round(width, 2),
                "strength": round(0.04 + 0.96 * strength, 3),
                "bad": not math.isfinite(value),
                "title": f"{names[y]}, {span}: {value:.3g}",
            }
        )
    return {
        "boxes": boxes,
        "names": [{"text": name, "y": y * CELL + 0.75 * CELL} for y, name in enumerate(names)],
        "cell": CELL,
        "width": WIDTH,
        "height": len(names) * CELL,
        "low": f"{math.exp(low):.3g}",
        "high": f"{math.exp(high):.3g}",
        "first": f"{layers[0][0]:,}",
        "last": f"{layers[-1][0]:,}",
    }


def _norm(row: Mapping[str, Any], name: str) -> float | None:
    if name not in row["layers"]:
        return None
    return float(row["grad_norm"][row["layers"].index(name)])


def _latest(layers: Sequence[tuple[int, dict[str, Any]]]) -> dict[str, Any] | None:
    """Table of the last step with an update: what a layer holds and how far it moves."""
    complete = [(step, row) for step, row in layers if "update_ratio" in row]
    if not complete:
        return None
    step, row = complete[-1]
    columns = zip(row["layers"], row["grad_norm"], row["weight_norm"], row["update_ratio"], strict=True)
    return {
        "step": f"{step:,}",
        "rows": [[name, *(f"{float(value):.3g}" for value in values)] for name, *values in columns],
    }


def _ranks(run: Run) -> str:
    """Who the others waited for, in a sentence; empty for one process."""
    stragglers, imbalance = run.series.get("health/straggler"), run.series.get("health/imbalance")
    if stragglers is None or imbalance is None or not stragglers.values:
        return ""
    rank = statistics.mode(stragglers.values)
    share = sum(value == rank for value in stragglers.values) / len(stragglers.values)
    return (
        f"Rank {rank:.0f} was the slowest in {numbers.percent(share, 0)} of the measured intervals; the slowest was "
        f"busy {numbers.percent(statistics.median(imbalance.values), 0)} longer than the ranks' mean (median)."
    )
