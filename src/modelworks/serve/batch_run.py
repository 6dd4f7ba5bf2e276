"""An offline batch, answered by the server's own application without a network: what is valid, what is refused and how
answers look is the same as over HTTP, because it is the same code.

The engine has a process of its own. Where it dies it is started again, and the requests that it worked on are asked
again, then one at a time, so that one that kills engines takes no others with it; it is answered with the error.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp

from modelworks.serve.api import ServerOptions, Service, build_app
from modelworks.serve.batch_file import BatchAnswers, BatchRequest
from modelworks.serve.supervisor import Supervisor

_ATTEMPTS = 3
_POLL_SECONDS = 0.05
# Nobody waits at the other end: a request has all the time that it needs.
_NO_HURRY = 30 * 86_400.0
OPTIONS = ServerOptions(body_limit=256 * 2**20, deadline=_NO_HURRY, longest_deadline=_NO_HURRY)


class EngineKeepsDying(Exception):
    """The engine was given up. What is answered is kept."""


@dataclass
class BatchCounts:
    """Of the requests answered now. errors: how many of each code or status; tokens: of those that went well."""

    completed: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    generated_tokens: int = 0

    @property
    def failed(self) -> int:
        return self.errors.total()


async def run_batch(
    engine: Supervisor,
    service: Service,
    requests: Iterator[BatchRequest],
    answers: BatchAnswers,
    *,
    in_flight: int,
    tell: Callable[[BatchCounts], None] = lambda counts: None,
) -> BatchCounts:
    """Answer all requests that have no answer yet, so many at a time, in the order in which they finish.

    tell: is called after each. Raises EngineKeepsDying where no engine is left to answer.
    """
    door, counts = _Door(build_app(service), engine), BatchCounts()

    async def work() -> None:
        for request in requests:  # shared by all: each takes the next
            if request.id in answers.answered:
                continue
            if request.problem is not None:
                code, message = request.problem
                answers.write(request, None, {"code": code, "message": message})
                counts.errors[code] += 1
            else:
                response = await door.answer(request)
                answers.write(request, response, None)
                _count(counts, response)
            tell(counts)

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(in_flight):
                tasks.create_task(work())
    except ExceptionGroup as group:  # all of them met the same: no engine, or a full disk
        raise group.exceptions[0] from None
    return counts


class _Door:
    """Where requests go in, however often it takes."""

    def __init__(self, app: ASGIApp, engine: Supervisor) -> None:
        self._app, self._engine = app, engine
        self._inside = 0
        self._suspects = asyncio.Lock()

    async def answer(self, request: BatchRequest) -> dict[str, Any]:
        response = await self._ask_where_there_is_room(request)
        for _ in range(_ATTEMPTS - 1):
            if response["status_code"] == 503:
                async with self._suspects:
                    response = await self._ask_where_there_is_room(request)
        return response

    async def _ask_where_there_is_room(self, request: BatchRequest) -> dict[str, Any]:
        """A full queue is waited for. Who is refused with nobody else inside will always be."""
        while True:
            alone = self._inside == 0
            response = await self._ask(request)
            if response["status_code"] != 429 or alone:
                return response
            await asyncio.sleep(_POLL_SECONDS)

    async def _ask(self, request: BatchRequest) -> dict[str, Any]:
        """The application's response, once there is an engine."""
        while self._engine.health().state != "running":
            if self._engine.gave_up.is_set():
                raise EngineKeepsDying(self._engine.health().error or "")
            await asyncio.sleep(_POLL_SECONDS)
        self._inside += 1
        try:
            status, headers, content = await _call(self._app, request.url, request.body)
        finally:
            self._inside -= 1
        request_id = headers.get(b"x-request-id", b"").decode() or request.id
        return {"status_code": status, "request_id": request_id, "body": json.loads(content)}


async def _call(app: ASGIApp, path: str, body: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
    """One POST through the application: (status, headers, content). The caller never hangs up."""
    sent = [{"type": "http.request", "body": body, "more_body": False}]
    status, headers, content = 0, dict[bytes, bytes](), bytearray()

    async def receive() -> MutableMapping[str, Any]:
        return sent.pop() if sent else await asyncio.get_running_loop().create_future()

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            headers.update(message["headers"])
        else:
            content.extend(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": ("batch", None),
    }
    try:
        await app(scope, receive, send)
    except Exception:  # a defect of ours: the application has answered (500) and logged it before it raises
        if not content:
            raise
    return status, headers, bytes(content)


def _count(counts: BatchCounts, response: dict[str, Any]) -> None:
    if response["status_code"] != 200:
        told = response["body"].get("error", {})
        counts.errors[f"HTTP {response['status_code']} {told.get('code') or told.get('param') or ''}".rstrip()] += 1
        return
    counts.completed += 1
    usage = response["body"].get("usage") or {}
    counts.prompt_tokens += usage.get("prompt_tokens", 0)
    counts.generated_tokens += usage.get("completion_tokens", 0)
