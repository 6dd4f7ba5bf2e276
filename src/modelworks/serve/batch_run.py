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
    app, counts, suspects = build_app(service), BatchCounts(), asyncio.Lock()

    async def work() -> None:
        for request in requests:  # shared by all: each takes the next
            if request.id in answers.answered:
                continue
            if request.problem is not None:
                code, message = request.problem
                answers.write(request, None, {"code": code, "message": message})
                counts.errors[code] += 1
            else:
                response = await _answer(app, engine, request, suspects)
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


async def _answer(app: ASGIApp, engine: Supervisor, request: BatchRequest, suspects: asyncio.Lock) -> dict[str, Any]:
    response = await _ask(app, engine, request)
    while response["status_code"] == 429 and engine.n_requests:  # the queue is full, and others will leave it
        await asyncio.sleep(_POLL_SECONDS)
        response = await _ask(app, engine, request)
    for _ in range(_ATTEMPTS - 1):
        if response["status_code"] == 503:
            async with suspects:
                response = await _ask(app, engine, request)
    return response


async def _ask(app: ASGIApp, engine: Supervisor, request: BatchRequest) -> dict[str, Any]:
    """The application's response, once there is an engine."""
    while engine.health().state != "running":
        if engine.gave_up.is_set():
            raise EngineKeepsDying(engine.health().error or "")
        await asyncio.sleep(_POLL_SECONDS)
    status, headers, content = await _call(app, request.url, request.body)
    return {
        "status_code": status,
        "request_id": headers.get(b"x-request-id", b"").decode() or request.id,
        "body": json.loads(content),
    }


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
