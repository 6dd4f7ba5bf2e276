"""`modelworks bench-serve`: how fast an OpenAI-compatible endpoint answers under a load."""

from __future__ import annotations

import json as json_module
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelworks.cli.exit_codes import FAILED
from modelworks.cli.html_option import check_writable
from modelworks.cli.output import JsonFlag, Output
from modelworks.config import UserError, show_value

if TYPE_CHECKING:
    from modelworks.serve.bench import Client, ClosedLoop, OpenLoop, Outcome, Prompts

KEY_VARIABLE = "OPENAI_API_KEY"
USUAL_REQUESTS, USUAL_CONCURRENCY = 64, 8
LATE_SHARE = 0.05  # of the time to first token, that a client may be late without a word about it
_ROWS = {
    "time_to_first_token": "time to first token",
    "inter_token_latency": "between tokens",
    "time_per_output_token": "per token after the first",
    "end_to_end": "whole request",
}


def command(
    url: Annotated[str, typer.Argument(metavar="URL", help="Of the server, such as http://127.0.0.1:8000.")],
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", help=f"Requests in flight (closed loop) [{USUAL_CONCURRENCY}].")
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", help="Requests a second at random moments (open loop, Poisson).")
    ] = None,
    requests: Annotated[
        int | None, typer.Option("--requests", help=f"How many are sent [{USUAL_REQUESTS}, or by --seconds].")
    ] = None,
    seconds: Annotated[float | None, typer.Option("--seconds", help="Nothing is sent after so long.")] = None,
    words: Annotated[str, typer.Option("--words", help="Of a prompt: a number, or from-to.")] = "20-300",
    shared_words: Annotated[
        int, typer.Option("--shared-words", help="That all prompts begin with: measures prefix caching.")
    ] = 0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Of each answer, at most.")] = 64,
    text: Annotated[
        Path | None, typer.Option("--text", help="Prompts are excerpts of this file [Python's language reference].")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="JSON lines with `prompt` or `messages`, or a batch file.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask /v1/chat/completions.")] = False,
    model: Annotated[str | None, typer.Option("--model", help="Of the server's models [its first].")] = None,
    extra: Annotated[
        str, typer.Option("--extra", help='Further fields of each request, as JSON: {"ignore_eos": true}.')
    ] = "{}",
    api_key: Annotated[str | None, typer.Option("--api-key", help=f"[${KEY_VARIABLE}]")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of prompts and moments; another asks other prompts.")] = 0,
    warmup: Annotated[int, typer.Option("--warmup", help="Requests before, one by one, that do not count.")] = 1,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds after which a request has failed.")] = 300.0,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a page with the distributions.")] = None,
    json: JsonFlag = False,
) -> None:
    """Measure an OpenAI-compatible endpoint under a load: latencies, throughput, errors.

    Answers are streamed. Times count from when a request was due, so that a wait cannot hide. The client runs on
    this machine: where the server does too, they share its cores.

    Example:
    modelworks bench-serve http://127.0.0.1:8000 --concurrency 32 --requests 200
    modelworks bench-serve http://127.0.0.1:8000 --rate 4 --seconds 60 --html load.html
    modelworks bench-serve http://127.0.0.1:8000 --shared-words 800 --words 20-60
    """
    import asyncio

    from modelworks.serve.bench import Client

    output = Output(json=json)
    load = _load(concurrency, rate, seed)
    _check(url, requests, seconds, max_tokens=max_tokens, shared_words=shared_words, warmup=warmup, timeout=timeout)
    asked = _prompts(prompts, text, words, shared_words, max_tokens, chat=chat, seed=seed)
    if html is not None:
        check_writable(html, "load.html")
    key = api_key or os.environ.get(KEY_VARIABLE)
    client = Client(url, model or "", chat, key, _extra(extra), timeout)
    n_requests = USUAL_REQUESTS if requests is None and seconds is None else requests
    found = asyncio.run(_measure(client, asked, load, n_requests, seconds, warmup, output))
    result = {
        "url": url,
        "model": client.model,
        "endpoint": "chat/completions" if chat else "completions",
        "load": vars(load),
        "prompts": str(prompts)
        if prompts
        else {"words": words, "shared_words": shared_words, "max_tokens": max_tokens},
        "seed": seed,
        **found,
    }
    _print(result, output)
    if html is not None:
        from modelworks.report import write_load

        try:
            write_load(html, result)
        except OSError as error:
            raise UserError(f"--html: {html} cannot be written ({error.strerror or error})") from None
        output.print(f"page: {html}")
    output.result({**result, "html": str(html) if html else None})
    if not found["completed"]:
        raise typer.Exit(FAILED)


