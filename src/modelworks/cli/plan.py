"""`modelworks plan`: what a run would need and take, and which layout to give it, before anything is rented."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from modelworks.cli.exit_codes import FAILED
from modelworks.cli.output import JsonFlag, Output
from modelworks.config import UserError

_MODEL = "A model by the name of its preset, in place of CONFIG."
_BATCH = "Tokens of a step (4M, `4194304 tokens`) or rows (512)."
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
        str | None, typer.Option("--memory-headroom", help="Of a device's memory, what must stay free: 10%.")
    ] = None,
    price: Annotated[
        float | None, typer.Option("--price", help="US dollars an hour of one device; else a list price.")
    ] = None,
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
    if html is not None:
        _check_writable(html)
    from modelworks.cli.plan_request import Asked, read_request
    from modelworks.hardware import this_machine

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
    )
    request = read_request(asked, here=this_machine)
    from modelworks.cli.plan_answer import answer_request
    from modelworks.cli.plan_text import print_answer

    answer = answer_request(request).values
    print_answer(answer, output)
    if html is not None:
        _write_page(html, answer)
        output.print(f"page: {html}")
    output.result(answer)
    if not answer["winner"] or not answer["winner"]["fits"]:
        raise typer.Exit(FAILED)


def _check_writable(path: Path) -> None:
    """Raise UserError before a search whose page could not be kept."""
    if path.is_dir():
        raise UserError(f"--html: {path} is a directory, expected a file such as {path / 'plan.html'}")
    there = next(parent for parent in path.absolute().parents if parent.exists())
    if not there.is_dir() or not os.access(path if path.exists() else there, os.W_OK):
        raise UserError(f"--html: {path} cannot be written")


def _write_page(path: Path, answer: dict[str, Any]) -> None:
    from modelworks.report import write_plan

    try:
        write_plan(path, answer)
    except OSError as error:
        raise UserError(f"--html: {path} cannot be written ({error.strerror})") from error
