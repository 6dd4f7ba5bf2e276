"""The report of one run: what came of it, how it went, what was decided, what it wrote.

Read from the run's directory alone, so that a copied or archived run still explains itself. The names of records
that have a place of their own on the page:

    train/* val/* memory/*            curves                 sample   {prompt, text}
    baseline/{bz2,xz}_bits_per_byte   what to beat           decision {key, value, reason}
    predicted/X beside model/X or X   predicted, measured    environment {name: value}
    eval/<task>/<metric>              question sets          any other event: a line of the timeline
    predicted/flops_per_token, machine/peak_flops            the two sides of utilisation
    anything with tags, pipeline/*    how the run was split  (`split.py`)
    checkpoint/*                      what saving cost       (`saves.py`)
    spike, divergence, rollback, judgement, health/*, noise/*    the run's health       (`health.py`)
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from modelworks.records import Record
from modelworks.report import numbers
from modelworks.report.charts import run_charts, spread
from modelworks.report.health import HEALTH_EVENTS, health_section
from modelworks.report.page import chart_items, write_page
from modelworks.report.run_data import Run, event_fields, read_run
from modelworks.report.saves import saves_section
from modelworks.report.split import split_section

SAMPLE_LENGTH = 4000  # characters shown of one sample
SAMPLED_STEPS = 30
EVENTS = 200
# Events with a place of their own.
_ELSEWHERE = ("sample", "decision", "environment", "pipeline/timeline", *HEALTH_EVENTS)


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` and return its path. A run that is still going gets what there is.

    Raises FileNotFoundError if the directory does not exist.
    """
    run = read_run(run_dir)
    samples, samples_note = _samples(run)
    timeline, timeline_note = _timeline(run)
    return write_page(
        run_dir / "report.html",
        "run.html",
        title=f"{run.name} · training report",
        run=run,
        subtitle=_subtitle(run),
        verdict=_verdict(run),
        tiles=_tiles(run),
        curves=chart_items(run_charts(run)),
        samples=samples,
        samples_note=samples_note,
        tasks=_tasks(run),
        decisions=_decisions(run),
        predictions=_predictions(run),
        health=health_section(run),
        split=split_section(run),
        saves=saves_section(run),
        timeline=timeline,
        timeline_note=timeline_note,
        environment=_environment(run),
    )


def tokens(run: Run) -> float | None:
    """Tokens trained on: as the run reported them, else steps times the tokens of a step."""
    if isinstance(reported := run.summary.get("tokens"), (int, float)):
        return float(reported)
    return run.tokens.at(run.steps) if run.tokens else None


