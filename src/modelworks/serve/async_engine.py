"""`AsyncEngine`: streams of deltas for asyncio, from an engine that steps in a thread of its own.

The engine belongs to that thread: what others want of it waits in a queue and is done between two steps. So a request
that is cancelled is gone before the next step begins, and nothing needs a lock. Where nothing is to be done, the thread
sleeps until something is asked, and says now and then that it is alive.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from modelworks.config import UserError
from modelworks.serve.core import EngineCore
from modelworks.serve.request import Delta, Request
from modelworks.serve.stats import EngineStats

_T = TypeVar("_T")
_IDLE_SECONDS = 0.5  # between two signs of life where nothing is to be done
_Inbox = tuple[asyncio.AbstractEventLoop, "asyncio.Queue[Delta | Exception]"]


class AsyncEngine:
    """Takes the engine over: nobody else may touch it before `close`, which closes it too."""

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine
        self._asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._inboxes: dict[str, _Inbox] = {}  # the thread's own
        self._at_rest: list[Future[None]] = []  # the thread's own: who waits until nothing is in progress
        self._closing = self._draining = False
        self._lock = threading.Lock()  # of `_ended`: nothing is asked of a thread that will not look any more
        self._ended, self._why_ended = False, "the engine is closed"
        self.heartbeat = time.monotonic()  # when the thread was last between two steps; of the monotonic clock
        self._thread = threading.Thread(target=self._loop, name="modelworks-engine", daemon=True)
        self._thread.start()

    async def stream(self, request: Request) -> AsyncIterator[Delta]:
        """The request's deltas as they come; the last has `last` set. Leaving the loop early, or the task's being
        cancelled, aborts the request before the next step.

        Raises UserError or Overloaded where the engine does not take it (`EngineCore.submit`), be it only after its
        structure was compiled, or where it is draining.
        """
        if self._draining:
            raise UserError("the engine is about to stop and takes no more requests")
        inbox: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        loop, finished = asyncio.get_running_loop(), False

        def submit() -> None:
            self._engine.submit(request)
            self._inboxes[request.id] = (loop, inbox)

        def abort() -> None:
            if self._inboxes.get(request.id) == (loop, inbox):  # else it has ended, and its id may be another's by now
                self._engine.abort(request.id, told=False)
                del self._inboxes[request.id]

        try:
            await asyncio.wrap_future(self._ask(submit))
            while not finished:
                delta = await inbox.get()
                if isinstance(delta, Exception):
                    raise delta
                finished = delta.last
                if delta.refusal is not None:
                    raise UserError(delta.refusal)
                yield delta
        finally:
            if not finished:
                self._ask(abort)

    async def abort(self, request_id: str) -> None:
        """The request ends with "abort", which its stream still tells; one that is not known is left alone."""
        await asyncio.wrap_future(self._ask(lambda: self._engine.abort(request_id)))

    async def stats(self) -> EngineStats:
        """As of the next moment between two steps."""
        return await asyncio.wrap_future(self._ask(self._engine.stats))

    async def drain(self, grace: float) -> bool:
        """Takes no more requests, and waits for those in progress, `grace` seconds at most. Whether all have ended."""
        self._draining = True
        rest: Future[None] = Future()
        self._ask(lambda: self._at_rest.append(rest))
        try:
            await asyncio.wait_for(asyncio.wrap_future(rest), grace)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Aborts what is in progress, which its streams still tell, and ends the thread and the engine."""
        self._draining = True

        def stop() -> None:
            self._closing = True

        self._ask(stop)
        self._thread.join()

    def _ask(self, function: Callable[[], _T]) -> Future[_T]:
        """Have the thread do this between two steps."""
        future: Future[_T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():  # whoever asked has been cancelled meanwhile
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        with self._lock:
            if self._ended:
                future.set_exception(UserError(self._why_ended))
            else:
                self._asked.put(run)
        return future

    def _loop(self) -> None:
        engine = self._engine
        try:
            while not self._closing:
                self.heartbeat = time.monotonic()
                self._do_what_was_asked(wait=not engine.has_work)
                if engine.has_work:
                    self._deliver(engine.step())
                elif self._at_rest:
                    self._tell_of_rest()
        except Exception as error:  # the streams must not wait for ever
            logging.getLogger(__name__).exception("the engine's loop ended")
            self._why_ended = f"the engine has ended: {error}"
            for loop, inbox in self._inboxes.values():
                _tell(loop, partial(inbox.put_nowait, error))
            engine.close()
        else:
            engine.close()
            self._deliver(engine.step())
        finally:
            with self._lock:
                self._ended = True
            self._do_what_was_asked(wait=False)
            self._tell_of_rest()

    def _do_what_was_asked(self, *, wait: bool) -> None:
        try:
            if wait:
                self._asked.get(timeout=_IDLE_SECONDS)()
            while True:
                self._asked.get_nowait()()
        except queue.Empty:
            return

    def _tell_of_rest(self) -> None:
        for future in self._at_rest:
            if future.set_running_or_notify_cancel():  # who waited may have given up
                future.set_result(None)
        self._at_rest.clear()

    def _deliver(self, deltas: list[Delta]) -> None:
        """To each event loop once, all that is for its streams."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue[Delta | Exception], Delta]]] = {}
        for delta in deltas:
            if (found := self._inboxes.get(delta.request_id)) is not None:
                by_loop.setdefault(found[0], []).append((found[1], delta))
                if delta.last:
                    del self._inboxes[delta.request_id]
        for loop, mail in by_loop.items():
            _tell(loop, partial(_put_all, mail))


def _put_all(mail: list[tuple[asyncio.Queue[Delta | Exception], Delta]]) -> None:
    for inbox, delta in mail:
        inbox.put_nowait(delta)


def _tell(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:  # the loop is closed, and with it whoever listened
        return
