"""The engine's side of the pipe: take what came, do a step, tell what it brought. One thread, no locks.

It ends when it is told to, or when the other side is gone (killed, for instance): no orphan keeps a model in memory.
"""

from __future__ import annotations

import contextlib
import signal
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from typing import Protocol

from modelworks.config import UserError
from modelworks.serve.messages import HEARTBEAT, Abort, Failed, News, Ready, Refused, Stop, Submit, ToEngine
from modelworks.serve.request import Delta, Request
from modelworks.serve.served_model import ServedModel
from modelworks.serve.stats import EngineStats
from modelworks.serve.waiting import Overloaded


class StepEngine(Protocol):
    """What is asked of an engine here: `serve.Engine`, or the quick one of the tests."""

    @property
    def has_work(self) -> bool: ...
    @property
    def preparing(self) -> Collection[str]: ...
    def submit(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[Delta]: ...
    def stats(self) -> EngineStats: ...
    def close(self) -> None: ...


BuildEngine = Callable[[], tuple[StepEngine, ServedModel]]


def engine_process(connection: Connection, build: BuildEngine) -> None:
    """The body of the engine's process. Ctrl-C and SIGTERM go to a whole group of processes: the front decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    run_engine(connection, build)


def run_engine(connection: Connection, build: BuildEngine) -> None:
    """Build the engine and serve the pipe until the end. What goes wrong is told to the other side."""
    try:
        engine, model = build()
        try:
            connection.send(Ready(model))
            _loop(engine, connection)
        finally:
            engine.close()
    except UserError as error:
        _last_word(connection, Failed(str(error), by_user=True))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the front is gone
    except Exception as error:
        traceback.print_exc()
        _last_word(connection, Failed(f"{type(error).__name__}: {error}", by_user=False))
    finally:
        connection.close()


def _loop(engine: StepEngine, connection: Connection) -> None:
    undecided: set[str] = set()  # requests that may still turn out wrong: neither accepted nor refused
    while True:
        news = News()
        wait = 0.0 if engine.has_work else HEARTBEAT
        while connection.poll(wait):
            wait = 0.0
            messages: list[ToEngine] = connection.recv()
            for message in messages:
                if isinstance(message, Stop):
                    return
                _take(engine, message, news)
                if isinstance(message, Submit) and message.request.id in engine.preparing:
                    undecided.add(message.request.id)
        if news.refused:  # they wait for nothing else
            connection.send(News(refused=news.refused, stats=engine.stats()))
            news.refused = []
        if engine.has_work:
            _sort(engine.step(), news)
        news.accepted += undecided - set(engine.preparing) - {refused.request_id for refused in news.refused}
        undecided &= set(engine.preparing)
        news.stats = engine.stats()
        connection.send(news)


def _sort(deltas: list[Delta], news: News) -> None:
    """What a step told: of requests that it refused, that alone."""
    for delta in deltas:
        if delta.refusal is None:
            news.deltas.append(delta)
        elif delta.last:
            news.refused.append(Refused(delta.request_id, delta.refusal, None))


def _take(engine: StepEngine, message: Submit | Abort, news: News) -> None:
    if isinstance(message, Abort):
        engine.abort(message.request_id)
        return
    request = message.request
    try:
        engine.submit(request)
        if request.id not in engine.preparing:
            news.accepted.append(request.id)
    except Overloaded as error:
        news.refused.append(Refused(request.id, str(error), error.retry_after))
    except UserError as error:
        news.refused.append(Refused(request.id, str(error), None))
    except Exception as error:  # a defect of ours that this request met; the engine has not begun with it
        traceback.print_exc()
        news.accepted.append(request.id)
        what = f"the request could not be begun: {type(error).__name__}: {error}"
        news.deltas.append(Delta(request.id, 0, finish_reason="error", error=what, last=True))


def _last_word(connection: Connection, failed: Failed) -> None:
    with contextlib.suppress(OSError):
        connection.send(failed)
