"""A run's gradient noise scale on one page: over its steps, beside its batch, and what other batches would cost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelworks.report import numbers
from modelworks.report.charts import Chart, Curve, Reference
from modelworks.report.page import chart_items, write_page
from modelworks.report.run_data import Run, read_run


def write_noise(run_dir: Path, path: Path, figures: Mapping[str, Any]) -> Path:
    """Write the page of a run; returns `path`. figures: what `modelworks tune batch --json` says. Raises OSError."""
    run = read_run(run_dir)
    return write_page(
        path,
        "noise.html",
        title=f"{run.name} · batch size",
        tiles=_tiles(figures),
        caution=figures["caution"],
        curves=chart_items(_charts(run, figures)),
        with_tokens=run.tokens,
        batches_head=["batch, sequences", "tokens", "steps / fewest", "tokens / fewest", ""],
        batches=[_choice(row, own=row["batch"] == figures["batch"]) for row in figures["choices"]],
        stretches_head=["steps", "noise scale, sequences", "tokens"],
        stretches=[_stretch(row, figures["seq_len"]) for row in figures["stretches"]],
    )


def _tiles(figures: Mapping[str, Any]) -> list[dict[str, str]]:
    tiles = [
        (
            "critical batch",
            numbers.count(figures["critical_batch"]),
            f"sequences, {numbers.count(figures['critical_batch_tokens'])} tokens",
        ),
        ("this run's batch", numbers.count(figures["batch"]), "sequences"),
        ("its steps", f"{figures['steps_factor']:.2f} x", "the fewest that any batch needs"),
        ("its tokens", f"{figures['examples_factor']:.2f} x", "the fewest that any batch needs"),
    ]
    return [{"label": label, "value": value, "detail": detail} for label, value, detail in tiles]


def _charts(run: Run, figures: Mapping[str, Any]) -> list[Chart]:
    series = run.series.get("noise/scale")
    if series is None:
        return []
    curve = Curve("noise scale, averaged", series, tokens=run.tokens, start=run.first_time or 0.0)
    own = Reference("this run's batch", float(figures["batch"]))
    note = "Above the batch's line more sequences a step would be used well; below it they would be wasted."
    return [Chart("Gradient noise scale", "sequences", [curve], note, [own], log=True, wide=True)]


def _choice(row: Mapping[str, Any], *, own: bool) -> list[str]:
    return [
        f"{row['batch']:,}",
        numbers.count(row["tokens"]),
        f"{row['steps_factor']:.2f}",
        f"{row['examples_factor']:.2f}",
        "this run" if own else "",
    ]


def _stretch(row: Mapping[str, Any], seq_len: int) -> list[str]:
    steps, scale = f"{row['first']:,} to {row['last']:,}", row["sequences"]
    return [steps, "hidden by noise", ""] if scale is None else [steps, f"{scale:.4g}", numbers.count(scale * seq_len)]
