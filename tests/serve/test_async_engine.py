"""Streams from the engine's thread: whole, apart, and gone as soon as nobody listens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from token_cache import TokenCache, greedy

from modelworks.config import UserError
from modelworks.serve import AsyncEngine, Delta, EngineOptions, Overloaded, Request, SamplingParams
from modelworks.serve.core import EngineCore

T = TypeVar("T")
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=None)


def engine(**options: Any) -> AsyncEngine:
    settings = EngineOptions(**{"block_size": 4, "token_budget": 24, "max_running": 8, **options})
    return AsyncEngine(EngineCore(TokenCache(1000, 4), settings, max_model_len=3000))


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 60))


async def gathered(engine: AsyncEngine, request: Request) -> list[Delta]:
    return [delta async for delta in engine.stream(request)]


async def until_free(engine: AsyncEngine) -> None:
    while (stats := await engine.stats()).n_free_blocks != stats.n_blocks:
        await asyncio.sleep(0)


def test_streams_side_by_side_have_their_own_tokens() -> None:
    async def work() -> None:
        prompts = [[n + 4, 5] for n in range(12)]
        streams = [gathered(served, Request(str(n), prompt, GREEDY)) for n, prompt in enumerate(prompts)]
        for prompt, deltas in zip(prompts, await asyncio.gather(*streams), strict=True):
            assert [token for delta in deltas for token in delta.token_ids] == greedy(prompt, 8)
            assert [delta.last for delta in deltas] == [False] * 7 + [True]

    served = engine()
    run(work())
    served.close()


def test_a_stream_that_is_left_or_cancelled_frees_its_blocks() -> None:
    async def work() -> None:
        stream = served.stream(Request("left", [5, 6], ENDLESS))
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        await until_free(served)
        task = asyncio.create_task(gathered(served, Request("cancelled", [5, 6], ENDLESS)))
        while not (await served.stats()).n_running:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_free(served)
        again = await gathered(served, Request("left", [5, 6], GREEDY))  # its name is free, and it hears its own only
        assert [token for delta in again for token in delta.token_ids] == greedy([5, 6], 8)

    served = engine()
    run(work())
    served.close()


def test_cancelling_at_any_moment_leaves_nothing_behind() -> None:
    async def work() -> None:
        for n in range(60):
            task = asyncio.create_task(gathered(served, Request(str(n), [5, 6], ENDLESS)))
            for _ in range(n % 6):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await until_free(served)
        assert (await gathered(served, Request("last", [5, 6], GREEDY)))[-1].last

    served = engine()
    run(work())
    served.close()


def test_a_stream_left_before_its_end_was_read_ends_no_other_of_the_same_id() -> None:
    async def work() -> None:
        left = served.stream(Request("same", [5, 6], GREEDY))
        await anext(left)
        await until_free(served)  # the request has ended; its last deltas wait to be read
        again = served.stream(Request("same", [5, 6], SamplingParams(temperature=0.0, max_tokens=400)))
        deltas = [await anext(again)]
        await left.aclose()  # type: ignore[attr-defined]
        deltas += [delta async for delta in again]
        assert [token for delta in deltas for token in delta.token_ids] == greedy([5, 6], 400)

    served = engine()
    run(work())
    served.close()


def test_who_aborts_another_ends_its_stream() -> None:
    async def work() -> None:
        task = asyncio.create_task(gathered(served, Request("one", [5, 6], ENDLESS)))
        while not (await served.stats()).n_running:
            await asyncio.sleep(0)
        await served.abort("one")
        assert (await task)[-1].finish_reason == "abort"
        await served.abort("one")

    served = engine()
    run(work())
    served.close()


def test_what_is_refused_raises_where_it_was_asked_and_touches_nobody() -> None:
    async def work() -> None:
        first = asyncio.create_task(gathered(served, Request("one", [5, 6], ENDLESS)))
        while not (await served.stats()).n_running:
            await asyncio.sleep(0)
        with pytest.raises(UserError, match="in progress"):
            await gathered(served, Request("one", [5], GREEDY))
        with pytest.raises(UserError, match="no tokens"):
            await gathered(served, Request("two", [], GREEDY))
        second = asyncio.create_task(gathered(served, Request("waits", [5, 6], GREEDY)))
        while not (await served.stats()).n_waiting:
            await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await gathered(served, Request("three", [5, 6], GREEDY))
        await served.abort("one")
        assert (await first)[-1].finish_reason == "abort"
        assert (await second)[-1].finish_reason == "length"

    served = engine(max_running=1, max_waiting=1)
    run(work())
    served.close()


def test_drain_lets_what_runs_end_and_takes_nothing_more() -> None:
    async def work() -> None:
        task = asyncio.create_task(gathered(served, Request("one", [5, 6], GREEDY)))
        endless = asyncio.create_task(gathered(served, Request("endless", [5, 6], ENDLESS)))
        while not (await served.stats()).n_running:
            await asyncio.sleep(0)
        before = served.heartbeat
        assert not await served.drain(0.0)
        with pytest.raises(UserError, match="about to stop"):
            await gathered(served, Request("late", [5, 6], GREEDY))
        assert (await task)[-1].finish_reason == "length"
        assert served.heartbeat >= before
        await served.abort("endless")
        await endless
        assert await served.drain(30.0)
        assert time.monotonic() - served.heartbeat < 30.0

    served = engine()
    run(work())
    served.close()
    served.close()
    with pytest.raises(UserError):
        run(gathered(served, Request("late", [5, 6], GREEDY)))


def test_closing_ends_the_streams_that_are_left() -> None:
    async def work() -> None:
        task = asyncio.create_task(gathered(served, Request("one", [5, 6], ENDLESS)))
        while not (await served.stats()).n_running:
            await asyncio.sleep(0)
        await asyncio.to_thread(served.close)
        assert (await task)[-1].finish_reason == "abort"

    served = engine()
    run(work())
