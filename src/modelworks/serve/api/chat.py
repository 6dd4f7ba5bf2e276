"""/v1/chat/completions: messages through the model's chat template, and what it answers, text or calls of tools."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from modelworks.serve.api.answering import respond
from modelworks.serve.api.errors import bad_field
from modelworks.serve.api.events import event
from modelworks.serve.api.logprobs import chat_logprobs, prompt_logprobs
from modelworks.serve.api.parameters import check_length, check_model, check_stream, sampling_params
from modelworks.serve.api.schemas import ChatBody, NamedTool
from modelworks.serve.api.service import Running, Service, new_id
from modelworks.serve.api.tokens import conversation_ids
from modelworks.serve.api.tool_calls import Arguments, CallBegun, News, Text
from modelworks.serve.api.tools import call_reader, check_tools, forced_structure
from modelworks.serve.api.usage import Usage
from modelworks.serve.request import Delta, Request
from modelworks.serve.served_model import ServedModel


def chat_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat(body: ChatBody, http: HttpRequest) -> Response:
        check_model(body.model, service.model)
        check_stream(body)
        request = await _request(service, body)
        answer = _Answer(service, body, request)
        running = await service.begin([request], body)
        return await respond(service, http, answer, running, request_id=request.id, stream=bool(body.stream))

    return router


async def _request(service: Service, body: ChatBody) -> Request:
    if body.top_logprobs and not body.logprobs:
        raise bad_field("top_logprobs", "needs `logprobs`: true")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise bad_field("max_completion_tokens", "is the newer name of `max_tokens`: give one of both")
    if body.max_tokens == 0:
        raise bad_field("max_tokens", "got 0, expected at least 1")
    check_tools(body, service.model)
    if (body.n or 1) > service.options.max_choices:
        raise bad_field("n", f"got {body.n}, expected at most {service.options.max_choices}")
    ids = await conversation_ids(service.model, body.messages, body.tools, variables=body.chat_template_kwargs)
    asked = body.max_completion_tokens or body.max_tokens
    max_tokens = check_length(ids, service.model, asked, param="messages")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = sampling_params(
        body, service.model, max_tokens=max_tokens, logprobs=logprobs, structure=forced_structure(body)
    )
    return service.request(new_id("chatcmpl"), ids, params, body)


class _Answer:
    """Deltas into OpenAI's chat completion."""

    def __init__(self, service: Service, body: ChatBody, request: Request) -> None:
        self._body, self._tokenizer = body, service.model.tokenizer
        self._head = {"id": request.id, "created": int(time.time()), "model": service.model.name}
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._choices = [_Choice(index, service.model, body) for index in range(body.n or 1)]
        self._prompt_logprobs: list[dict[str, Any] | None] | None = None
        self._usage = Usage()

    async def whole(self, running: Running) -> dict[str, Any]:
        async for news in running.deltas():
            for delta in news:
                self._note(delta)
                self._choices[delta.index].add(delta)
        more = {} if self._prompt_logprobs is None else {"prompt_logprobs": self._prompt_logprobs}
        choices = [choice.whole() for choice in self._choices]
        head = {**self._head, "object": "chat.completion"}
        return {**head, "choices": choices, "usage": self._usage.shown(), **more}

    async def chunks(self, running: Running) -> AsyncIterator[bytes]:
        head = {**self._head, "object": "chat.completion.chunk"}
        usage = {"usage": None} if self._with_usage else {}
        yield b"".join(event({**head, "choices": [choice.opening()], **usage}) for choice in self._choices)
        async for news in running.deltas():
            parts: list[dict[str, Any]] = []
            for delta in news:
                self._note(delta)
                parts += self._choices[delta.index].parts(delta)
            if parts:
                yield b"".join(event({**head, "choices": [part], **usage}) for part in parts)
        if self._with_usage:
            yield event({**head, "choices": [], "usage": self._usage.shown()})

    def _note(self, delta: Delta) -> None:
        self._usage.add(delta)
        if delta.prompt_logprobs is not None:
            n_top = self._body.prompt_logprobs or 0
            self._prompt_logprobs = prompt_logprobs(self._tokenizer, delta.prompt_logprobs, n_top)


class _Choice:
    """One choice. A whole answer is put together from the parts that a stream would have."""

    def __init__(self, index: int, model: ServedModel, body: ChatBody) -> None:
        self._index, self._tokenizer = index, model.tokenizer
        self._n_top = body.top_logprobs or 0
        self._calls = call_reader(body, model)
        self._named = isinstance(body.tool_choice, NamedTool)
        self._parts: list[dict[str, Any]] = []

    def add(self, delta: Delta) -> None:
        self._parts += self.parts(delta)

    def opening(self) -> dict[str, Any]:
        """A stream's first chunk says who speaks."""
        return self._part({"role": "assistant", "content": ""})

    def parts(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Chunks of a stream: text without a finish_reason, and a last one without text."""
        ended = delta.finish_reason is not None
        logprobs = chat_logprobs(self._tokenizer, delta.logprobs, self._n_top) if delta.logprobs else None
        shown = [{"content": delta.text}] if delta.text else []
        if self._calls is not None:
            shown = [_shown(news) for news in self._calls.read(delta.token_ids, delta.text, ended=ended)]
        if logprobs and not shown:
            shown = [{"content": ""}]
        for place, part in enumerate(shown):
            yield self._part(part, None if place else logprobs)
        if ended:
            called = self._calls is not None and self._calls.n_calls > 0 and not self._named
            reason = "tool_calls" if called and delta.finish_reason == "stop" else delta.finish_reason
            yield self._part({}, None, reason, delta.stop_reason)

    def whole(self) -> dict[str, Any]:
        last = self._parts[-1]
        text = "".join(part["delta"].get("content", "") for part in self._parts)
        calls = _whole_calls(call for part in self._parts for call in part["delta"].get("tool_calls", ()))
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = calls
        content = [entry for part in self._parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        logprobs = {"content": content, "refusal": None} if content else None
        end = {"finish_reason": last["finish_reason"], "stop_reason": last["stop_reason"]}
        return {"index": self._index, "message": message, "logprobs": logprobs, **end}

    def _part(
        self,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> dict[str, Any]:
        part = {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return part | {"stop_reason": stop_reason}


def _shown(news: News) -> dict[str, Any]:
    """What a chunk's `delta` says of it."""
    if isinstance(news, Text):
        return {"content": news.text}
    if isinstance(news, CallBegun):
        function = {"name": news.name, "arguments": ""}
        return {"tool_calls": [{"index": news.index, "id": news.id, "type": "function", "function": function}]}
    assert isinstance(news, Arguments)
    return {"tool_calls": [{"index": news.index, "function": {"arguments": news.text}}]}


def _whole_calls(parts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for part in parts:
        if "id" in part:
            calls.append({"id": part["id"], "type": "function", "function": dict(part["function"])})
        else:
            calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    return calls
