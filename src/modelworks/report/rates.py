"""A search for a learning rate: loss against rate, from the records that it left (`tune/…`).

tune/loss, tune/train_loss, tune/curve   figures of a trial, tags rate and seed
tune/diverged, tune/failed               events: why a trial gave no loss, the same tags
tune/proposal                            event, JSON: what the search says in the end
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from modelworks.records import Record, read_records
from modelworks.report import numbers
from modelworks.report.charts import Chart, Curve
from modelworks.report.page import chart_items, write_page
from modelworks.report.plan_charts import LogAxis
from modelworks.report.run_data import Series
from modelworks.report.split import WIDTH

_HEIGHT = 340
_LEFT, _BELOW, _ABOVE = 64, 34, 30  # room for labels, and for the rates that diverged
_TICKS = 5
_CURVES = 14  # that are told apart


def write_rates(records: Path, path: Path, *, name: str) -> Path:
    """Write the page of a search. records: its `records.jsonl`. name: of the run. Returns `path`. Raises OSError."""
    rows = list(read_records(records))
    proposal = read_proposal(rows)
    return write_page(
        path,
        "rates.html",
        title=f"{name} · learning rate",
        subtitle=_subtitle(rows, proposal),
        tiles=_tiles(proposal),
        drawing=rate_drawing(rows),
        curves=chart_items(_curves(rows)),
        remarks=proposal.get("remarks", []),
        warnings=proposal.get("warnings", []),
        head=["rate", "seed", "validation loss", "training loss", "steps", ""],
        rows=_trial_rows(rows),
    )


def read_proposal(records: Iterable[Record]) -> dict[str, Any]:
    """What the search said in the end; empty where it said nothing that can be read."""
    for record in records:
        if record.name == "tune/proposal":
            try:
                proposal = json.loads(str(record.value))
            except ValueError:
                return {}
            return proposal if isinstance(proposal, dict) else {}
    return {}


def rate_drawing(records: Sequence[Record]) -> dict[str, Any] | None:
    """Loss against rate as numbers for `rate_plot.html`; None without a single loss."""
    losses = _by_rate(records, "tune/loss")
    diverged = sorted(_by_rate(records, "tune/diverged"))
    if not losses:
        return None
    proposal = read_proposal(records)
    best = (proposal.get("best") or {}).get("rate")
    means = {rate: statistics.fmean(values) for rate, values in sorted(losses.items())}
    across = LogAxis([*means, *diverged], _LEFT, WIDTH - 8)
    # Rates that learn nothing would press the others together: they are drawn at the upper edge.
    low, middle, high = min(means.values()), statistics.median(means.values()), max(max(v) for v in losses.values())
    high = min(high, low + 4 * max(middle - low, 1e-3)) + 0.02 * max(high - low, 1e-3)
    low -= 0.04 * (high - low)

    def up(loss: float) -> float:
        share = (min(loss, high) - low) / (high - low)
        return round(_HEIGHT - _BELOW - share * (_HEIGHT - _BELOW - _ABOVE), 1)

    line = " ".join(f"{across.at(rate)},{up(mean)}" for rate, mean in means.items())
    stable = proposal.get("largest_stable")
    return {
        "width": WIDTH,
        "height": _HEIGHT,
        "left": _LEFT,
        "bottom": _HEIGHT - _BELOW,
        "line": line,
        "dots": [
            {"x": across.at(rate), "y": up(loss), "title": f"rate {rate:g}: {loss:.4f}", "high": loss > high}
            for rate, values in losses.items()
            for loss in values
        ],
        "means": [
            {"x": across.at(rate), "y": up(mean), "title": f"rate {rate:g}: mean {mean:.4f}", "best": rate == best}
            for rate, mean in means.items()
        ],
        "diverged": [{"x": across.at(rate), "title": f"rate {rate:g} diverged"} for rate in diverged],
        "stable": across.at(stable) if stable else None,
        "x_ticks": [{"at": across.at(value), "text": f"{value:g}"} for value in across.ticks()],
        "y_ticks": [
            {"at": up(value), "text": f"{value:.3g}" if high - low > 0.5 else f"{value:.4g}"}
            for value in (low + place * (high - low) / _TICKS for place in range(1, _TICKS + 1))
        ],
    }


def _by_rate(records: Iterable[Record], name: str) -> dict[float, list[float]]:
    """Rate -> values of the trials, in the order of their records; of events, as many zeros as there are."""
    found: dict[float, list[float]] = {}
    for record in records:
        rate = _rate(record)
        if record.name == name and rate is not None:
            value = record.value if isinstance(record.value, (int, float)) else 0.0
            if math.isfinite(value):
                found.setdefault(rate, []).append(float(value))
    return found


def _rate(record: Record) -> float | None:
    try:
        rate = float(record.tags.get("rate", "nan"))
    except ValueError:
        return None
    return rate if 0 < rate < math.inf else None


def _curves(records: Sequence[Record]) -> list[Chart]:
    """Training losses of each rate's first seed."""
    curves: dict[float, Series] = {}
    first_seed: dict[float, str | int] = {}
    for record in records:
        rate = _rate(record)
        if record.name != "tune/curve" or rate is None or not isinstance(record.value, (int, float)):
            continue
        if first_seed.setdefault(rate, record.tags.get("seed", 0)) != record.tags.get("seed", 0):
            continue
        series = curves.setdefault(rate, Series("tune/curve", "nats/token"))
        series.steps.append(record.step)
        series.values.append(float(record.value))
        series.times.append(record.time)
    shown = sorted(curves.items())[:_CURVES]
    note = "One seed of each rate, averaged over spans of steps; what ends early diverged."
    lines = [Curve(f"{rate:g}", series, colour) for colour, (rate, series) in enumerate(shown)]
    return [Chart("Training loss of the trials", "nats/token", lines, note, wide=True, log=True)] if lines else []


