"""`modelworks tune batch`: from a run's own gradients, the batch beyond which more is waste."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelworks.cli.output import JsonFlag, Output
from modelworks.cli.run_figures import find_run
from modelworks.cli.runs import RunName, RunsDirectory
from modelworks.config import UserError, format_count

if TYPE_CHECKING:
    from modelworks.tune import CriticalBatch

LIMITS = (
    "a proxy (B_simple of McCandlish et al. 2018): right to a factor of two or three, and it grows as the loss falls; "
    "short runs at two batches settle it"
)


def batch(
    run: RunName,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a page with the noise over the run.")] = None,
    runs_dir: RunsDirectory = Path("runs"),
    json: JsonFlag = False,
) -> None:
    """Tell the batch beyond which more is waste, from the gradient noise that a run has recorded.

    With batches of the noise scale (the critical batch) a loss takes twice the fewest steps and twice the fewest
    tokens. A smaller batch saves tokens, a larger one steps, each at the other's cost.

    Example:
    modelworks tune batch my-run
    modelworks tune batch my-run --html batch.html
    """
    from modelworks.tune import read_critical_batch

    output = Output(json=json)
    directory = find_run(run, runs_dir)
    found = read_critical_batch(directory)
    figures = _as_json(found)
    _print(found, output)
    if html is not None:
        from modelworks.report import write_noise

        try:
            write_noise(directory, html, figures)
        except OSError as error:
            raise UserError(f"--html: {html} cannot be written ({error.strerror or error})") from None
        output.print(f"page: {html}")
    output.result({**figures, "html": str(html) if html else None})


def _print(found: CriticalBatch, output: Output) -> None:
    from rich.table import Table

    table = Table("steps", "noise scale", "tokens", box=None, pad_edge=False)
    for part in found.stretches:
        scale = part.sequences
        figures = ("hidden by noise", "") if scale is None else (f"{scale:.4g}", format_count(scale * found.seq_len))
        table.add_row(f"{part.first:,} to {part.last:,}", *figures)
    output.console.print(table)
    table = Table("batch", "tokens", "steps / fewest", "tokens / fewest", box=None, pad_edge=False)
    for row in _choices(found):
        own = " (this run)" if row["batch"] == found.batch else ""
        table.add_row(
            f"{row['batch']:,}{own}",
            format_count(row["tokens"]),
            f"{row['steps_factor']:.2f}",
            f"{row['examples_factor']:.2f}",
        )
    output.console.print(table)
    output.print(
        f"critical batch: {found.noise_scale:.3g} sequences, {format_count(found.noise_scale * found.seq_len)} tokens "
        "(noise scale over the later half); beyond it more is waste: twice as much saves a quarter of the steps and "
        "costs half as many tokens again"
    )
    output.print(LIMITS)


def _choices(found: CriticalBatch) -> list[dict[str, Any]]:
    from modelworks.tune import examples_factor, steps_factor

    return [
        {
            "batch": rows,
            "tokens": rows * found.seq_len,
            "steps_factor": steps_factor(rows, found.noise_scale),
            "examples_factor": examples_factor(rows, found.noise_scale),
        }
        for rows in found.choices()
    ]


def _as_json(found: CriticalBatch) -> dict[str, Any]:
    return {
        "noise_scale": found.noise_scale,
        "critical_batch": found.noise_scale,
        "critical_batch_tokens": found.noise_scale * found.seq_len,
        "batch": found.batch,
        "seq_len": found.seq_len,
        "steps_factor": found.steps_factor,
        "examples_factor": found.examples_factor,
        "measured_steps": found.n_measured,
        "stretches": [vars(part) for part in found.stretches],
        "choices": _choices(found),
        "caution": LIMITS,
    }
