"""`modelworks runs`: what was trained, with its figures; two runs side by side."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from modelworks.cli.output import JsonFlag, Output
from modelworks.cli.run_figures import FIGURES, RunFigures, Told, all_runs, find_run, health_told, read_figures
from modelworks.config import UserError, count_parameters, differences, format_count, show_value

RunsDirectory = Annotated[Path, typer.Option("--runs-dir", help="Where runs are kept.")]
RunName = Annotated[str, typer.Argument(help="A run's name, or its directory.", metavar="RUN")]
RunNames = Annotated[list[str], typer.Argument(help="Runs' names, or their directories.", metavar="RUN...")]


def list_runs(runs_dir: RunsDirectory = Path("runs"), json: JsonFlag = False) -> None:
    """List the runs, the latest last, with their figures.

    Example:
    modelworks runs ls
    modelworks runs ls --json | tail -1
    """
    output = Output(json=json)
    if not runs_dir.is_dir() and (runs_dir.exists() or runs_dir != Path("runs")):
        raise UserError(f"--runs-dir: {runs_dir} is {'not a directory' if runs_dir.exists() else 'not there'}")
    runs = [read_figures(path) for path in all_runs(runs_dir)]
    if runs:
        output.console.print(_table([_headings(), *map(_row, runs)]))
    else:
        output.print(f"no runs in {runs_dir}/ (start one: modelworks train configs/quickstart.yaml)")
    output.result({"runs": [_as_json(run) for run in runs]})


def show_run(run: RunName, runs_dir: RunsDirectory = Path("runs"), json: JsonFlag = False) -> None:
    """Show one run: its state, its figures, its files, and what was told of its health.

    Example:
    modelworks runs show my-run
    """
    output = Output(json=json)
    figures = read_figures(find_run(run, runs_dir))
    lines = [("run", str(figures.directory)), ("state", figures.state), ("model", _model(figures))]
    lines += [(name, _show(name, figures.values.get(name))) for name in FIGURES]
    lines += [(name, str(path)) for name, path in figures.files.items()]
    told = health_told(figures.directory)
    lines += [(each.kind, _in_words(each)) for each in told[-_TOLD:]]
    if len(told) > _TOLD:
        lines.append(("", f"and {len(told) - _TOLD:,} earlier ones, in the report"))
    for name, text in lines:
        output.print(f"{name:<20} {text}")
    output.result({**_as_json(figures), "health": [asdict(each) for each in told]})


def compare_runs(
    runs: RunNames,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a page that overlays the curves.")] = None,
    runs_dir: RunsDirectory = Path("runs"),
    json: JsonFlag = False,
) -> None:
    """Compare runs: figures side by side, and every configuration key that differs.

    Example:
    modelworks runs compare baseline wider
    modelworks runs compare baseline wider --html comparison.html
    """
    output = Output(json=json)
    directories = [find_run(name, runs_dir) for name in runs]
    if len(directories) < 2:
        raise UserError("runs compare: expected at least two runs")
    found = [read_figures(path) for path in directories]
    names = [run.name for run in found]
    rows = [[name, *(_show(name, run.values.get(name)) for run in found)] for name in FIGURES]
    output.console.print(_table([["", *names], *rows]))
    changed = _changed_keys(found)
    output.print()
    if changed:
        rows = [[key, *map(show_value, values)] for key, values in changed.items()]
        output.console.print(_table([["configuration", *names], *rows]))
    else:
        output.print("the configurations are the same")
    if html is not None:
        from modelworks.report import write_comparison

        try:
            write_comparison(directories, html)
        except OSError as error:
            raise UserError(f"--html: {html} cannot be written ({error.strerror or error})") from None
        output.print(f"curves: {html}")
    output.result(
        {
            "runs": [_as_json(run) for run in found],
            "differences": {key: dict(zip(names, values, strict=True)) for key, values in changed.items()},
            "html": str(html) if html else None,
        }
    )


_TOLD = 12  # of a run's health, the last ones


def _in_words(told: Told) -> str:
    return f"step {told.step:,}: {told.text}{' (undone)' if told.undone else ''}"


commands = {"ls": list_runs, "show": show_run, "compare": compare_runs}


def _changed_keys(runs: list[RunFigures]) -> dict[str, list[Any]]:
    """Key -> its value in each run, for keys that are not the same in all; the name aside."""
    first = runs[0]
    changed: dict[str, list[Any]] = {}
    for place, run in enumerate(runs):
        if first.config is None or run.config is None:
            broken = first if first.config is None else run
            raise UserError(f"{broken.directory}: {broken.problem}")
        for item in differences(first.config, run.config):
            if item.key != "name":
                changed.setdefault(item.key, [item.before] * len(runs))[place] = item.after
    return changed


def _headings() -> list[str]:
    return ["run", "state", "model", "steps", "train loss", "val loss", "bits/byte", "tokens/s", "mfu", "time"]


def _row(run: RunFigures) -> list[str]:
    names = ("steps", "train_loss", "val_loss", "val_bits_per_byte", "tokens_per_second", "mfu", "seconds")
    return [run.name, run.state, _model(run), *(_show(name, run.values.get(name)) for name in names)]


def _model(run: RunFigures) -> str:
    if run.config is None:
        return f"? ({run.problem})"
    model = run.config.model
    return f"{model.family} {format_count(count_parameters(model).total)}"


def _show(name: str, value: Any) -> str:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return "-" if value is None else str(value)
    if name == "mfu":
        return f"{value:.1%}"
    if name == "seconds":
        minutes, seconds = divmod(round(value), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}"
    if name in ("steps", "tokens", "tokens_per_second"):
        return f"{round(value):,}"
    return f"{value:.4f}"


def _as_json(run: RunFigures) -> dict[str, Any]:
    files = {name: str(path) for name, path in run.files.items()}
    return {"name": run.name, "directory": str(run.directory), "state": run.state, **run.values, **files}


def _table(rows: list[list[str]]) -> Any:
    """Rows, the first one being headings, as a plain table; all columns but the first stand right."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, heading in enumerate(rows[0]):
        table.add_column(heading, justify="left" if place == 0 else "right", overflow="fold")
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    return table
