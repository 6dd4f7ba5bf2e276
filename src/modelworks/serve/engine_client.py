"""The front's side of the pipe: requests go in, each one's news come out as a stream of its own.

A thread reads and another writes, so that the event loop never waits for a pipe. A stream that nobody reads on is
closed, and closing it aborts what it had asked for: within one step the engine has forgotten it.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from modelworks.config import UserError
from modelworks.serve.messages import Abort, Failed, FromEngine, News, Ready, Refused, Stop, Submit, ToEngine
from modelworks.serve.request import Delta, Request
from modelworks.serve.stats import EngineStats
from modelworks.serve.waiting import Overloaded


class EngineGone(Exception):
    """The engine ended, or is not there (yet). retry_after: seconds, a guess."""

    def __init__(self, message: str, retry_after: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestStream:
    """What becomes of one or several requests: an asynchronous iterator of lists of deltas, all that came since the
    last look. Raises EngineGone where the engine ends before they do. Close it in any case."""

    def __init__(self, client: EngineClient, request_ids: Sequence[str]) -> None:
        self._client = client
        self._undecided = set(request_ids)  # neither accepted nor refused
        self._open = set(request_ids)  # no last delta yet
        self._news: list[Delta] = []
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    async def accepted(self) -> None:
        """Returns once the engine has taken all of the requests; raises what it says against one of them."""
        while self._undecided and self._error is None:
            await self._change()
        if self._error is not None and (self._undecided or not self._news):
            raise self._error

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> list[Delta]:
        while not self._news:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            await self._change()
        news, self._news = self._news, []
        return news

    def close(self) -> None:
        """Whatever has not finished is aborted. Closing twice is closing once."""
        self._client.forget(self._open)
        self._open = set()

    def put(self, delta: Delta) -> None:
        self._news.append(delta)
        if delta.last:
            self._open.discard(delta.request_id)
        self._changed.set()

    def accept(self, request_id: str) -> None:
        self._undecided.discard(request_id)
        self._changed.set()

    def fail(self, error: Exception, request_id: str | None = None) -> None:
        self._error = self._error or error
        if request_id is not None:
            self._open.discard(request_id)
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class EngineClient:
    """One life of an engine. Made in the event loop that uses it. on_news: called there with everything that comes.
    on_end: called there once, when nothing more will come."""

    def __init__(
        self,
        connection: Connection,
        *,
        on_news: Callable[[News], None] = lambda news: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._on_news, self._on_end = on_news, on_end
        self._streams: dict[str, RequestStream] = {}
        self._outbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
        self.ended = False  # nothing more will come
        self.ready: asyncio.Future[Ready] = self._loop.create_future()
        self.failure: Failed | None = None
        self.stats = EngineStats()
        self.heard = time.monotonic()  # when the engine last said anything
        for body in (self._read, self._write):
            threading.Thread(target=body, name=f"engine-{body.__name__.strip('_')}", daemon=True).start()

    @property
    def n_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    def open(self, requests: Sequence[Request]) -> RequestStream:
        """Submit `requests` and follow them. Raises EngineGone where there is nobody to take them."""
        if self.ended:
            raise EngineGone("the engine has ended")
        stream = RequestStream(self, [request.id for request in requests])
        for request in requests:
            self._streams[request.id] = stream
            self._outbox.put(Submit(request))
        return stream

    def abort(self, request_id: str) -> bool:
        """End a request; its stream gets the end of it. False: there is none of that name (any more)."""
        if request_id not in self._streams:
            return False
        self._outbox.put(Abort(request_id))
        return True

    def forget(self, request_ids: set[str]) -> None:
        """Abort them, and listen to them no more."""
        for request_id in request_ids:
            if self._streams.pop(request_id, None) is not None:
                self._outbox.put(Abort(request_id))

    def request_ids(self) -> list[str]:
        return list(self._streams)

    def stop(self) -> None:
        """Ask the engine to end at once."""
        self._outbox.put(Stop())

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                message: FromEngine = self._connection.recv()
                if not self._call(self._take, message):
                    break
        self._outbox.put(None)  # the writer ends too
        self._call(self._end)

    def _call(self, function: Callable[..., None], *arguments: object) -> bool:
        """In the event loop. False: it is closed, and nobody is left to be told."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            return False
        return True

    def _write(self) -> None:
        while (first := self._outbox.get()) is not None:
            messages: list[ToEngine] = [first]
            while not self._outbox.empty():
                if (message := self._outbox.get()) is None:
                    return
                messages.append(message)
            try:
                self._connection.send(messages)
            except OSError:  # the reader sees the end of it
                return

    def _take(self, message: FromEngine) -> None:
        self.heard = time.monotonic()
        if isinstance(message, News):
            self._take_news(message)
        elif isinstance(message, Ready):
            if not self.ready.done():  # whoever waited for it may have given up
                self.ready.set_result(message)
        else:
            self.failure = message

    def _take_news(self, news: News) -> None:
        self.stats = news.stats or self.stats
        for request_id in news.accepted:
            if request_id in self._streams:
                self._streams[request_id].accept(request_id)
        for refused in news.refused:
            if (stream := self._streams.pop(refused.request_id, None)) is not None:
                stream.fail(_refusal(refused), refused.request_id)
        for delta in news.deltas:
            if (stream := self._streams.get(delta.request_id)) is not None:  # else it was forgotten meanwhile
                if delta.last:
                    del self._streams[delta.request_id]
                stream.put(delta)
        self._on_news(news)

    def _end(self) -> None:
        self.ended = True
        self._connection.close()
        why = f": {self.failure.message}" if self.failure else ""
        for stream in {id(stream): stream for stream in self._streams.values()}.values():
            stream.fail(EngineGone(f"the engine ended while it worked on this request{why}"))
        self._streams.clear()
        if not self.ready.done():
            self.ready.set_exception(self._not_ready())
            self.ready.exception()  # whoever waits for it gets it; nobody need
        self._on_end()

    def _not_ready(self) -> Exception:
        if self.failure is None:
            return EngineGone("the engine's process ended before it was ready")
        if self.failure.by_user:
            return UserError(self.failure.message)
        return EngineGone(f"the engine could not start: {self.failure.message}")


def _refusal(refused: Refused) -> Exception:
    if refused.retry_after is None:
        return UserError(refused.message)
    return Overloaded(refused.message, refused.retry_after)
