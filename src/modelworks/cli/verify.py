"""`modelworks verify`: whether the run's layout computes what one process computes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from modelworks.cli.exit_codes import FAILED
from modelworks.cli.output import JsonFlag, Output, write_error
from modelworks.config import UserError, load_run_config
from modelworks.layout import Layout

if TYPE_CHECKING:
    from modelworks.verify import Verdict


def command(
    config: Annotated[Path, typer.Argument(help="A run description (YAML).", metavar="CONFIG")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value changes.", metavar="KEY=VALUE")] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, max=100, help="Optimiser steps to compare.")] = 3,
    precision: Annotated[
        str, typer.Option("--precision", help="float64: proof. bf16: the run's own precision, by statistics.")
    ] = "float64",
    json: JsonFlag = False,
) -> None:
    """Prove on this machine's CPU that a layout computes what one process does.

    The model is made small, keeping what the layout depends on, and run split and whole from the same seed: loss, every
    gradient, the gradient norm and the updated weights must agree. Exit code 1 where they do not.

    Example:
    modelworks verify configs/quickstart.yaml parallel.tp=2 parallel.dp_shard=2 parallel.zero=3
    """
    if precision not in ("float64", "bf16"):
        raise UserError(f"--precision: got `{precision}`, expected float64 or bf16")
    run, output = load_run_config(config, overrides or []), Output(json=json)
    from modelworks.parallel import RankFailed
    from modelworks.verify import verify

    ranks = Layout.of(run.parallel).world_size
    with tempfile.TemporaryDirectory(prefix="modelworks-verify-") as directory:
        try:
            with output.console.status(f"comparing {ranks} ranks with one process", spinner="line"):
                verdict = verify(run, steps=steps, precision=precision, directory=Path(directory))  # type: ignore[arg-type]
        except RankFailed as error:
            write_error(str(error), FAILED, json=json)
            raise typer.Exit(FAILED) from None
    _print(verdict, output)
    output.result(verdict.to_json())
    if not verdict.equal:
        raise typer.Exit(FAILED)


def _print(verdict: Verdict, output: Output) -> None:
    from rich.table import Table

    found = verdict.comparison
    output.print(f"made small: {verdict.shrunk}")
    unit = "relative error" if verdict.precision == "float64" else "error, against one process and float64"
    table = Table("quantity", unit, "bound", "", box=None, pad_edge=False)
    for quantity, error in found.errors.items():
        table.add_row(
            quantity,
            f"{error:.2e}",
            f"{found.bounds[quantity]:g}",
            "" if error <= found.bounds[quantity] else "differs",
        )
    output.console.print(table)
    for suspect in found.suspects:
        output.print(f"suspect: {suspect}")
    worst = f", worst parameter {found.worst_parameter}" if found.worst_parameter else ""
    said = "equal" if verdict.equal else "DIFFERENT"
    ranks = "1 rank" if verdict.ranks == 1 else f"{verdict.ranks} ranks"
    output.print(
        f"{said}: {ranks} and one process, {verdict.steps} steps in {verdict.precision}{worst} "
        f"({verdict.seconds:.0f} s)"
    )
