"""How a question that runs is answered: as a stream of events, or whole; and given up when the client leaves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from modelworks.serve.api.events import EventStream, until_disconnect
from modelworks.serve.api.service import Running, Service


class Answer(Protocol):
    """What a route makes of the deltas: events, or one object of JSON."""

    def chunks(self, running: Running) -> AsyncIterator[bytes]: ...
    async def whole(self, running: Running) -> dict[str, Any]: ...


async def respond(
    service: Service, http: HttpRequest, answer: Answer, running: Running, *, request_id: str, stream: bool
) -> Response:
    """The response to what was begun as `running`, which is closed however it ends."""
    headers = {"X-Request-Id": request_id}
    if stream:
        longest = service.options.longest_deadline + service.options.grace
        return EventStream(answer.chunks(running), on_close=running.close, headers=headers, longest=longest)
    try:
        value = await until_disconnect(http.receive, answer.whole(running))
    finally:
        running.close()
    return JSONResponse(value, headers=headers)
