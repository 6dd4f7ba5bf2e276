"""Servers under load, through the same client: `modelworks.serve.bench`. Client and server share the machine's cores.

Every scenario of every round asks prompts that no other asks, so that no prefix cache helps where it is not meant to.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from itertools import pairwise
from typing import Any

from benchmarks._serve_engines import Engine
from modelworks.config import UserError
from modelworks.serve.bench import Client, ClosedLoop, Excerpts, Outcome, figures, read_text, run_load

NEW_TOKENS = 64
WORDS = (10, 200)  # of a prompt: about 15 to 300 tokens
CLOSED = {1: 3, 8: 16, 32: 64}  # requests in flight -> requests
SHARED_WORDS = 600
DECODERS, DECODED, LONG_WORDS = 8, 240, 800
CASES = {**{f"closed {number}": 3 for number in CLOSED}, "shared prefix": 2, "long prompt": 3}  # case -> rounds at most
BRIEF = ("closed 1", "closed 8")  # of engines that are no contenders
WARM_UP = 900  # a round that is not measured
_BEFORE_LONG = 1.2  # seconds: all have begun, have decoded for a while, and none has ended
_START_SECONDS = 240.0
_RATES = ("requests_per_second", "generated_tokens_per_second", "prompt_tokens_per_second", "seconds")
_LATENCIES = ("time_to_first_token", "inter_token_latency", "time_per_output_token", "end_to_end")
_GREEDY = {"temperature": 0.0, "ignore_eos": True}


class Server:
    """A server's process, up when constructed. Raises RuntimeError with the end of its output where it fails."""

    def __init__(self, engine: Engine) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  open as long as the server
        begin = time.perf_counter()
        self._process = subprocess.Popen(
            [word.format(port=port) for word in engine.server],
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, **engine.environment},
            start_new_session=True,
        )
        try:
            self.model = self._wait(begin)
        except BaseException:
            self.close()
            raise
        self.start_seconds = time.perf_counter() - begin

    def close(self) -> None:
        """End the server and the processes that it started."""
        for kind, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
            try:
                os.killpg(self._process.pid, kind)
                self._process.wait(patience)
                break
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue

    def _wait(self, begin: float) -> str:
        """Until it generates; returns the model's name."""

        async def generates() -> str:
            async with Client(self.url, timeout=60.0) as client:
                client.model = (await client.models())[0]
                outcome = await client.ask(0, {"prompt": "Hello", "max_tokens": 2}, client.now())
                if outcome.error is not None:
                    raise UserError(f"{outcome.error}: {outcome.detail}")
                return client.model

        while True:
            try:
                return asyncio.run(generates())
            except UserError as error:
                if self._process.poll() is not None or time.perf_counter() - begin > _START_SECONDS:
                    self._log.seek(0)
                    raise RuntimeError(f"{error}; its output ends: {self._log.read()[-1500:]}") from None
                time.sleep(0.5)


def measure(server: Server, case: str, number: int) -> dict[str, Any]:
    """Figures of one case, in seconds and tokens. number: of the round; another asks other prompts."""
    kind, _, size = case.partition(" ")
    seed = 1000 * number
    if kind == "closed":
        return asyncio.run(_closed(server, int(size), seed + int(size)))
    return asyncio.run(_shared(server, seed + 100) if kind == "shared" else _long(server, seed + 200))


async def _closed(server: Server, concurrency: int, seed: int) -> dict[str, Any]:
    prompts = Excerpts(read_text(None), *WORDS, NEW_TOKENS, seed=seed)
    async with _client(server) as client:
        load = ClosedLoop(concurrency)
        outcomes = await run_load(client, prompts, load, n_requests=CLOSED[concurrency], seconds=None)
    found = figures(_all_well(outcomes))
    return {name: found[name] for name in (*_RATES, *_LATENCIES)}


async def _shared(server: Server, seed: int) -> dict[str, Any]:
    """Time to first token of the first request with a prefix, and of those after it; then eight at a time."""
    prompts = Excerpts(read_text(None), 10, 40, 16, SHARED_WORDS, seed=seed)
    async with _client(server) as client:
        first = await run_load(client, prompts, ClosedLoop(1), n_requests=5, seconds=None)
        crowd = await run_load(client, prompts, ClosedLoop(8), n_requests=8, seconds=None, first=5)
    cold, *hot = [outcome.first_token_seconds or 0.0 for outcome in _all_well(first)]
    found = figures(_all_well(crowd))
    return {
        "prompt_tokens": first[0].n_prompt,
        "cold_first_token": cold,
        "hot_first_token": statistics.median(hot),
        "speedup": cold / statistics.median(hot),
        "crowd_first_token": found["time_to_first_token"],
        "crowd_tokens_per_second": found["generated_tokens_per_second"],
    }


async def _long(server: Server, seed: int) -> dict[str, Any]:
    """A long prompt arrives while others decode: the gaps between their tokens before, and while it is read."""
    few = Excerpts(read_text(None), 10, 40, DECODED, seed=seed)
    long = Excerpts(read_text(None), LONG_WORDS, LONG_WORDS, 2, seed=seed + 1)
    async with _client(server) as client:
        begin = client.now()
        decoding = run_load(client, few, ClosedLoop(DECODERS), n_requests=DECODERS, seconds=None)
        decoders = asyncio.create_task(decoding)
        await asyncio.sleep(_BEFORE_LONG)
        sent = client.now() - begin
        (late,) = _all_well(await run_load(client, long, ClosedLoop(1), n_requests=1, seconds=None))
        outcomes = _all_well(await decoders)
    begun = max(outcome.arrivals[0] for outcome in outcomes)
    there = sent + late.arrivals[0]
    pairs = [pair for outcome in outcomes for pair in pairwise(outcome.arrivals)]
    before = [after - at for at, after in pairs if at >= begun and after <= sent]
    during = [after - at for at, after in pairs if after > sent and at < there]
    if len(before) < DECODERS or not during:
        raise RuntimeError(f"{len(before)} gaps before the long prompt, {len(during)} while it was read: too few")
    usual, slow = statistics.median(before), statistics.quantiles(during, n=100, method="inclusive")[98]
    return {
        "prompt_tokens": late.n_prompt,
        "first_token": late.first_token_seconds,
        "gap_before": usual,
        "gap_during": statistics.median(during),
        "longest_during": max(during),
        "delay": statistics.median(during) / usual,
        "mean_delay": statistics.mean(during) / usual,
        "p99_delay": slow / usual,
        "longest_delay": max(during) / usual,
    }


def _client(server: Server) -> Client:
    return Client(server.url, server.model, extra=_GREEDY, timeout=120.0)


def _all_well(outcomes: list[Outcome]) -> list[Outcome]:
    wrong = next((outcome for outcome in outcomes if outcome.error is not None), None)
    if wrong is not None:
        raise RuntimeError(f"request {wrong.index}: {wrong.error}: {wrong.detail}")
    return outcomes
