"""`modelworks serve`: a model behind an OpenAI-compatible API."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelworks.cli.choices import check_choice
from modelworks.cli.exit_codes import FAILED
from modelworks.cli.output import JsonFlag, Output, write_error
from modelworks.config import UserError, parse_bytes

if TYPE_CHECKING:
    from modelworks.serve.api import ServerOptions
    from modelworks.serve.served_model import ServedModel
    from modelworks.serve.start import ModelStart

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A run, checkpoint, Hugging Face directory or GGUF file.")
    ],
    host: Annotated[str, typer.Option("--host", help="Where to listen. Beyond this machine only by your word.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option("--port", help="0 takes any free one.")] = 8000,
    name: Annotated[
        str | None, typer.Option("--name", help="Under which requests ask for the model; default: its file's or run's.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="MODELWORKS_API_KEY", help="That requests must bring."),
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="Of the weights: auto, fp32, bf16 or fp16.")] = "auto",
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    tp: Annotated[
        int, typer.Option("--tp", help="Processes that share the model by tensor parallelism; heads need not divide.")
    ] = 1,
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", help="Tokens of prompt and answer; default: what fits.")
    ] = None,
    kv_cache: Annotated[
        str | None,
        typer.Option("--kv-cache", help="Memory of the KV cache, such as 2GiB; default: a share of what is free."),
    ] = None,
    memory_share: Annotated[
        float | None, typer.Option("--memory-share", help="Share of the free memory that the KV cache may take.")
    ] = None,
    kv_dtype: Annotated[
        str, typer.Option("--kv-dtype", help="Of the KV cache: auto (the model's), fp32, bf16, int8 or fp8.")
    ] = "auto",
    block_size: Annotated[int, typer.Option("--block-size", help="Tokens of a block of the KV cache.")] = 16,
    token_budget: Annotated[
        int, typer.Option("--token-budget", help="Tokens of one step: more is throughput, fewer is even latency.")
    ] = 512,
    max_running: Annotated[int, typer.Option("--max-running", help="Sequences that run at once.")] = 64,
    max_waiting: Annotated[int, typer.Option("--max-waiting", help="Requests in the queue; more get a 429.")] = 1024,
    max_waiting_tokens: Annotated[
        int, typer.Option("--max-waiting-tokens", help="Tokens of prompts in the queue; more get a 429.")
    ] = 1_000_000,
    prefix_cache: Annotated[
        bool, typer.Option("--prefix-cache/--no-prefix-cache", help="Whether requests share computed prefixes.")
    ] = True,
    prompt_stall: Annotated[
        float,
        typer.Option("--prompt-stall", help="How many times longer a step may take for a long prompt; 0 is no bound."),
    ] = 1.6,
    evict: Annotated[
        str | None,
        typer.Option("--evict", help="What long contexts forget: window:4,1024, h2o:1024,512 or snapkv:1024,32."),
    ] = None,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="A request's tokens never depend on what else runs, bit by bit.")
    ] = False,
    native: Annotated[str, typer.Option("--native", help="Compiled steps on CPU: auto, on or off.")] = "auto",
    recommended: Annotated[
        bool,
        typer.Option(
            "--recommended-sampling/--no-recommended-sampling",
            help="Whether the model's own generation_config.json fills in what a request leaves out.",
        ),
    ] = True,
    deadline: Annotated[float, typer.Option("--deadline", help="Seconds for requests that name no `timeout`.")] = 600.0,
    body_limit: Annotated[str, typer.Option("--body-limit", help="Size of a request's body, at most.")] = "4MiB",
    client_timeout: Annotated[
        float,
        typer.Option("--client-timeout", help="Seconds that a client may take to send a request's head, or its body."),
    ] = 60.0,
    max_connections: Annotated[
        int | None,
        typer.Option("--max-connections", help="At once; more get a 503. Default: 2048, or what open files allow."),
    ] = None,
    grace: Annotated[float, typer.Option("--grace", help="Seconds to finish running requests at the end.")] = 30.0,
    stall: Annotated[
        float, typer.Option("--stall", help="Seconds of an engine's silence after which /health says so.")
    ] = 60.0,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="The engine in this process: less memory, but nothing restarts it.")
    ] = False,
    log_requests: Annotated[bool, typer.Option("--log-requests", help="One line for each request, on stderr.")] = False,
    json: JsonFlag = False,
) -> None:
    """Serve a model over HTTP, with OpenAI's API, Prometheus metrics and a page to chat.

    It says how memory is divided, which sampling parameters are the defaults, and where it listens. Ctrl-C or SIGTERM
    lets running requests finish, then ends it; a second one ends it at once.

    Example:
    modelworks serve my-run --port 8000
    modelworks serve model.gguf --dtype bf16 --max-model-len 4096 --name smollm
    curl localhost:8000/v1/completions -d '{"prompt": "Once", "max_tokens": 20}' -H 'Content-Type: application/json'
    """
    from modelworks.serve.api import ServerOptions, bind, connections_allowed
    from modelworks.serve.eviction import parse_policy
    from modelworks.serve.options import EngineOptions
    from modelworks.serve.start import ModelStart

    if tp < 1:
        raise UserError(f"--tp: got {tp}, expected a whole number >= 1")
    if prompt_stall != 0 and not prompt_stall > 1:  # EngineOptions calls it `stall`, which is another option here
        raise UserError(f"--prompt-stall: got {prompt_stall:g}, expected a number > 1, or 0 for no bound")
    check_choice("--dtype", dtype, ("auto", "fp32", "bf16", "fp16"))
    check_choice("--device", device, ("auto", "cpu", "cuda"))
    server = ServerOptions(
        api_key=api_key,
        body_limit=_bytes("--body-limit", body_limit),
        client_timeout=client_timeout,
        max_connections=connections_allowed(max_connections),
        deadline=deadline,
        longest_deadline=max(deadline, 3600.0),
        grace=grace,
        stall=stall,
        log_requests=log_requests,
    )
    values: dict[str, Any] = {"kv_dtype": kv_dtype, "native": native}
    if memory_share is not None:
        values["memory_share"] = memory_share
    if evict is not None:
        values["eviction"] = parse_policy(evict)
    options = EngineOptions(
        max_model_len=max_model_len,
        kv_cache_bytes=None if kv_cache is None else _bytes("--kv-cache", kv_cache),
        block_size=block_size,
        token_budget=token_budget,
        stall=prompt_stall or None,
        max_running=max_running,
        max_waiting=max_waiting,
        max_waiting_tokens=max_waiting_tokens,
        prefix_cache=prefix_cache,
        batch_invariant=batch_invariant,
        **values,
    )
    start = ModelStart(model, name or served_name(model), dtype, device, recommended, tp, options)
    bound = bind(host, port)  # before the model is loaded, which takes time
    if log_requests:
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    if host not in _LOOPBACK and api_key is None:
        print(f"note: {host} may be reached by others, and there is no --api-key", file=sys.stderr)
    failure = asyncio.run(_serve(start, server, bound, Output(json=json), as_process=not in_process))
    if failure is not None:
        write_error(failure, FAILED, json=json)
        raise typer.Exit(FAILED)


def served_name(model: str) -> str:
    """`my-run` of `runs/my-run@best`, `tiny` of `models/tiny.gguf`: what requests call it."""
    last = PurePath(model.rstrip("/")).name.partition("@")[0]
    return last.removesuffix(".gguf") or "model"


async def _serve(
    start: ModelStart, options: ServerOptions, bound: socket.socket, output: Output, *, as_process: bool
) -> str | None:
    """Serve until the end. Returns what went wrong, or None."""
    from rich.console import Console

    from modelworks.serve.api import Service, serve, url_of
    from modelworks.serve.engine_client import EngineGone
    from modelworks.serve.supervisor import Supervisor

    engine = Supervisor(start, process=as_process)
    try:
        with Console(stderr=True).status(f"loading {start.path}"):
            model = await engine.start()
        # A large body becomes a million objects at once, and the collector's usual thresholds would look at all of them
        # again and again: that takes four times as long as to read it. Not much higher, though: a connection leaves
        # cycles behind, a kilobyte of memory each until they are collected.
        gc.freeze()
        gc.set_threshold(10_000, 10, 10)
        service = Service(model, engine, options)
        url = url_of(bound)
        well = await serve(service, bound, on_ready=lambda: _say_ready(output, model, url, engine.health().pid))
        return None if well else f"the engine ended again and again; the last time: {engine.health().error}"
    except EngineGone as error:
        return str(error)
    finally:
        await engine.stop()
        bound.close()


def _say_ready(output: Output, model: ServedModel, url: str, engine_pid: int | None) -> None:
    for fact in model.facts:
        output.print(fact)
    defaults = ", ".join(f"{name} {value:g}" for name, value in model.defaults.items())
    output.print(f"sampling defaults: {defaults or 'temperature 1 (OpenAI’s)'}; what a request says wins")
    output.print(f"serving `{model.name}` at {url} (a page to chat; the API is at {url}/v1; Ctrl-C ends it)")
    output.result(
        {
            "url": url,
            "model": model.name,
            "max_model_len": model.max_model_len,
            "sampling_defaults": dict(model.defaults),
            "facts": list(model.facts),
            "engine_pid": engine_pid,
        }
    )


def _bytes(option: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise UserError(f"{option}: got {text!r}, expected a size such as 2GiB ({error})") from None
