"""`modelworks plan`: what a run would need and take, and which layout to give it, before anything is rented."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelworks.cli.exit_codes import FAILED
from modelworks.cli.html_option import check_writable
from modelworks.cli.output import JsonFlag, Output
from modelworks.cli.waiting import waiting
from modelworks.config import UserError

if TYPE_CHECKING:
    from modelworks.cli.plan_request import Asked

_MODEL = "A model by the name of its preset, in place of CONFIG."
_BATCH = "Tokens of a step (4M, `4194304 tokens`) or rows (512)."
_FAILURES = "What is assumed: restart_seconds=600,copy_gb_s=10,write_gb_s=1,device_hours=50700."
_LAYOUT = "Predict this layout alone: tp=8,pp=4,zero=1,micro_batch=1, in the keys of a run description."


def command(
    config: Annotated[Path | None, typer.Argument(help="A run description (YAML).", metavar="[CONFIG]")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value changes.", metavar="[KEY=VALUE]")] = None,
    model: Annotated[str | None, typer.Option("--model", help=_MODEL)] = None,
    hardware: Annotated[
        str | None, typer.Option("--hardware", help="A device of the catalogue; with CONFIG: this machine.")
    ] = None,
    gpus: Annotated[str | None, typer.Option("--gpus", help="How many; with CONFIG: as many as its layout.")] = None,
    seq_len: Annotated[str | None, typer.Option("--seq-len", help="Tokens of a row.")] = None,
    global_batch: Annotated[str | None, typer.Option("--global-batch", help=_BATCH)] = None,
    tokens: Annotated[str | None, typer.Option("--tokens", help="Of the whole run: for its time and cost.")] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help="fp32, bf16, bf16-autocast, fp16 or fp8.")
    ] = None,
    optimizer: Annotated[str | None, typer.Option("--optimizer", help="adamw, muon, adamw8bit, …")] = None,
    layout: Annotated[str | None, typer.Option("--layout", help=_LAYOUT)] = None,
    fix: Annotated[str | None, typer.Option("--fix", help="Search only layouts with these values: tp=8,pp=4.")] = None,
    max_tp: Annotated[int | None, typer.Option("--max-tp", min=1, help="The most tensor-parallel ranks.")] = None,
    zero: Annotated[int | None, typer.Option("--zero", min=0, max=3, help="The same as --fix zero=…")] = None,
    recompute: Annotated[str | None, typer.Option("--recompute", help="The same as --fix recompute=…")] = None,
    memory_headroom: Annotated[
        str | None, typer.Option("--memory-headroom", help="Share of a device's memory that must stay free; else 5%.")
    ] = None,
    price: Annotated[
        float | None, typer.Option("--price", help="US dollars an hour of one device; else a list price.")
    ] = None,
    failures: Annotated[str | None, typer.Option("--failures", help=_FAILURES)] = None,
    hyper: Annotated[
        bool, typer.Option("--hyper", help="Propose batch, rate, warmup and tokens to start from.")
    ] = False,
    emit: Annotated[
        str | None, typer.Option("--emit", help="Write files for modelworks, torchtitan, megatron, deepspeed or fsdp.")
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine first; alone: only that. Takes minutes.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Of --emit: the directory. Of --calibrate: a file.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a page with charts to this file.")] = None,
    json: JsonFlag = False,
) -> None:
    """Predict memory, time and cost of a run on given devices, and find its best layout. Nothing is run.

    Exit code 1 where nothing fits into memory.

    Example:
    modelworks plan --model llama-3-70b --hardware h100-sxm --gpus 128 --seq-len 8192 --global-batch 4M
    modelworks plan configs/quickstart.yaml --html plan.html
    """
    output = Output(json=json)
    _check_outputs(html, out, emit, calibrate)
    from modelworks.cli.plan_request import Asked

    asked = Asked(
        config=config,
        overrides=overrides or [],
        model=model,
        hardware=hardware,
        gpus=gpus,
        seq_len=seq_len,
        global_batch=global_batch,
        tokens=tokens,
        precision=precision,
        optimizer=optimizer,
        fix=fix,
        max_tp=max_tp,
        zero=zero,
        recompute=recompute,
        headroom=memory_headroom,
        layout=layout,
        price=price,
        failures=failures,
        hyper=hyper,
    )
    if calibrate and config is None and model is None:
        _check_alone(asked, html, emit)
    elif calibrate and asked.hardware is None:
        _check_before_measuring(asked, emit)
    if asked.only_hyper and html is not None:
        raise UserError("--html: there is nothing to draw of --hyper alone, expected --hardware and --gpus too")
    measured = _calibrate(asked, out, output) if calibrate else None
    if measured is not None:
        if config is None and model is None:
            output.result({"calibration": measured})
            return
        asked = replace(asked, hardware="this-machine" if out is None else str(out))
    with waiting("searching layouts", output):
        answer = _plan(asked, emit, out)
    if measured is not None:
        answer["calibration"] = measured
    from modelworks.cli.plan_text import print_answer

    print_answer(answer, output)
    if html is not None:
        _write_page(html, answer)
        output.print(f"page: {html}")
    output.result(answer)
    if not asked.only_hyper and not (answer["winner"] and answer["winner"]["fits"]):
        raise typer.Exit(FAILED)


def _plan(asked: Asked, emit: str | None, out: Path | None) -> dict[str, Any]:
    from modelworks.cli.plan_answer import answer_hyper, answer_request, check_target, write_files
    from modelworks.cli.plan_request import read_request
    from modelworks.hardware import this_machine

    if emit is not None:
        check_target(emit)
    if asked.only_hyper:
        return answer_hyper(asked)
    request = read_request(asked, here=this_machine)
    if emit is not None:
        check_target(emit, request.job.device)
    answered = answer_request(request)
    answer = answered.values
    if emit is not None and out is not None:
        answer["emitted"] = write_files(emit, out, answered, request)
    return answer


def _calibrate(asked: Asked, out: Path | None, output: Output) -> dict[str, Any]:
    """Measures this machine, and keeps what was found where plans look for it."""
    if asked.hardware is not None:
        raise UserError(f"--hardware: got {asked.hardware}, expected none with --calibrate: it is of this machine")
    from modelworks.cli.calibrate import calibrate, describe, write

    found = calibrate(output.print, quiet=output.json)
    path = write(found, out)
    for line in describe(found):
        output.print(line)
    output.print(f"written: {path}")
    output.print()
    return {
        "file": str(path),
        "seconds": found.seconds,
        "disturbed": found.disturbed,
        "device": found.device.model_dump(mode="json", exclude_defaults=True),
        "errors": [
            {"ranks": ranks, "precision": precision, "predicted_over_measured_minus_1": errors}
            for (ranks, precision), errors in found.errors.items()
        ],
    }


def _check_alone(asked: Asked, html: Path | None, emit: str | None) -> None:
    """Where nothing is planned, nothing that is said about a plan may be ignored. Raises UserError."""
    given = {each.name: getattr(asked, each.name) for each in fields(asked) if each.name != "hardware"}
    useless = [name for name, value in {**given, "html": html, "emit": emit}.items() if value not in (None, [], False)]
    if useless:
        flag = {"headroom": "memory-headroom"}.get(useless[0], useless[0]).replace("_", "-")
        raise UserError(f"--{flag}: nothing is planned by --calibrate alone, expected CONFIG or --model too")


def _check_before_measuring(asked: Asked, emit: str | None) -> None:
    """What is wrong with the plan is said at once, not after minutes of measuring. Raises UserError."""
    from modelworks.cli.plan_answer import check_target
    from modelworks.cli.plan_request import read_request
    from modelworks.hardware import THIS_MACHINE, this_machine

    request = read_request(replace(asked, hardware=THIS_MACHINE), here=this_machine)
    if emit is not None:
        check_target(emit, request.job.device)


def _check_outputs(html: Path | None, out: Path | None, emit: str | None, calibrate: bool) -> None:
    """Raise UserError before a search whose results could not be kept."""
    if out is not None and emit is None and not calibrate:
        raise UserError("--out: nothing is written there without --emit or --calibrate (a page: --html)")
    if emit is not None and out is None:
        raise UserError("--emit: missing --out, the directory for its files")
    if emit is not None and calibrate and out is not None:
        raise UserError("--out: is of --emit or of --calibrate; give them in two calls")
    if html is not None:
        check_writable(html, "plan.html")


def _write_page(path: Path, answer: dict[str, Any]) -> None:
    from modelworks.report import write_plan

    try:
        write_plan(path, answer)
    except OSError as error:
        raise UserError(f"--html: {path} cannot be written ({error.strerror})") from error
