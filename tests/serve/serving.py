"""A server in a thread of the test's process, on a port of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from modelworks.serve.api import Server, ServerOptions, Service, bind, url_of
from modelworks.serve.supervisor import Supervisor


@dataclass
class Serving:
    url: str
    service: Service
    server: Server
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function in the server's event loop."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    def wait_for(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        """Until `condition` holds in the server's event loop."""

        async def wait() -> None:
            async with asyncio.timeout(seconds):
                while not condition():
                    await asyncio.sleep(0.005)

        asyncio.run_coroutine_threadsafe(wait(), self.loop).result(seconds + 10)


@contextmanager
def serving(build: Any, *, process: bool = False, first_pause: float = 0.01, **options: Any) -> Iterator[Serving]:
    started: list[Serving] = []
    failed: list[BaseException] = []
    ready = threading.Event()

    def body() -> None:
        async def main() -> None:
            engine = Supervisor(build, process=process, first_pause=first_pause)
            try:
                service = Service(await engine.start(), engine, ServerOptions(**options))
                bound = bind("127.0.0.1", 0)
                server = Server(service, on_ready=ready.set)
                loop = asyncio.get_running_loop()
                started.append(Serving(url_of(bound), service, server, loop, threading.current_thread()))
                await server.serve([bound])
            finally:
                await engine.stop()

        try:
            asyncio.run(main())
        except BaseException as error:
            failed.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    ready.wait(60)
    if failed:
        raise failed[0]
    try:
        yield started[0]
    finally:
        started[0].server.should_exit = True
        thread.join(20)
        if failed:
            raise failed[0]