async def _measure(
    client: Client,
    prompts: Prompts,
    load: ClosedLoop | OpenLoop,
    n_requests: int | None,
    seconds: float | None,
    warmup: int,
    output: Output,
) -> dict[str, Any]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from modelworks.serve.bench import ClosedLoop, figures, run_load

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} answers, {task.fields[failed]} failed"),
        TimeElapsedColumn(),
        console=output.console,
        transient=True,
        disable=not output.console.is_terminal,
        refresh_per_second=2,  # the bar takes time from the client
    )
    async with client:
        names = await client.models()
        if client.model and client.model not in names:
            raise UserError(f"--model: got {client.model!r}, the server has {', '.join(names) or 'none'}")
        client.model = client.model or next(iter(names), "")
        if warmup:
            await run_load(client, prompts, ClosedLoop(1), n_requests=warmup, seconds=None)
        with bar:
            task, failed = bar.add_task("measuring", total=n_requests, failed=0), 0

            def tell(outcome: Outcome) -> None:
                nonlocal failed
                failed += outcome.error is not None
                bar.update(task, advance=1, failed=failed)

            outcomes = await run_load(
                client, prompts, load, n_requests=n_requests, seconds=seconds, first=warmup, tell=tell
            )
    return figures(outcomes)


def _load(concurrency: int | None, rate: float | None, seed: int) -> ClosedLoop | OpenLoop:
    from modelworks.serve.bench import ClosedLoop, OpenLoop

    if rate is None:
        concurrency = USUAL_CONCURRENCY if concurrency is None else concurrency
        if concurrency < 1:
            raise UserError(f"--concurrency: got {concurrency}, expected at least 1")
        return ClosedLoop(concurrency)
    if concurrency is not None:
        raise UserError("--rate sends at random moments, whatever is in flight: it does not go with --concurrency")
    if not 0 < rate < float("inf"):
        raise UserError(f"--rate: got {rate:g}, expected requests a second above 0")
    return OpenLoop(rate, seed)


def _check(
    url: str,
    requests: int | None,
    seconds: float | None,
    *,
    max_tokens: int,
    shared_words: int,
    warmup: int,
    timeout: float,
) -> None:
    if not re.match(r"https?://[^/\s]+", url):
        raise UserError(f"URL: got {url!r}, expected one such as http://127.0.0.1:8000")
    if requests is not None and requests < 1:
        raise UserError(f"--requests: got {requests}, expected at least 1")
    for name, value in (("--seconds", seconds), ("--timeout", timeout)):
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"{name}: got {value:g}, expected seconds above 0")
    for name, count, least in (("--max-tokens", max_tokens, 1), ("--shared-words", shared_words, 0)):
        if count < least:
            raise UserError(f"{name}: got {count}, expected at least {least}")
    if warmup < 0:
        raise UserError(f"--warmup: got {warmup}, expected at least 0")


def _prompts(
    listed: Path | None, text: Path | None, words: str, shared_words: int, max_tokens: int, *, chat: bool, seed: int
) -> Prompts:
    from modelworks.serve.bench import Excerpts, Listed, read_text

    if listed is not None:
        if text is not None or shared_words:
            raise UserError("--prompts has whole prompts: it does not go with --text or --shared-words")
        return Listed.read(listed, chat=chat, max_tokens=max_tokens)
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", words)
    shortest, longest = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= shortest <= longest:
        raise UserError(f"--words: got {words!r}, expected a number or from-to, such as 20-300")
    return Excerpts(read_text(text), shortest, longest, max_tokens, shared_words, chat, seed)


def _extra(text: str) -> dict[str, Any]:
    try:
        found = json_module.loads(text)
    except ValueError as error:
        raise UserError(f"--extra: not JSON ({error})") from None
    if not isinstance(found, dict):
        raise UserError(f"--extra: got {show_value(found)}, expected a JSON object")
    return found


def _print(result: dict[str, Any], output: Output) -> None:
    from rich.table import Table

    if result["completed"]:
        table = Table("milliseconds", "mean", "p50", "p90", "p99", "most", box=None, pad_edge=False)
        for name, label in _ROWS.items():
            if (row := result[name]) is not None:
                table.add_row(label, *(f"{1e3 * row[at]:,.1f}" for at in ("mean", "p50", "p90", "p99", "max")))
        output.console.print(table)
    for error in result["errors"]:
        output.print(f"failed: {error['count']} x {error['error']}{': ' if error['first'] else ''}{error['first']}")
    output.print(_summary(result))
    late, first = result["sent_late"], result["time_to_first_token"]
    if late and first and late["p99"] > LATE_SHARE * first["p50"]:
        output.print(
            f"the client sent up to {1e3 * late['p99']:.0f} ms late (p99): it had too much to do itself; these times "
            "are part of the latencies"
        )


def _summary(result: dict[str, Any]) -> str:
    load = result["load"]
    kind = f"{load['concurrency']} in flight" if "concurrency" in load else f"{load['rate']:g} a second, open loop"
    text = f"{result['completed']:,} of {result['requests']:,} requests ({kind}) in {result['seconds']:.1f} s"
    if result["completed"]:
        text += (
            f": {result['requests_per_second']:.2f} requests/s, {result['generated_tokens_per_second']:.1f} tokens/s"
        )
        if result["prompt_tokens"] is not None:
            text += f", prompts {result['prompt_tokens_per_second']:.0f} tokens/s"
            if result["cached_tokens"]:
                text += f" of which {100 * result['cached_tokens'] / result['prompt_tokens']:.0f} % cached"
        if not result["counted_by_server"]:
            text += " (tokens counted by events, as the server sends no usage)"
    return text
