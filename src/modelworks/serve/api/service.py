"""What all routes share: the model, the engine, the options, the metrics, and whether new requests are taken."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Sequence

from modelworks.config import UserError
from modelworks.serve.api.errors import ApiError, bad_field, from_user_error
from modelworks.serve.api.metrics import Followed, Metrics
from modelworks.serve.api.options import ServerOptions
from modelworks.serve.api.parameters import api_names
from modelworks.serve.api.schemas import SamplingFields
from modelworks.serve.engine_client import EngineGone, RequestStream
from modelworks.serve.messages import News
from modelworks.serve.params import SamplingParams
from modelworks.serve.request import Delta, Request
from modelworks.serve.served_model import ServedModel
from modelworks.serve.supervisor import Supervisor
from modelworks.serve.waiting import Overloaded

_LOG = logging.getLogger("modelworks.serve.requests")


class Service:
    """draining: no new requests are taken, those that run may finish."""

    def __init__(self, model: ServedModel, engine: Supervisor, options: ServerOptions) -> None:
        self.model, self.engine, self.options = model, engine, options
        self.metrics = Metrics(model)
        self.draining = False
        engine.on_news = self._news
        engine.on_end = self.metrics.engine_ended

    @property
    def alive(self) -> bool:
        """Whether there is an engine and it has said something lately."""
        health = self.engine.health()
        return health.state == "running" and health.silent_for < self.options.stall

    @property
    def ready(self) -> bool:
        return self.alive and not self.draining

    async def begin(self, requests: Sequence[Request], body: SamplingFields) -> Running:
        """Hand the requests of a body to the engine. Raises ApiError where it does not take them."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=10)
        running = Running(self, requests, body)
        try:
            await running.accepted()
        except BaseException:
            running.close()
            raise
        return running

    def request(self, request_id: str, prompt: list[int], params: SamplingParams, body: SamplingFields) -> Request:
        """The engine's request for one prompt of a body."""
        if body.timeout is not None and body.timeout > self.options.longest_deadline:
            raise bad_field("timeout", f"got {body.timeout:g}, expected at most {self.options.longest_deadline:g} s")
        return Request(
            request_id,
            prompt,
            params,
            priority=body.priority or 0,
            deadline=body.timeout or self.options.deadline,
            salt=body.cache_salt or "",
            reuses_prefix=body.cache_prompt is not False,
        )

    def log(self, request: Request, followed: Followed, user: str | None) -> None:
        if self.options.log_requests:
            _LOG.info("%s", followed.line(request.id, user))

    def _news(self, news: News) -> None:
        self.metrics.news(news)


class Running:
    """Requests that the engine works on, seen from a route. Close it in any case: what has not finished is aborted."""

    def __init__(self, service: Service, requests: Sequence[Request], body: SamplingFields) -> None:
        self._service, self._requests, self._body = service, requests, body
        self._followed = {request.id: service.metrics.follow(request) for request in requests}
        self._stream: RequestStream | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def accepted(self) -> None:
        try:
            self._stream = self._service.engine.open(self._requests)
            # The engine ends a request at its deadline; one that is stuck does not, and nobody shall wait for ever.
            seconds = (self._requests[0].deadline or 0.0) + self._service.options.stall
            late = TimeoutError(
                f"the engine has not ended the request {self._service.options.stall:g} s after its deadline"
            )
            self._timer = asyncio.get_running_loop().call_later(seconds, self._stream.fail, late)
            await self._stream.accepted()
        except Exception as error:
            raise self._failed(error) from None

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """All that comes, in lists of what came since the last one. Raises ApiError where a completion fails: the
        request fails with it, and what else it asked for is given up."""
        assert self._stream is not None  # it was accepted
        try:
            async for news in self._stream:
                for delta in news:
                    self._followed[delta.request_id].news(delta)
                for delta in news:
                    self._check(delta)
                yield news
        except (EngineGone, TimeoutError) as error:
            raise self._failed(error) from None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._stream is not None:
            self._stream.close()
        for request in self._requests:
            followed = self._followed[request.id]
            if followed.close():
                self._service.log(request, followed, self._body.user)

    def _check(self, delta: Delta) -> None:
        if delta.finish_reason == "error":
            error = delta.error or "the request failed"
            if error.startswith("structure:"):  # too costly in the middle of the output: trying again does not help
                raise from_user_error(UserError(error), api_names(self._body))
            raise ApiError(500, error, code="request_failed")
        if delta.finish_reason == "deadline":
            raise ApiError(504, "the request did not finish by its deadline (`timeout`)", code="deadline_exceeded")
        if delta.finish_reason == "abort" and self._service.draining:
            raise ApiError(503, "the server shut down before the request had finished", code="shutting_down")

    def _failed(self, error: Exception) -> Exception:
        """The ApiError for what the engine says against requests; other errors as they are."""
        for followed in self._followed.values():
            followed.fail()
        if isinstance(error, Overloaded):
            return ApiError(429, str(error), code="overloaded", retry_after=error.retry_after)
        if isinstance(error, EngineGone):
            return ApiError(503, str(error), code="engine_unavailable", retry_after=error.retry_after)
        if isinstance(error, TimeoutError):
            return ApiError(504, str(error), code="deadline_exceeded")
        return from_user_error(error, api_names(self._body)) if isinstance(error, UserError) else error


def new_id(kind: str) -> str:
    """`cmpl-…`: of a request, not to be guessed (it can be aborted by its id)."""
    return f"{kind}-{secrets.token_hex(12)}"
