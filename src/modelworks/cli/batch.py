"""`modelworks batch`: a file of requests answered offline, in OpenAI's batch format."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelworks.cli.choices import check_choice
from modelworks.cli.exit_codes import FAILED
from modelworks.cli.output import JsonFlag, Output, write_error
from modelworks.cli.serve import served_name
from modelworks.config import UserError, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from modelworks.serve.batch_file import BatchAnswers
    from modelworks.serve.batch_run import BatchCounts
    from modelworks.serve.start import ModelStart


def command(
    requests: Annotated[Path, typer.Argument(metavar="IN", help="Requests: one JSON object a line.")],
    answers: Annotated[Path, typer.Argument(metavar="OUT", help="Answers, added to those that are there.")],
    model: Annotated[str, typer.Option("--model", help="A run, checkpoint, Hugging Face directory or GGUF file.")],
    name: Annotated[
        str | None, typer.Option("--name", help="That requests call it by; default: its file's or run's.")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="Of the weights: auto, fp32, bf16 or fp16.")] = "auto",
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", help="Tokens of prompt and answer; default: what fits.")
    ] = None,
    kv_cache: Annotated[str | None, typer.Option("--kv-cache", help="Memory of the KV cache, such as 2GiB.")] = None,
    kv_dtype: Annotated[str, typer.Option("--kv-dtype", help="Of the KV cache, see `modelworks serve`.")] = "auto",
    token_budget: Annotated[int, typer.Option("--token-budget", help="Tokens of one step.")] = 512,
    max_running: Annotated[int, typer.Option("--max-running", help="Sequences that run at once.")] = 64,
    native: Annotated[str, typer.Option("--native", help="Compiled steps on CPU: auto, on or off.")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start over, removing the answers there are.")] = False,
    json: JsonFlag = False,
) -> None:
    """Answer a file of requests with a model, in OpenAI's batch format: `custom_id`, `method`, `url`, `body`.

    Bodies are checked and answered as `modelworks serve` does. Every line gets an answer in OUT, wrong ones too, in the
    order in which they finish. Killed or stopped, the same command goes on with the lines that have none.

    Example:
    modelworks batch requests.jsonl answers.jsonl --model my-run
    modelworks batch requests.jsonl answers.jsonl --model model.gguf --dtype bf16 --name gpt-4o-mini
    """
    import asyncio

    from modelworks.serve.batch_file import BatchAnswers, read_requests
    from modelworks.serve.batch_run import EngineKeepsDying
    from modelworks.serve.options import EngineOptions
    from modelworks.serve.start import ModelStart

    check_choice("--dtype", dtype, ("auto", "fp32", "bf16", "fp16"))
    check_choice("--device", device, ("auto", "cpu", "cuda"))
    options = EngineOptions(
        max_model_len=max_model_len,
        kv_cache_bytes=None if kv_cache is None else _bytes(kv_cache),
        kv_dtype=kv_dtype,  # type: ignore[arg-type]  # checked by EngineOptions
        token_budget=token_budget,
        max_running=max_running,
        native=native,  # type: ignore[arg-type]
    )
    output = Output(json=json)
    known = {request.id for request in read_requests(requests)}
    if answers.exists() and answers.samefile(requests):
        raise UserError(f"OUT: {answers} is the file of requests, expected another one")
    opened = BatchAnswers(answers, overwrite=overwrite)
    start = ModelStart(model, name or served_name(model), dtype, device, recommended=True, options=options)
    begin = time.perf_counter()
    try:
        opened.check_against(known, requests)
        already = len(opened.answered)
        counts = asyncio.run(_answer_all(start, requests, opened, len(known), output)) if already < len(known) else None
    except EngineKeepsDying as error:
        write_error(
            f"the engine kept ending ({error}); {len(opened.answered)} of {len(known)} answers are kept in {answers}, "
            "and the same command goes on with them",
            FAILED,
            json=json,
        )
        raise typer.Exit(FAILED) from None
    finally:
        opened.close()
    result = _result(counts, requests, answers, start.name, len(known), already, time.perf_counter() - begin)
    _print(result, output)
    output.result(result)


async def _answer_all(
    start: ModelStart, requests: Path, answers: BatchAnswers, total: int, output: Output
) -> BatchCounts:
    from rich.console import Console

    from modelworks.serve.api import Service
    from modelworks.serve.batch_file import read_requests
    from modelworks.serve.batch_run import OPTIONS, run_batch
    from modelworks.serve.engine_client import EngineGone
    from modelworks.serve.supervisor import Supervisor

    engine = Supervisor(start)
    try:
        with Console(stderr=True).status(f"loading {start.path}"):
            try:
                model = await engine.start()
            except EngineGone as error:
                raise UserError(str(error)) from None
        for fact in model.facts:
            output.print(fact)
        with _bar(total, len(answers.answered), output) as tell:
            return await run_batch(
                engine,
                Service(model, engine, OPTIONS),
                read_requests(requests),
                answers,
                in_flight=2 * start.options.max_running,  # the next ones wait at the engine's door
                tell=tell,
            )
    finally:
        await engine.stop()


@contextmanager
def _bar(total: int, done: int, output: Output) -> Iterator[Callable[[BatchCounts], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("answering"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeRemainingColumn(),
        console=output.console,
        transient=True,
        disable=not output.console.is_terminal,
        refresh_per_second=2,
    )
    with bar:
        task = bar.add_task("", total=total, completed=done, failed=0)
        yield lambda counts: bar.update(task, completed=done + counts.completed + counts.failed, failed=counts.failed)


def _result(
    counts: BatchCounts | None, requests: Path, answers: Path, model: str, total: int, already: int, seconds: float
) -> dict[str, Any]:
    return {
        "requests": str(requests),
        "answers": str(answers),
        "model": model,
        "total": total,
        "answered_before": already,
        "completed": counts.completed if counts else 0,
        "failed": counts.failed if counts else 0,
        "errors": dict(counts.errors.most_common()) if counts else {},
        "prompt_tokens": counts.prompt_tokens if counts else 0,
        "generated_tokens": counts.generated_tokens if counts else 0,
        "seconds": seconds,
        "generated_tokens_per_second": counts.generated_tokens / seconds if counts else None,
    }


def _print(result: dict[str, Any], output: Output) -> None:
    if result["answered_before"]:
        output.print(f"{result['answered_before']:,} of {result['total']:,} lines were answered before")
    for error, count in result["errors"].items():
        output.print(f"failed: {count:,} x {error}; their answers say why")
    if result["generated_tokens_per_second"] is not None:
        output.print(
            f"{result['completed']:,} requests in {result['seconds']:.1f} s: {result['generated_tokens']:,} tokens, "
            f"{result['generated_tokens_per_second']:.1f} tokens/s (loading included)"
        )
    output.print(f"answers: {result['answers']}")


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise UserError(f"--kv-cache: got {text!r}, expected a size such as 2GiB ({error})") from None
