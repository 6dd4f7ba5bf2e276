"""`modelworks tune lr`: short runs at several rates; the best one, and the largest that does not diverge."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelworks.cli.exit_codes import FAILED, PREEMPTED
from modelworks.cli.output import JsonFlag, Output, write_error
from modelworks.cli.runs import RunsDirectory
from modelworks.config import Duration, UserError, format_count, load_run_config

if TYPE_CHECKING:
    from rich.progress import Progress

    from modelworks.config import RunConfig
    from modelworks.tune import Outcome, Proposal, Search, Setup, Trial, TrialStore

_MOST_SEEDS = 16


def lr(
    config: Annotated[Path, typer.Argument(help="A run description (YAML).", metavar="CONFIG")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value changes.", metavar="KEY=VALUE")] = None,
    share: Annotated[str, typer.Option("--share", help="Of the run's tokens, for each trial.", metavar="1%-5%")] = "2%",
    rates: Annotated[str | None, typer.Option("--rates", help="Try exactly these, such as 1e-3,3e-3.")] = None,
    seeds: Annotated[int, typer.Option("--seeds", help="Trials of each rate that may be the best.")] = 2,
    jobs: Annotated[int, typer.Option("--jobs", help="Trials at a time.")] = 1,
    ray: Annotated[bool, typer.Option("--ray", help="Make the trials with Ray Tune, on its machines.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Where trials are kept [runs/NAME/tune-lr].")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start over, removing the trials there are.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Where the page goes [rates.html beside them].")] = None,
    runs_dir: RunsDirectory = Path("runs"),
    json: JsonFlag = False,
) -> None:
    """Find a learning rate by short runs: the best, and the largest that does not diverge.

    Rates a decade apart around the configured one, then closer round the best, with all seeds for those that may be the
    best. Outcomes are kept: after Ctrl-C, SIGTERM (exit code 75) or a crash the same command goes on.

    Example:
    modelworks tune lr configs/quickstart.yaml --share 5%
    modelworks tune lr configs/quickstart.yaml optimizer.name=lion --rates 1e-4,3e-4,1e-3 --seeds 3
    """
    run = load_run_config(config, overrides or [])
    output = Output(json=json)
    part, given = _share(share), _rates(rates)
    _check(run, given, seeds=seeds, jobs=jobs)
    from modelworks.tune import Search, TrialsFailed, TrialStore, prepare_trials, propose

    directory = out or runs_dir / run.name / "tune-lr"
    search = Search(run.optimizer.lr, tuple(range(run.seed, run.seed + seeds)), given)
    with TrialStore(directory, overwrite=overwrite) as store:
        try:
            with _ending_on_signals():
                setup = prepare_trials(run, part, output.console, earlier=store.config)
                store.claim(setup.facts())
                _say_beginning(setup, store, output)
                outcomes = _make(search, setup, store, output, jobs=jobs, ray=ray)
        except _Stopped as stop:
            kept = f"{len(store.outcomes)} trials are kept in {directory}; the same command goes on with them"
            output.print(f"stopped by {stop}: {kept}")
            rows = _trial_rows(store.outcomes.values())
            output.result({"stopped_by": str(stop), "trials": rows, "out": str(directory)})
            raise typer.Exit(PREEMPTED) from None
        except TrialsFailed as error:
            write_error(str(error), FAILED, json=json)
            raise typer.Exit(FAILED) from None
        proposal = propose(search, outcomes, setup.share)
        result = _result(run, setup, proposal, outcomes)
        page = _write_page(run, directory, outcomes, result, html, output)
    _print_end(proposal, setup, page, output)
    trials = _trial_rows(outcomes.values())
    output.result({**result, "trials": trials, "out": str(directory), "html": None if page is None else str(page)})
    if proposal.best is None:
        raise typer.Exit(FAILED)


def _share(text: str) -> float:
    """A percentage as a share."""
    try:
        duration = Duration.parse(text)
        if duration.unit == "percent" and duration.value > 0:
            return duration.value / 100
    except ValueError:
        pass
    raise UserError(f"--share: got {text}, expected a percentage of the run's tokens above 0%, such as 2%")


def _rates(text: str | None) -> tuple[float, ...]:
    """Rising; empty where none are given."""
    if text is None:
        return ()
    rates = []
    for word in text.split(","):
        try:
            rate = float(word)
        except ValueError:
            rate = math.nan
        if not 0 < rate < math.inf:
            raise UserError(f"--rates: got {word.strip() or 'nothing'}, expected numbers above 0, such as 1e-3,3e-3")
        rates.append(rate)
    if len(set(rates)) < max(2, len(rates)):
        raise UserError(f"--rates: got {text}, expected at least two different rates, each once")
    return tuple(sorted(rates))


def _check(run: RunConfig, rates: tuple[float, ...], *, seeds: int, jobs: int) -> None:
    if not rates and not run.optimizer.lr > 0:
        raise UserError("optimizer.lr is 0, and the search begins there: set it above 0, or give --rates")
    if not 1 <= seeds <= _MOST_SEEDS:
        raise UserError(f"--seeds: got {seeds}, expected 1 to {_MOST_SEEDS}")
    if run.seed + seeds > 2**63:
        raise UserError(f"seed: got {run.seed}, expected one that leaves room for {seeds} seeds below 2^63")
    if jobs < 1:
        raise UserError(f"--jobs: got {jobs}, expected at least 1")
    if "WORLD_SIZE" in os.environ:
        raise UserError("tune lr starts the ranks of its trials itself: call it without torchrun (unset WORLD_SIZE)")


def _make(
    search: Search, setup: Setup, store: TrialStore, output: Output, *, jobs: int, ray: bool
) -> dict[Trial, Outcome]:
    """All trials, with a bar on a terminal and a line for each."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from modelworks.tune import LocalRunner, find_rate

    if ray:
        from modelworks.tune import RayRunner

        run = RayRunner(setup, store.directory, jobs).run
    else:
        run = LocalRunner(setup, store.directory, jobs).run
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=output.console, disable=not output.console.is_terminal) as bar:
        task = bar.add_task("trials", total=None, completed=len(store.outcomes))

        def begin(trials: Sequence[Trial]) -> None:
            rates = ", ".join(f"{rate:g}" for rate in sorted({trial.rate for trial in trials}))
            bar.update(task, description=f"trials at {rates}", total=len(store.outcomes) + len(trials))

        def tell(outcome: Outcome) -> None:
            bar.update(task, completed=len(store.outcomes))
            _say(f"rate {outcome.trial.rate:g}, seed {outcome.trial.seed}: {_what_became(outcome)}", bar, output)

        return find_rate(search, store, run, begin=begin, tell=tell)


