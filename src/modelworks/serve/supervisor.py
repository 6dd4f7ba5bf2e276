"""Keeps an engine running in a process of its own: notices its end, tells it, and starts another.

The process is spawned, so it shares nothing with the front but a pipe. When it ends without having been asked to
(killed, out of memory, a defect), the requests it worked on end with an error, and after a pause that doubles each time
another is started. After `RESTARTS` ends within `WINDOW` seconds that is given up: what keeps dying has a cause that
another start does not heal.

`process=False` runs the same loop in a thread of this process instead: for tests, and where memory is short.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess

from modelworks.config import UserError
from modelworks.serve.engine_client import EngineClient, EngineGone, RequestStream
from modelworks.serve.engine_loop import BuildEngine, engine_process, run_engine
from modelworks.serve.messages import News
from modelworks.serve.request import Request
from modelworks.serve.served_model import ServedModel
from modelworks.serve.stats import EngineStats

RESTARTS = 5
WINDOW = 600.0  # seconds
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds
_STOP_GRACE = 5.0  # seconds that an engine has for its step when it is told to stop
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Health:
    """state: starting, running, restarting, stopped, or failed (given up). silent_for: seconds since the engine last
    said anything. error: of its last end. n_restarts: so far."""

    state: str
    silent_for: float
    n_restarts: int
    error: str | None
    pid: int | None


class Supervisor:
    """build: makes the engine, in its process (it must be picklable). first_pause: seconds before the first restart."""

    def __init__(
        self,
        build: BuildEngine,
        *,
        process: bool = True,
        first_pause: float = FIRST_PAUSE,
    ) -> None:
        self._build, self._as_process, self._first_pause = build, process, first_pause
        self.on_news: Callable[[News], None] = lambda news: None  # called with what each step brought
        self._client: EngineClient | None = None
        self._process: BaseProcess | None = None
        self._thread: threading.Thread | None = None
        self._state = "starting"
        self._error: str | None = None
        self._ends: deque[float] = deque()  # when engines ended unasked, within the window
        self._n_restarts = 0
        self._restart: asyncio.Task[None] | None = None
        self.on_end: Callable[[], None] = lambda: None  # called when an engine has ended unasked
        self.gave_up = asyncio.Event()

    async def start(self) -> ServedModel:
        """Start the engine; returns when it is ready. Raises UserError for what is the user's to fix, else EngineGone
        where it cannot start."""
        return await self._start()

    def open(self, requests: Sequence[Request]) -> RequestStream:
        """Submit requests and follow them. Raises EngineGone while there is no engine."""
        if self._client is None or self._state != "running":
            raise EngineGone(f"the engine is not running ({self._state})")
        return self._client.open(requests)

    def abort(self, request_id: str) -> bool:
        """End a request, wherever it is. False: none of that name is known (any more)."""
        return self._client is not None and self._client.abort(request_id)

    def abort_all(self) -> None:
        for request_id in self._client.request_ids() if self._client else ():
            self.abort(request_id)

    @property
    def n_requests(self) -> int:
        return self._client.n_requests if self._client else 0

    @property
    def stats(self) -> EngineStats:
        return self._client.stats if self._client else EngineStats()

    def health(self) -> Health:
        silent = time.monotonic() - self._client.heard if self._client else 0.0
        pid = self._process.pid if self._process else None
        return Health(self._state, silent, self._n_restarts, self._error, pid)

    async def stop(self) -> None:
        """End the engine, now. What it still works on is lost."""
        if self._state != "failed":
            self._state = "stopped"
        if self._restart is not None:
            self._restart.cancel()
        if self._client is not None:
            self._client.stop()
        if self._process is not None:
            if self._client is None or not self._client.ready.done():
                self._process.kill()  # it loads a model, and would not listen before it has
            await asyncio.to_thread(_join, self._process)
        if self._thread is not None and self._client is not None and self._client.ready.done():
            # The interpreter must not end in the middle of a step: torch's threads would abort the process.
            await asyncio.to_thread(self._thread.join, _STOP_GRACE)

    async def _start(self) -> ServedModel:
        ours, theirs = multiprocessing.Pipe()
        if self._as_process:
            # The child of a daemon dies with its parent also where nobody tells it to; it notices the pipe's end too.
            context = multiprocessing.get_context("spawn")
            self._process = context.Process(
                target=engine_process, args=(theirs, self._build), name="engine", daemon=True
            )
            await asyncio.to_thread(self._process.start)
            theirs.close()  # else its end would not be seen
        else:
            self._thread = threading.Thread(target=run_engine, args=(theirs, self._build), name="engine", daemon=True)
            self._thread.start()
        self._client = EngineClient(ours, on_news=lambda news: self.on_news(news), on_end=self._ended)
        model = (await self._client.ready).model
        if self._client.ended:  # `_ended` was called before the state was one that it heeds
            why = f": {self._client.failure.message}" if self._client.failure else ""
            raise EngineGone(f"the engine ended as soon as it was ready{why}")
        self._state = "running"
        return model

    def _ended(self) -> None:
        """The engine is gone. Before it was ready once, its start failed, and whoever started it is told."""
        if self._state != "running":
            return
        failure = self._client.failure if self._client else None
        self._error = failure.message if failure else "the engine's process ended"
        now = time.monotonic()
        self._ends.append(now)
        while self._ends[0] < now - WINDOW:
            self._ends.popleft()
        self._state = "restarting"
        self.on_end()
        self._restart = asyncio.ensure_future(self._start_again(told=failure is not None))

    async def _start_again(self, *, told: bool) -> None:
        """told: whether the engine said itself why it ended."""
        if self._process is not None:  # its pipe closes a moment before it has ended, or it may be stuck at its end
            await asyncio.to_thread(_join, self._process)
            self._error = self._error if told else f"the engine's process ended ({_how(self._process)})"
        _LOG.error("%s", self._error)
        while len(self._ends) <= RESTARTS:
            await asyncio.sleep(min(self._first_pause * 2 ** (len(self._ends) - 1), LONGEST_PAUSE))
            self._n_restarts += 1
            try:
                await self._start()
                _LOG.warning("the engine runs again (restart %d)", self._n_restarts)
                return
            except (UserError, EngineGone) as error:
                self._error = str(error)
                self._ends.append(time.monotonic())
                _LOG.error("%s", self._error)
        self._state = "failed"
        _LOG.error("the engine ended %d times in %.0f s: given up", len(self._ends), WINDOW)
        self.gave_up.set()


def _how(process: BaseProcess) -> str:
    code = process.exitcode
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def _join(process: BaseProcess) -> None:
    process.join(_STOP_GRACE)
    if process.exitcode is None:
        process.kill()
        process.join()
