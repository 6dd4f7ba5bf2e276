"""One client's connection: how long it may keep the server waiting, and what it is told where it may not be.

uvicorn waits for the head of a request, however long, and for a client that does not read its answer, as long as the
connection lasts. Here each has `client_timeout` seconds (a body's time is the gate's), and a head has a size.
Connections beyond `max_connections` are answered with a 503, and beyond a few more are closed at once, so that those
that are served go on.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from modelworks.serve.api.errors import ApiError
from modelworks.serve.api.options import ServerOptions

_NOT_HTTP = "what was sent is no HTTP/1.1 request"
LONGEST_HEAD = 64 * 2**10  # bytes, beside what came together with its beginning
ANSWERED_BEYOND = 64  # connections over the limit that are told so; more are closed without a word


class Connection(HttpToolsProtocol):
    def __init__(self, *args: Any, options: ServerOptions, **named: Any) -> None:
        super().__init__(*args, **named)
        self._most, self._patience = options.max_connections, options.client_timeout
        self._head_timer: asyncio.TimerHandle | None = None  # runs while the head of a request is waited for
        self._read_timer: asyncio.TimerHandle | None = None  # runs while the client does not read
        self._answered: RequestResponseCycle | None = None  # what is worked on; `cycle` is the last that came
        self._reads_head, self._head_size = False, 0  # some of a head is there, and how much came of it since

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._most + ANSWERED_BEYOND:
            transport.abort()
        elif len(self.connections) > self._most:
            self.app = _too_many
        self._head_timer = self.loop.call_later(self._patience, self._no_head)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        super().connection_lost(exc)
        self._leave()  # uvicorn tells it to the last of several requests that came together only

    def data_received(self, data: bytes) -> None:
        if self._head_timer is None and not self._busy:
            self._head_timer = self.loop.call_later(self._patience, self._no_head)
        read_head = self._reads_head
        super().data_received(data)
        if read_head and self._reads_head:
            self._head_size += len(data)
            if self._head_size > LONGEST_HEAD:
                self._refuse(ApiError(431, f"the head of the request is longer than {LONGEST_HEAD} bytes"))
        if self._busy and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reads_head, self._head_size = True, 0

    def on_headers_complete(self) -> None:
        self._reads_head = False
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._read_timer = self.loop.call_later(self._patience, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def send_400_response(self, msg: str) -> None:
        """What came is not HTTP."""
        self._refuse(ApiError(400, _NOT_HTTP))

    @property
    def _busy(self) -> bool:
        """Whether a request is worked on: its head is there and its answer has not ended."""
        return self.cycle is not None and not self.cycle.response_complete

    def _no_head(self) -> None:
        if self._reads_head:
            message = f"the head of the request did not come within {self._patience:g} s"
            self._refuse(ApiError(408, message, code="client_too_slow"))
        else:  # nothing came
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """The last that is said on this connection."""
        cycle = self._answered
        if cycle is None or cycle.response_complete or not (cycle.response_started or self.pipeline):
            # else it would stand in the middle of an answer
            self.transport.write(_written(error))
        self._leave()  # a request whose body turned out wrong has been answered with it
        self.transport.close()

    def _leave(self) -> None:
        """Whoever works on a request learns that nobody waits for it."""
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _stop_timers(self) -> None:
        for timer in (self._head_timer, self._read_timer):
            if timer is not None:
                timer.cancel()


async def _too_many(scope: Scope, receive: Receive, send: Send) -> None:
    response = ApiError(503, "too many connections", code="too_many_connections", retry_after=1).response()
    response.headers["Connection"] = "close"
    await response(scope, receive, send)


def _written(error: ApiError) -> bytes:
    """The whole response, for where there is no request to answer in uvicorn's way."""
    response = error.response()
    response.headers["Connection"] = "close"
    head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n".encode()
    return (
        head
        + b"".join(name + b": " + value + b"\r\n" for name, value in response.raw_headers)
        + b"\r\n"
        + bytes(response.body)
    )
