"""Several runs on one page: their curves laid over each other, their figures, where their configs differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modelworks.report import numbers
from modelworks.report.charts import comparison_charts
from modelworks.report.page import chart_items, write_page
from modelworks.report.run_data import Run, read_run
from modelworks.report.run_report import tokens, typical


def write_comparison(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write a page that compares runs to the file `out` and return it. Any number of runs, in the order given.

    Raises FileNotFoundError if a directory does not exist.
    """
    runs = [read_run(directory) for directory in run_dirs]
    labels = _labels(runs)
    return write_page(
        out,
        "comparison.html",
        title=f"{', '.join(labels)} · comparison",
        labels=labels,
        figures_head=["", *labels],
        figures=figures(runs),
        curves=chart_items(comparison_charts(labels, runs)),
        with_tokens=any(run.tokens for run in runs),
        differences=[[key, *values] for key, values in config_differences(runs)],
    )


def config_differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Dotted keys whose values are not the same in all runs, with each run's value as text (`–` where absent)."""
    flat = [_flatten(run.config) for run in runs]
    keys = dict.fromkeys(key for config in flat for key in config)
    rows = [(key, [config.get(key, numbers.MISSING) for config in flat]) for key in keys if key != "name"]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def figures(runs: Sequence[Run]) -> list[list[str]]:
    """Rows of a table: a figure's name, then its value for each run. The best of a row is marked."""
    val_bits = [run.last("val/bits_per_byte") for run in runs]
    val_loss = [run.last("val/loss") for run in runs]
    train_loss = [_number(run.summary.get("train_loss")) or run.last("train/loss") for run in runs]
    speed = [_number(run.summary.get("tokens_per_second")) or typical(run, "train/tokens_per_second") for run in runs]
    mfu = [_number(run.summary.get("mfu")) or typical(run, "train/mfu") for run in runs]
    parameters = [run.last("model/parameters") for run in runs]
    return [
        ["validation bits per byte", *_marked(val_bits, [numbers.figure(value) for value in val_bits], lowest=True)],
        ["validation loss, nats/token", *_marked(val_loss, [numbers.figure(value) for value in val_loss], lowest=True)],
        ["training loss, nats/token", *(numbers.figure(value) for value in train_loss)],
        ["tokens/s", *_marked(speed, [numbers.count(value) for value in speed], lowest=False)],
        ["model FLOPs utilisation", *(numbers.percent(value) for value in mfu)],
        ["parameters", *(numbers.count(value) for value in parameters)],
        ["tokens", *(numbers.count(tokens(run)) for run in runs)],
        ["steps", *(f"{run.steps:,}" for run in runs)],
        ["time", *(numbers.duration(run.seconds) for run in runs)],
        ["state", *("finished" if run.finished else "not finished" for run in runs)],
    ]


def _labels(runs: Sequence[Run]) -> list[str]:
    """Names of the runs; with their parent directory where two share a name."""
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    return [f"{run.directory.resolve().parent.name}/{run.name}" for run in runs]


def _marked(values: Sequence[float | None], texts: Sequence[str], *, lowest: bool) -> list[str]:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if len(finite) < 2 or min(finite) == max(finite):
        return list(texts)
    best = min(finite) if lowest else max(finite)
    return [f"★ {text}" if value == best else text for value, text in zip(values, texts, strict=True)]


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            flat.update(_flatten(value, f"{path}."))
        else:
            flat[path] = "null" if value is None else str(value)
    return flat


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
