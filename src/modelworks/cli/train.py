"""`modelworks train`: one run, from its description to its report."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelworks.cli.exit_codes import FAILED, PREEMPTED
from modelworks.cli.output import JsonFlag, Output, write_error
from modelworks.config import UserError, count_parameters, load_run_config, training_flops_per_token
from modelworks.layout import Layout, check_layout

if TYPE_CHECKING:
    from modelworks.config import RunConfig
    from modelworks.train import Result


def command(
    config: Annotated[Path, typer.Argument(help="A run description (YAML).", metavar="CONFIG")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value changes.", metavar="KEY=VALUE")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last complete checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start over, removing the earlier run.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Resolve, derive, count and print; train nothing.")
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also write a trace and a table of time by operation.")
    ] = False,
    runs_dir: Annotated[Path, typer.Option("--runs-dir", help="Where runs are kept.")] = Path("runs"),
    json: JsonFlag = False,
) -> None:
    """Train a model from a run description, into runs/<name>/.

    Ctrl-C or SIGTERM finish the step, save and exit with 75; --resume goes on from there.

    Example:
    modelworks train configs/quickstart.yaml train.duration="500 steps" name=short
    """
    run = load_run_config(config, overrides or [])
    output = Output(json=json)
    if dry_run:
        if resume or overwrite or profile:
            raise UserError("--dry-run trains nothing: leave out --resume, --overwrite and --profile")
        output.result(_dry_run(run, output))
        return
    from modelworks.parallel import RankFailed, RankLost
    from modelworks.report import write_report
    from modelworks.train import TrainingFailed

    run_dir = runs_dir / run.name
    try:
        result = _train(run, run_dir, output, resume=resume, overwrite=overwrite, profile=profile)
    except (TrainingFailed, RankFailed, RankLost) as error:
        left = "" if isinstance(error, TrainingFailed) else f"; {_what_is_left(run, run_dir)}"
        write_error(f"{error}{left}", FAILED, json=json)  # first: torchrun may end this process any moment
        if (run_dir / "config.yaml").exists():
            write_report(run_dir)
        raise typer.Exit(FAILED) from None
    if result is None:  # another rank of a job that torchrun started speaks for all
        return
    try:
        report: str | None = str(write_report(run_dir))
    except OSError as error:
        report = None
        output.print(f"warning: {error.filename or run_dir}: cannot be written ({error.strerror or error})")
    again = " ".join([_program(), "train", str(config), *_quoted(overrides or []), *_runs_option(runs_dir), "--resume"])
    output.result({**asdict(result), "report": report})
    if result.stopped_by and not result.last_save_failed:
        saved = f"saved {result.checkpoint}"
        if result.checkpoint_step != result.steps:
            saved = f"the newest checkpoint is {result.checkpoint}" if result.checkpoint else "there is no checkpoint"
        output.print(f"stopped by {result.stopped_by} at step {result.steps}, {saved}; go on with: {again}")
        raise typer.Exit(PREEMPTED)
    if result.last_save_failed:
        output.print(f"the last checkpoint could not be written; the newest good one is {result.checkpoint}")
        raise typer.Exit(FAILED)
    _print_end(run, result, report, runs_dir, output)


def _train(
    run: RunConfig, run_dir: Path, output: Output, *, resume: bool, overwrite: bool, profile: bool
) -> Result | None:
    """In this process, or on all ranks of the layout; None where this process is not the one that speaks."""
    is_rank = "WORLD_SIZE" in os.environ  # of a job whose number of processes is decided
    if not is_rank:
        check_layout(run)
    if is_rank or Layout.of(run.parallel).world_size > 1:
        from modelworks.cli.train_rank import train_split

        return train_split(run, run_dir, resume=resume, overwrite=overwrite, profile=profile, json=output.json)
    from modelworks.cli.forecast import forecast
    from modelworks.train import keep_freed_memory, train

    keep_freed_memory()  # for the whole process, so the command's business and not that of `train`
    return train(
        run,
        run_dir,
        resume=resume,
        overwrite=overwrite,
        profile=profile,
        console=output.console,
        forecaster=forecast,
    )


def _what_is_left(run: RunConfig, run_dir: Path) -> str:
    """In words, what a run that was cut short can go on from."""
    from modelworks.train import newest_checkpoint

    label = newest_checkpoint(run, run_dir)
    return f"the last good checkpoint is {label}, go on with --resume" if label else "there is no checkpoint yet"


def _print_end(run: RunConfig, result: Result, report: str | None, runs_dir: Path, output: Output) -> None:
    """What a newcomer wants to know at the end, and what to do next."""
    if result.val_bits_per_byte is not None:
        others = ", ".join(f"{name} {value:.3f}" for name, value in result.baselines.items())
        output.print(
            f"validation: {result.val_bits_per_byte:.3f} bits per byte (compressors on the same text: {others})"
        )
    if result.sample:
        output.print(f"a sample:\n\n{indent(result.sample['prompt'] + result.sample['text'].rstrip(), '    ')}\n")
    output.print(f"checkpoint: {result.checkpoint}")
    output.print(f"report:     {report}")
    prompt = shlex.quote(result.sample["prompt"].rstrip() if result.sample else "def ")
    output.print(f"go on with: {_program()} generate {_model_name(run, runs_dir)} --prompt {prompt}")


def _dry_run(run: RunConfig, output: Output) -> dict[str, Any]:
    """Everything that can be known without the data and without a step."""
    from modelworks.train import check_references, derive, measure, print_decisions

    check_layout(run)
    check_references(run)
    derived = derive(run, measure(run, output.console))
    print_decisions(derived, output.console)
    count = count_parameters(run.model)
    return {
        "dry_run": True,
        "name": run.name,
        "parameters": count.total,
        "parameters_by_component": count.by_component,
        "flops_per_token": training_flops_per_token(run.model, run.data.seq_len).training,
        "steps": derived.total_steps,
        "tokens": derived.batches.first_sample(derived.total_steps) * run.data.seq_len,
        "warmup_steps": derived.warmup_steps,
        "micro_batch": derived.micro_batch,
        "accumulation": derived.accumulation,
        "precision": derived.precision.name,
        "device": str(derived.device),
        "memory": {**asdict(derived.memory), "total": derived.memory.total},
        "decisions": [asdict(decision) for decision in derived.decisions],
    }


def _program() -> str:
    """How this program was called, where its bare name would not find it: in a virtual environment not activated."""
    if shutil.which("modelworks"):
        return "modelworks"
    return "python -m modelworks" if Path(sys.argv[0]).name == "__main__.py" else os.path.relpath(sys.argv[0])


def _model_name(run: RunConfig, runs_dir: Path) -> str:
    return run.name if runs_dir == Path("runs") else str(runs_dir / run.name)


def _quoted(overrides: list[str]) -> list[str]:
    return [shlex.quote(text) for text in overrides]


def _runs_option(runs_dir: Path) -> list[str]:
    return [] if runs_dir == Path("runs") else ["--runs-dir", str(runs_dir)]