def _tiles(proposal: dict[str, Any]) -> list[dict[str, str]]:
    best, stable = proposal.get("best"), proposal.get("largest_stable")
    tiles = []
    if best:
        error = best.get("standard_error")
        spread = f" ± {error:.2g}" if error else ""
        tiles.append(("best rate", f"{best['rate']:g}", f"validation loss {best['loss']:.4f}{spread} nats/token"))
    if stable:
        diverges = proposal.get("diverges")
        tiles.append(("largest stable", f"{stable:g}", f"{diverges:g} diverged" if diverges else "none diverged"))
    if proposal.get("steps"):
        tiles.append(("a trial", f"{proposal['steps']:,} steps", f"of the run's {proposal['whole_steps']:,}"))
    if proposal.get("tokens"):
        tiles.append(("all trials", numbers.count(proposal["tokens"]), "tokens trained on"))
    return [{"label": label, "value": value, "detail": detail} for label, value, detail in tiles]


def _subtitle(records: Sequence[Record], proposal: dict[str, Any]) -> str:
    trials = {(_rate(record), record.tags.get("seed")) for record in records if _rate(record) is not None}
    parts = [f"{len(trials)} trials at {len({rate for rate, _ in trials})} rates"]
    if proposal.get("optimizer"):
        parts.append(str(proposal["optimizer"]))
    return " · ".join(parts)


def _trial_rows(records: Sequence[Record]) -> list[list[str]]:
    rows: dict[tuple[float, str], list[str]] = {}
    for record in records:
        rate = _rate(record)
        if rate is None or record.name == "tune/curve":
            continue
        seed = str(record.tags.get("seed", ""))
        row = rows.setdefault((rate, seed), [f"{rate:g}", seed, "", "", f"{record.step:,}", ""])
        if record.name == "tune/loss":
            row[2] = f"{record.value:.4f}"
        elif record.name == "tune/train_loss":
            row[3] = f"{record.value:.4f}"
        elif record.name in ("tune/diverged", "tune/failed"):
            row[5] = f"{record.name.removeprefix('tune/')}: {record.value}"
    return [row for _, row in sorted(rows.items())]
