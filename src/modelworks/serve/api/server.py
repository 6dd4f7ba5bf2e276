"""Runs the application: binds, prints nothing, drains when it is told to end.

At SIGTERM or Ctrl-C the server says that it is not ready and takes no new requests, but it goes on listening, so that
who asks is told so (503, Retry-After) instead of finding a closed door. Those that run may finish, for `grace` seconds
at most; then they are aborted, and all ends. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import cast

import uvicorn

from modelworks.config import UserError
from modelworks.serve.api.app import build_app
from modelworks.serve.api.connection import ANSWERED_BEYOND, Connection
from modelworks.serve.api.service import Service
from modelworks.serve.supervisor import Supervisor

_BACKLOG = 2048
_OTHER_FILES = 128 + ANSWERED_BEYOND  # open files besides the connections that are served
_LAST_WORDS = 2.0  # seconds that aborted requests have to tell their clients


def bind(host: str, port: int) -> socket.socket:
    """A socket at host:port (0: any free port), not yet listening. Raises UserError where that cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named, because asyncio turns Nagle's algorithm off only then: 40 ms a response else.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise UserError(_cannot_bind(host, port, error)) from None
    return bound


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def connections_allowed(asked: int | None, default: int = 2048) -> int:
    """How many connections may be served at once: as many as `asked`, else `default` or what the number of open files
    allows. The process's own limit of these is raised as far as that needs. Raises UserError where it cannot be."""
    if asked is not None and asked < 1:
        raise UserError(f"--max-connections: got {asked}, expected at least 1")
    wanted = (default if asked is None else asked) + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if asked is not None and most < wanted:
        raise UserError(
            f"--max-connections: got {asked}, but this process may open {hard} files (ulimit -Hn); "
            f"expected at most {max(hard - _OTHER_FILES, 1)}"
        )
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(most - _OTHER_FILES, 1)


class Server(uvicorn.Server):
    """Serves `service` on a bound socket until a signal, or until its engine is given up."""

    def __init__(self, service: Service, *, on_ready: Callable[[], None] = lambda: None) -> None:
        config = uvicorn.Config(
            build_app(service),
            http=cast(type[asyncio.Protocol], partial(Connection, options=service.options)),
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=5,
        )
        super().__init__(config)
        self._service, self._on_ready = service, on_ready
        self._draining: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:  # two that were bound before either listened; the other one was first
            host, port = (sockets or [])[0].getsockname()[:2]
            raise UserError(_cannot_bind(host, port, error)) from None
        self._watching = asyncio.ensure_future(self._watch())
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal. It is not raised again at the end: having drained is a success."""
        if self._service.draining:
            self.should_exit = self.force_exit = True
        else:
            self._loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Take no new requests, let those that run finish, then end."""
        if self._draining is None:
            self._service.draining = True
            self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        engine = self._service.engine
        try:
            async with asyncio.timeout(self._service.options.grace):
                await self._idle()
        except TimeoutError:
            engine.abort_all()
            try:
                async with asyncio.timeout(_LAST_WORDS):
                    await self._idle()
            except TimeoutError:
                pass
        self.should_exit = True

    async def _idle(self) -> None:
        while self._service.engine.n_requests and not self.should_exit:
            await asyncio.sleep(0.05)

    async def _watch(self) -> None:
        await self._service.engine.gave_up.wait()
        self.should_exit = True


async def serve(service: Service, bound: socket.socket, *, on_ready: Callable[[], None] = lambda: None) -> bool:
    """Serve until told to end. False: it ended because its engine kept dying."""
    engine: Supervisor = service.engine
    try:
        await Server(service, on_ready=on_ready).serve([bound])
    finally:
        await engine.stop()
    return not engine.gave_up.is_set()


def _cannot_bind(host: str, port: int, error: OSError | OverflowError) -> str:
    if isinstance(error, OverflowError):
        return f"--port: got {port}, expected 0 (any free one) to 65535"
    if error.errno == errno.EADDRINUSE:
        return f"--port: {port} is in use on {host}; expected a free one, such as 0 (any free port)"
    if error.errno == errno.EACCES:
        return f"--port: {port} needs privileges; expected one from 1024 on"
    return f"--host: cannot listen on {host} port {port} ({error.strerror or error})"