def typical(run: Run, name: str) -> float | None:
    """The median of a series without its first tenth, where a run warms up and compiles."""
    series = run.series.get(name)
    if series is None:
        return None
    finite = [value for value in series.values[len(series.values) // 10 :] if value == value]
    return statistics.median(finite) if finite else None


def _subtitle(run: Run) -> str:
    parameters = run.last("model/parameters") or _predicted(run, "predicted/parameters")
    parts = [str(run.setting("model.family") or "")]
    parts.append(f"{numbers.count(parameters)} parameters" if parameters else "")
    parts.append(f"{run.steps:,} steps")
    if signal := run.summary.get("stopped_by"):
        parts.append(f"stopped by {signal} {numbers.moment(run.last_time)}, to be resumed")
    elif run.finished:
        parts.append(f"finished {numbers.moment(run.last_time)}")
    else:
        parts.append(f"not finished; last heard of {numbers.moment(run.last_time)}" if run.last_time else "not started")
    return " · ".join(part for part in parts if part)


def _verdict(run: Run) -> dict[str, Any] | None:
    """The result beside what general compressors reach on the same text."""
    series = run.series.get("val/bits_per_byte")
    if series is None or (own := series.last) is None:
        return None
    baselines = {
        name: value for name in ("bz2", "xz") if (value := run.last(f"baseline/{name}_bits_per_byte")) is not None
    }
    rows = [("this model", own, True), *((name, value, False) for name, value in baselines.items())]
    longest = max(value for _, value, _ in rows)
    return {
        "figure": numbers.figure(own),
        "step": f"{series.steps[-1]:,}",
        "sentence": _judge(own, baselines),
        "bars": [
            {"label": label, "own": is_own, "width": round(100 * value / longest, 1), "figure": numbers.figure(value)}
            for label, value, is_own in rows
        ],
    }


def _judge(own: float, baselines: dict[str, float]) -> str:
    if not baselines:
        return "No compressor was measured on the same text, so there is nothing to hold this against."
    comparisons = [
        f"{numbers.percent(abs(1 - own / value), 0)} {'fewer' if own < value else 'more'} bits than {name}"
        for name, value in baselines.items()
    ]
    beaten = [name for name, value in baselines.items() if own < value]
    if len(beaten) == len(baselines):
        opinion = "The model predicts this text better than the compressors do"
    elif beaten:
        opinion = f"The model predicts this text better than {beaten[0]}, but not yet better than the other compressor"
    else:
        opinion = "The model does not beat the compressors on this text yet; a longer run should"
    return f"{opinion}: {' and '.join(comparisons)} on the same text."


def _tiles(run: Run) -> list[dict[str, str]]:
    def reported(key: str, name: str) -> float | None:
        value = run.summary.get(key)
        return float(value) if isinstance(value, (int, float)) else run.last(name)

    validation = reported("val_loss", "val/loss")
    perplexity = run.last("val/perplexity")
    best = run.series["val/loss"].best() if "val/loss" in run.series else None
    speed = run.summary.get("tokens_per_second") or typical(run, "train/tokens_per_second")
    utilisation = run.summary.get("mfu") or typical(run, "train/mfu")
    details = [f"perplexity {perplexity:.2f}" if perplexity else "", f"best at step {best[0]:,}" if best else ""]
    return [
        _tile("Validation loss", numbers.figure(validation), " · ".join(d for d in details if d) or "nats/token"),
        _tile("Training loss", numbers.figure(reported("train_loss", "train/loss")), "nats/token, last step"),
        _tile("Tokens", numbers.count(tokens(run)), _tokens_detail(run)),
        _tile("Time", numbers.duration(run.seconds)),
        _tile("Throughput", numbers.count(speed), "tokens/s"),
        _tile("Utilisation (MFU)", numbers.percent(utilisation), _utilisation_detail(run)),
    ]


def _tile(label: str, value: str, detail: str = "") -> dict[str, str]:
    return {"label": label, "value": value, "detail": detail if value != numbers.MISSING else ""}


def _tokens_detail(run: Run) -> str:
    if run.tokens is None:
        return ""
    least, most = run.tokens.of_step
    return f"{most:,} a step" if least == most else f"{least:,} to {most:,} a step"


def _utilisation_detail(run: Run) -> str:
    numerator = _predicted(run, "predicted/flops_per_token")
    denominator = run.last("machine/peak_flops")
    if numerator and denominator:
        top, below = numbers.quantity(numerator, "FLOP/token"), numbers.quantity(denominator, "FLOP/s")
        return f"tokens/s × {top} ÷ {below}"
    return "model FLOPs over peak FLOP/s"


def _samples(run: Run) -> tuple[list[dict[str, Any]], str]:
    """(samples by step, newest first; what was left out)."""
    by_step: dict[int, list[dict[str, str]]] = {}
    for event in run.events_named("sample"):
        if "undone" in event.tags:
            continue
        fields = event_fields(event)
        text = str(fields.get("text", ""))
        shown = text if len(text) <= SAMPLE_LENGTH else f"{text[:SAMPLE_LENGTH]} […]"
        by_step.setdefault(event.step, []).append({"prompt": str(fields.get("prompt", "")), "text": shown})
    steps = spread(sorted(by_step, reverse=True), SAMPLED_STEPS)
    note = f"{len(steps)} of {len(by_step)} steps with samples are shown." if len(steps) < len(by_step) else ""
    return [{"step": f"{step:,}", "texts": by_step[step]} for step in steps], note


def _tasks(run: Run) -> list[list[str]]:
    rows = []
    for name, series in sorted(run.series.items()):
        if name.startswith("eval/") and name.count("/") >= 2 and series.last is not None:
            _, task, metric = name.split("/", 2)
            rows.append([task, metric, f"{series.last:.4g}", f"{series.steps[-1]:,}"])
    return rows


def _decisions(run: Run) -> list[dict[str, str]]:
    latest: dict[str, dict[str, str]] = {}
    for event in run.events_named("decision"):
        fields = event_fields(event)
        key = str(fields.get("key", fields.get("text", "")))
        latest[key] = {"key": key, "value": str(fields.get("value", "")), "reason": str(fields.get("reason", ""))}
    return list(latest.values())


def _predictions(run: Run) -> list[list[str]]:
    rows = []
    for name, record in run.predicted.items():
        short = name.removeprefix("predicted/")
        measured = next((m for c in _measured_names(short) if (m := _measured(run, c)) is not None), None)
        predicted = float(record.value)
        ratio = f"{measured / predicted:.3f}" if measured is not None and predicted else ""
        shown = "" if measured is None else _exact(measured, record.unit)
        rows.append([short.replace("_", " "), _exact(predicted, record.unit), shown, ratio])
    return rows


def _measured(run: Run, name: str) -> float | None:
    """Of what every step measures, the typical step's; else the last."""
    return typical(run, name) if name.startswith("train/") else run.last(name)


def _measured_names(short: str) -> list[str]:
    """Where the measured twin of `predicted/memory_peak` may be: `model/memory_peak`, `memory/peak`, …"""
    if short == "memory_total":
        # What training added, on the device that it ran on.
        return ["memory/cuda_peak", "memory/training_peak"]
    if short == "tensor_memory":
        return ["memory/cuda_peak"]  # a process on a CPU holds much besides tensors
    return [f"model/{short}", short.replace("_", "/", 1), f"train/{short}"]


def _exact(value: float, unit: str) -> str:
    # Counts are compared digit by digit; everything else in the unit people read.
    exact = value == int(value) and abs(value) < 1e12 and unit in ("", "parameters")
    return f"{value:,.0f}" if exact else numbers.quantity(value, unit)


def _timeline(run: Run) -> tuple[list[dict[str, Any]], str]:
    shown = [event for event in run.events if event.name not in _ELSEWHERE]
    kept = shown[: EVENTS // 2] + shown[-(EVENTS // 2) :] if len(shown) > EVENTS else shown
    note = f"The first and last {EVENTS // 2} of {len(shown):,} events." if len(shown) > EVENTS else ""
    return [_timeline_row(run, event) for event in kept], note


def _timeline_row(run: Run, event: Record) -> dict[str, Any]:
    fields = event_fields(event)
    text = str(fields["text"]) if set(fields) == {"text"} else ", ".join(f"{k}: {v}" for k, v in fields.items())
    return {
        "step": f"{event.step:,}",
        "after": numbers.duration(max(0.0, event.time - (run.first_time or event.time))),
        "name": event.name,
        "text": f"{text} (undone by rollback {event.tags['undone']})" if "undone" in event.tags else text,
        "warning": event.name in ("warning", "error"),
    }


def _environment(run: Run) -> list[list[str]]:
    values: dict[str, Any] = {}
    for event in run.events_named("environment"):
        values.update(event_fields(event))
    return [[name.replace("_", " "), _plain(value, name)] for name, value in values.items() if value]


def _plain(value: Any, name: str) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key} {_plain(item, name)}".replace("_", " ") for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(_plain(item, name) for item in value)
    if isinstance(value, (int, float)) and "bytes" in name:
        return numbers.size(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _predicted(run: Run, name: str) -> float | None:
    record = run.predicted.get(name)
    return None if record is None else float(record.value)
