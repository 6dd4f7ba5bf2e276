"""What a request must pass before anything reads it: its body's size and time, its key. Plain ASGI, so that streams
pass untouched."""

from __future__ import annotations

import asyncio
import hmac

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from modelworks.serve.api.errors import ApiError

AT_ONCE = 128  # times the limit of one body: what all of them may hold
_TOO_MUCH = "the bodies of the requests in progress take too much memory"
_OPEN = frozenset({"/", "/health", "/ready", "/metrics"})  # what probes, scrapers and browsers ask for without a key


class BodyLimit:
    """Refuses bodies of more than `limit` bytes, by their announced length or as soon as they turn out longer, and
    those that take more than `timeout` seconds to come; and any while the bodies of all requests in progress together
    are as much as `AT_ONCE` of the largest. (FastAPI's own limit answers in plain text.)"""

    def __init__(self, app: ASGIApp, limit: int, timeout: float) -> None:
        self._app, self._limit, self._timeout = app, limit, timeout
        self._n_held = 0  # bytes of the bodies of requests in progress
        self._message = f"the body is larger than {limit} bytes"
        self._too_slow = f"the body did not come within {timeout:g} s"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        announced = _header(scope, b"content-length")
        if announced is not None and (not announced.isdigit() or int(announced[:20]) > self._limit):
            return await self._refuse(scope, receive, send)
        n_read, is_whole, latest = 0, False, asyncio.get_running_loop().time() + self._timeout

        async def counted() -> Message:
            nonlocal n_read, is_whole
            if is_whole:  # who asks now waits for the client to leave
                return await receive()
            try:
                async with asyncio.timeout_at(latest):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, self._too_slow, {"Connection": "close"}) from None
            is_whole = not message.get("more_body", False)
            size = len(message.get("body", b""))
            n_read, self._n_held = n_read + size, self._n_held + size
            if self._n_held > AT_ONCE * self._limit:
                raise HTTPException(503, _TOO_MUCH, {"Connection": "close", "Retry-After": "5"})
            if n_read > self._limit:  # passes through whoever reads the body
                raise HTTPException(413, self._message, {"Connection": "close"})
            return message

        try:
            return await self._app(scope, counted, send)
        finally:
            self._n_held -= n_read

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = ApiError(413, self._message).response()
        response.headers["Connection"] = "close"  # the rest of it is not read
        await response(scope, receive, send)


class ApiKeyGate:
    """Asks for `Authorization: Bearer <api_key>` where there is a key. The comparison takes the same time for every
    wrong key."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app, self._expected = app, None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._expected is not None and scope["path"] not in _OPEN:
            given = _header(scope, b"authorization") or b""
            if not hmac.compare_digest(given, self._expected):
                error = ApiError(401, "a valid API key is needed: `Authorization: Bearer …`", code="invalid_api_key")
                response = error.response()
                response.headers["WWW-Authenticate"] = "Bearer"
                return await response(scope, receive, send)
        return await self._app(scope, receive, send)


def _header(scope: Scope, name: bytes) -> bytes | None:
    value: bytes
    for key, value in scope["headers"]:
        if key == name:
            return value
    return None