def _say(text: str, bar: Progress, output: Output) -> None:
    if bar.disable:
        output.print(text)
    else:
        bar.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _what_became(outcome: Outcome) -> str:
    if outcome.status == "diverged":
        return f"diverged at step {outcome.steps}: {outcome.reason} ({outcome.seconds:.1f} s)"
    if outcome.loss is None:
        return f"failed: {outcome.reason}"
    return f"validation loss {outcome.loss:.4f} ({outcome.seconds:.1f} s)"


def _say_beginning(setup: Setup, store: TrialStore, output: Output) -> None:
    for text in setup.decisions:
        output.print(text)
    for text in setup.warnings:
        output.print(f"warning: {text}")
    there = f"; {len(store.outcomes)} are there already" if store.outcomes else ""
    output.print(f"each trial trains on {format_count(setup.tokens)} tokens, {setup.share:.1%} of the run's{there}")


def _result(run: RunConfig, setup: Setup, proposal: Proposal, outcomes: dict[Trial, Outcome]) -> dict[str, Any]:
    per_step = run.train.global_batch * run.data.seq_len
    return {
        "name": run.name,
        **proposal.to_row(),
        "warnings": list(setup.warnings),
        "optimizer": run.optimizer.name,
        "share": setup.share,
        "steps": setup.steps,
        "whole_steps": setup.whole_steps,
        "tokens": sum(outcome.steps for outcome in outcomes.values()) * per_step,
        "seconds": round(sum(outcome.seconds for outcome in outcomes.values()), 1),
    }


def _write_page(
    run: RunConfig,
    directory: Path,
    outcomes: dict[Trial, Outcome],
    result: dict[str, Any],
    html: Path | None,
    output: Output,
) -> Path | None:
    """Records and the page; None where they cannot be written, which costs no trial."""
    from modelworks.report import write_rates
    from modelworks.tune import write_rate_records

    try:
        records = write_rate_records(directory, (outcome for _, outcome in sorted(outcomes.items())), result)
        return write_rates(records, html or directory / "rates.html", name=run.name)
    except OSError as error:
        output.print(f"warning: {error.filename or directory}: cannot be written ({error.strerror or error})")
        return None


def _print_end(proposal: Proposal, setup: Setup, page: Path | None, output: Output) -> None:
    from rich.table import Table
    from rich.text import Text

    from modelworks.tune import text_rows

    head, *rows = text_rows(proposal)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, heading in enumerate(head):
        table.add_column(heading, justify="right" if place < 3 else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    output.print()
    output.console.print(table)
    output.print()
    for text in proposal.remarks:
        output.print(f"note: {text}")
    if proposal.best is not None:
        best, error = proposal.best, proposal.best.standard_error
        spread = f" ± {error:.4f}" if error is not None else ""
        output.print(f"best:           {best.rate:g} (validation loss {best.loss:.4f}{spread})")
        output.print(f"largest stable: {proposal.largest_stable:g}")
        output.print(f"train with:     optimizer.lr={best.rate:g}")
    if page is not None:
        output.print(f"page:           {page}")


def _trial_rows(outcomes: Any) -> list[dict[str, Any]]:
    """Without their curves, which are in the records."""
    rows = [outcome.to_row() for outcome in outcomes]
    return [{key: value for key, value in row.items() if key != "curve"} for row in rows]


class _Stopped(BaseException):
    """By a signal; not an Exception, so that nothing on the way takes it for a failure."""


@contextmanager
def _ending_on_signals() -> Iterator[None]:
    """SIGINT and SIGTERM end the block at once: what is finished is on the disk, and trials have nothing to save."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stopped(signal.Signals(number).name)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
