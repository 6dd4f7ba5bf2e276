"""`modelworks tune coordinates`: whether activations keep their size as the width grows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelworks.cli.html_option import check_writable
from modelworks.cli.output import JsonFlag, Output
from modelworks.config import RunConfig, UserError, load_run_config, parse_count

if TYPE_CHECKING:
    from modelworks.tune import CoordinateCheck

ROWS = 16  # of a batch: sizes of activations need no more


def coordinates(
    config: Annotated[Path, typer.Argument(help="A run description (YAML).", metavar="CONFIG")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value changes.", metavar="[KEY=VALUE]")] = None,
    widths: Annotated[
        str | None, typer.Option("--widths", help="Values of d_model: 64,128,256. Default: from the base up.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", help="Optimiser steps at each width.", min=1, max=1000)] = 4,
    rows: Annotated[int | None, typer.Option("--rows", help="Sequences of a step.", min=1)] = None,
    seeds: Annotated[int, typer.Option("--seeds", help="Initialisations of each width.", min=1, max=100)] = 3,
    tolerance: Annotated[
        float, typer.Option("--tolerance", help="Exponent of the width that is still none.", min=0.0)
    ] = 0.3,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a page with charts to this file.")] = None,
    json: JsonFlag = False,
) -> None:
    """Check how the size of activations, and what training changes of them, goes with the width.

    Trains the run's model for a few steps at several widths, on its own data. Under µP (model.mup_base_width) nothing
    should grow or vanish; in the standard parametrisation most does. That it passes does not prove that a rate carries
    over.

    Example:
    modelworks tune coordinates configs/mup.yaml --widths 64,128,256 --html coordinates.html
    """
    run = load_run_config(config, overrides or [])
    chosen = _widths(widths, run)
    if html is not None:
        check_writable(html, "coordinates.html")
    from rich.progress import Progress

    from modelworks.data import TrainLoader, build_dataset
    from modelworks.tune import at_width, check_coordinates

    for width in chosen:  # before the data is read
        at_width(run.model, width)
    output = Output(json=json)
    dataset = build_dataset(run.data, progress=not output.console.quiet)
    dataset.require_vocabulary(run.model.vocab_size)
    batch = rows or min(run.train.global_batch, ROWS)
    rate = {"lr": run.peak_rate.lr, "lr_scaling": "none", "base_batch": None}  # of the run's own batch
    run = run.model_copy(
        update={
            "optimizer": run.optimizer.model_copy(update=rate),
            "train": run.train.model_copy(update={"global_batch": batch, "micro_batch": batch}),
        }
    )
    loader = TrainLoader(dataset, run.data, run.seed, batch)
    with Progress(console=output.console, transient=True) as progress:
        task = progress.add_task("training", total=sum(width**2 for width in chosen))
        found = check_coordinates(
            run,
            [loader.batch(step) for step in range(steps)],
            chosen,
            seeds=seeds,
            tolerance=tolerance,
            progress=lambda width: progress.advance(task, width**2),
        )
    answer = _as_json(found, run)
    _print(found, run, output)
    if html is not None:
        _write_page(html, answer)
        output.print(f"page: {html}")
    output.result(answer)


def _widths(text: str | None, run: RunConfig) -> list[int]:
    if text is None:
        base = run.model.mup_base_width
        if base is not None:
            return [base * times for times in (1, 2, 4)]
        raise UserError(
            "--widths: missing, as model.mup_base_width is not set; give values of d_model such as "
            f"{run.model.d_model},{2 * run.model.d_model} to check the standard parametrisation, or set the base"
        )
    try:
        found = [parse_count(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise UserError(f"--widths: got {text!r}, expected whole numbers above 0 such as 64,128,256")
    return found


def _print(found: CoordinateCheck, run: RunConfig, output: Output) -> None:
    from rich.table import Table

    few, many = found.widths[0], found.widths[-1]
    table = Table(
        "activation", f"size, width {few}", f"{many}", "~ width^", f"change, {few}", f"{many}", "~ width^", "",
        box=None, pad_edge=False,
    )  # fmt: skip
    for trend in found.trends:
        first, *_, last = found.of(trend.name)
        table.add_row(
            trend.name,
            f"{first.sizes[-1]:.3g}",
            f"{last.sizes[-1]:.3g}",
            f"{trend.size:+.2f}",
            f"{first.changes[-1]:.3g}",
            f"{last.changes[-1]:.3g}",
            f"{trend.change:+.2f}",
            trend.problem,
        )
    output.console.print(table)
    base = run.model.mup_base_width
    kind = "the standard parametrisation" if base is None else f"µP with base width {base}"
    if not found.problems:
        output.print(f"{kind}: nothing grows or vanishes with the width by more than a power of {found.tolerance:g}")
        output.print("this shows that the parametrisation is right, not that the best rate stays the best")
        return
    hint = "; a rate found at one width will not serve another: see model.mup_base_width" if base is None else ""
    output.print(f"{kind}: {len(found.problems)} of {len(found.trends)} activations depend on the width{hint}")


def _as_json(found: CoordinateCheck, run: RunConfig) -> dict[str, Any]:
    return {
        "passed": not found.problems,
        "base_width": run.model.mup_base_width,
        "optimizer": run.optimizer.name,
        "lr": run.optimizer.lr,
        "widths": list(found.widths),
        "steps": found.steps,
        "seeds": found.seeds,
        "rows": run.train.global_batch,
        "tolerance": found.tolerance,
        "trends": [
            {
                "name": trend.name,
                "size": _finite(trend.size),
                "change": _finite(trend.change),
                "problem": trend.problem,
            }
            for trend in found.trends
        ],
        "activations": {
            trend.name: [
                {"width": each.width, "sizes": list(each.sizes), "changes": list(each.changes)}
                for each in found.of(trend.name)
            ]
            for trend in found.trends
        },
    }


def _finite(exponent: float) -> float | None:
    return exponent if math.isfinite(exponent) else None


def _write_page(path: Path, answer: dict[str, Any]) -> None:
    from modelworks.report import write_coordinates

    try:
        write_coordinates(path, answer)
    except OSError as error:
        raise UserError(f"--html: {path} cannot be written ({error.strerror})") from error
