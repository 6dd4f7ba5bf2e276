"""When requests are sent. A closed loop keeps so many in flight, as users do who wait for their answer; it slows down
with the server and so never shows a queue. An open loop sends at random moments of a given rate, whether or not the
server keeps up, as the rest of the world does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from modelworks.serve.bench.client import Client
from modelworks.serve.bench.outcome import Outcome
from modelworks.serve.bench.prompts import Prompts


@dataclass(frozen=True)
class ClosedLoop:
    """concurrency: requests in flight."""

    concurrency: int


@dataclass(frozen=True)
class OpenLoop:
    """A Poisson process. rate: requests a second. seed: of the moments."""

    rate: float
    seed: int = 0

    def moments(self) -> Iterator[float]:
        """Seconds since the beginning at which requests are due, without end."""
        draws, moment = random.Random(f"{self.seed} arrivals"), 0.0
        while True:
            moment += draws.expovariate(self.rate)
            yield moment


async def run_load(
    client: Client,
    prompts: Prompts,
    load: ClosedLoop | OpenLoop,
    *,
    n_requests: int | None,
    seconds: float | None,
    first: int = 0,
    tell: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Send until so many requests, or so many seconds, are over, and wait for all answers. At least one is given.

    first: number of the first prompt. tell: is given each outcome as it comes. Outcomes are in the order of sending,
    their times since the call.
    """
    numbers: Iterator[int] = iter(range(n_requests)) if n_requests is not None else count()
    outcomes: list[Outcome] = []
    begin = client.now()

    async def ask(number: int, due: float) -> None:
        outcome = await client.ask(number, prompts.body(first + number), due)
        outcomes.append(outcome)
        tell(outcome)

    async def user() -> None:
        for number in numbers:  # shared by all users: each takes the next
            if seconds is not None and client.now() - begin >= seconds:
                return
            await ask(number, client.now())

    async with asyncio.TaskGroup() as tasks:
        if isinstance(load, ClosedLoop):
            for _ in range(load.concurrency):
                tasks.create_task(user())
        else:
            for number, moment in zip(numbers, load.moments(), strict=False):
                if seconds is not None and moment >= seconds:
                    break
                await asyncio.sleep(begin + moment - client.now())
                tasks.create_task(ask(number, begin + moment))
    for outcome in outcomes:
        outcome.due, outcome.sent, outcome.ended = (t - begin for t in (outcome.due, outcome.sent, outcome.ended))
        outcome.arrivals = [moment - begin for moment in outcome.arrivals]
    return sorted(outcomes, key=lambda outcome: outcome.index)
