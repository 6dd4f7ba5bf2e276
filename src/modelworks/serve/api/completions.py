"""/v1/completions: one or several prompts, texts or token ids; the choices of prompt i are i·n to i·n + n - 1."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from modelworks.data import Tokenizer
from modelworks.serve.api.answering import respond
from modelworks.serve.api.errors import bad_field
from modelworks.serve.api.events import event
from modelworks.serve.api.logprobs import CompletionLogprobs, prompt_logprobs
from modelworks.serve.api.parameters import check_length, check_model, check_stream, sampling_params
from modelworks.serve.api.schemas import CompletionBody
from modelworks.serve.api.service import Running, Service, new_id
from modelworks.serve.api.tokens import prompt_ids
from modelworks.serve.api.usage import Usage
from modelworks.serve.request import Delta, Request, TokenLogprob

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


def completion_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def complete(body: CompletionBody, http: HttpRequest) -> Response:
        check_model(body.model, service.model)
        check_stream(body)
        answer = _Answer(service, body, await _requests(service, body))
        running = await service.begin(answer.requests, body)
        return await respond(service, http, answer, running, request_id=answer.id, stream=bool(body.stream))

    return router


async def _requests(service: Service, body: CompletionBody) -> list[Request]:
    if len(body.prompt) * (body.n or 1) > service.options.max_choices:
        raise bad_field("prompt", f"{len(body.prompt)} prompts, n = {body.n or 1}: too many choices for one request")
    if body.max_tokens == 0 and not body.echo:
        raise bad_field("max_tokens", "got 0, which needs `echo`; expected at least 1")
    wanted = _DEFAULT_MAX_TOKENS if body.max_tokens is None else max(body.max_tokens, 1)
    request_id, requests = new_id("cmpl"), []
    prompts: list[str | list[int]] = list(body.prompt)
    for place, prompt in enumerate(prompts):
        ids: list[int] = await prompt_ids(service.model, prompt) if isinstance(prompt, str) else prompt
        if not ids and prompt == "":  # an empty text asks for a document from its beginning
            ids = [service.model.tokenizer.start_id]
        wanted = check_length(ids, service.model, wanted, param="prompt")
        params = sampling_params(
            body,
            service.model,
            max_tokens=wanted,
            logprobs=body.logprobs,
            prompt_logprobs=_scored(body),
        )
        requests.append(service.request(request_id if place == 0 else f"{request_id}-{place}", ids, params, body))
    return requests


def _scored(body: CompletionBody) -> int | None:
    """Most likely tokens beside each of the prompt's: as many as either field that shows them asks for."""
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((count for count in wanted if count is not None), default=None)


class _Answer:
    """Deltas into OpenAI's text completion."""

    def __init__(self, service: Service, body: CompletionBody, requests: list[Request]) -> None:
        self.requests, self.id = requests, requests[0].id
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._head = {"id": self.id, "object": "text_completion", "created": int(time.time())}
        self._head |= {"model": service.model.name}
        n = body.n or 1
        self._first = {request.id: place * n for place, request in enumerate(requests)}
        self._choices = [
            _Choice(index, service.model.tokenizer, body, requests[index // n]) for index in range(n * len(requests))
        ]
        self._usage = Usage(counts_generated=body.max_tokens != 0)

    async def whole(self, running: Running) -> dict[str, Any]:
        parts: list[list[dict[str, Any]]] = [[] for _ in self._choices]
        async for news in running.deltas():
            for delta in news:
                for part in self._parts(delta):
                    parts[part["index"]].append(part)
        choices = [_joined(of_choice) for of_choice in parts]
        return {**self._head, "choices": choices, "usage": self._usage.shown()}

    async def chunks(self, running: Running) -> AsyncIterator[bytes]:
        usage = {"usage": None} if self._with_usage else {}
        async for news in running.deltas():
            parts = [part for delta in news for part in self._parts(delta)]
            if parts:
                yield b"".join(event({**self._head, "choices": [part], **usage}) for part in parts)
        if self._with_usage:
            yield event({**self._head, "choices": [], "usage": self._usage.shown()})

    def _parts(self, delta: Delta) -> Iterator[dict[str, Any]]:
        self._usage.add(delta)
        first = self._first[delta.request_id]
        if delta.prompt_logprobs is not None:  # they come once, and belong to all completions of the prompt
            for choice in self._choices[first : first + len(self._choices) // len(self.requests)]:
                choice.prompt_logprobs = delta.prompt_logprobs
        yield from self._choices[first + delta.index].parts(delta)


class _Choice:
    """One choice; what it has of the prompt goes out with its first part."""

    def __init__(self, index: int, tokenizer: Tokenizer, body: CompletionBody, request: Request) -> None:
        self._index, self._tokenizer, self._prompt = index, tokenizer, list(request.prompt)
        self._echo, self._begun = bool(body.echo), False
        self._only_echo = body.max_tokens == 0
        self._n_top_of_prompt = body.prompt_logprobs
        self._logprobs = None if body.logprobs is None else CompletionLogprobs(tokenizer, body.logprobs)
        self.prompt_logprobs: Sequence[TokenLogprob | None] | None = None

    def parts(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Chunks of a stream: text without a finish_reason, and a last one without text."""
        text, ids = ("", []) if self._only_echo else (delta.text, delta.token_ids)
        entries: Sequence[TokenLogprob | None] = [] if self._only_echo else delta.logprobs or []
        more: dict[str, Any] = {}
        if not self._begun:
            self._begun = True
            if self._echo:
                text, ids = self._tokenizer.decode(self._prompt, skip_special=False) + text, self._prompt + ids
                unknown = [None] * len(self._prompt)  # it ended before its prompt was scored
                entries = [*(self.prompt_logprobs or unknown), *entries]
            if self._n_top_of_prompt is not None and self.prompt_logprobs is not None:
                more["prompt_logprobs"] = prompt_logprobs(self._tokenizer, self.prompt_logprobs, self._n_top_of_prompt)
        shown = self._logprobs.shown(entries, ids) if self._logprobs and ids else None
        if text or shown or more:
            yield self._part(text, shown, None, None) | more
        if delta.finish_reason is not None:
            as_asked = self._only_echo and delta.finish_reason in ("stop", "length")
            yield self._part("", None, "length" if as_asked else delta.finish_reason, delta.stop_reason)

    def _part(
        self, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None, stop_reason: int | str | None
    ) -> dict[str, Any]:
        part = {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return part | {"stop_reason": stop_reason}


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The parts of one choice as a whole."""
    whole = {key: value for part in parts for key, value in part.items()}  # what comes last: how it finished
    whole["text"] = "".join(part["text"] for part in parts)
    logprobs = [part["logprobs"] for part in parts if part["logprobs"] is not None]
    if logprobs:
        lists = {name: [item for each in logprobs for item in each[name] or ()] for name in logprobs[0]}
        whole["logprobs"] = lists | ({} if logprobs[0]["top_logprobs"] is not None else {"top_logprobs": None})
    return whole
