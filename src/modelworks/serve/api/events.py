"""Server-sent events: one JSON object each, `[DONE]` at the end, and nothing kept running for a client that left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from modelworks.serve.api.errors import ApiError

DONE = b"data: [DONE]\n\n"
_Result = TypeVar("_Result")


def event(value: dict[str, Any]) -> bytes:
    """One event. JSON without line breaks, so that it is one `data:` line."""
    return b"data: " + json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream(Response):
    """Sends `chunks` as they come. on_close: called however it ends, also where nothing was ever sent.

    An ApiError raised by `chunks` becomes the last event before `[DONE]`: the status line has long gone out. longest:
    seconds until a client that does not read is left.
    """

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncIterator[bytes], *, on_close: Callable[[], None], headers: dict[str, str], longest: float
    ) -> None:
        self._chunks, self._on_close, self._longest = chunks, on_close, longest
        self.status_code, self.background, self.body = 200, None, b""
        self.init_headers({**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            pump = self._pump(send)
            async with asyncio.timeout(self._longest):
                await until_disconnect(receive, pump)
        except TimeoutError:
            pass
        finally:
            self._on_close()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            last = DONE
        except ApiError as error:
            last = event(error.body()) + DONE
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def until_disconnect(receive: Receive, work: Awaitable[_Result]) -> _Result | None:
    """The result of `work`, or None if the client left before it: then the work is cancelled."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
