"""Text to tokens and back: for the other routes, and as /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sized
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter

from modelworks.serve.api.conversation import render
from modelworks.serve.api.errors import bad_field
from modelworks.serve.api.logprobs import exact_text
from modelworks.serve.api.parameters import check_ids, check_model
from modelworks.serve.api.schemas import DetokenizeBody, TokenizeBody
from modelworks.serve.api.service import Service
from modelworks.serve.served_model import ServedModel

_SHORT = 2000  # characters or tokens: done at once, in less time than handing them to a thread and back would save
_ONE_LONG = asyncio.Semaphore(1)  # long texts one after the other: each may take much memory while it is encoded
_Given = TypeVar("_Given", bound=Sized)
_Result = TypeVar("_Result")


async def encode(model: ServedModel, text: str, *, special: bool = True) -> list[int]:
    """The ids of a prompt. special: after the token that the model expects before a text."""
    return await _aside(text, model.tokenizer.encode_prompt if special else model.tokenizer.encode)


async def encode_rendered(model: ServedModel, text: str) -> list[int]:
    """The ids of what a chat template wrote: its special tokens are in it already."""
    return await _aside(text, model.tokenizer.encode)


def token_routes(service: Service) -> APIRouter:
    router = APIRouter()
    model = service.model

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        check_model(body.model, model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_field("prompt", "expected either `prompt` or `messages`")
        if body.messages is not None:
            if body.add_special_tokens is not None:
                raise bad_field("add_special_tokens", "is for a `prompt`: the chat template writes its own")
            text = render(model, body.messages, body.tools, generation_prompt=body.add_generation_prompt is not False)
            ids = await encode_rendered(model, text)
        else:
            for name in ("tools", "add_generation_prompt"):
                if getattr(body, name) is not None:
                    raise bad_field(name, "is for `messages`")
            special = body.add_special_tokens is not False
            ids = await encode(model, body.prompt or "", special=special)
        answer = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = [exact_text(model.tokenizer, token) for token in ids]
        return answer

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        check_model(body.model, model)
        check_ids(body.tokens, model, param="tokens")
        return {"prompt": await _aside(body.tokens, partial(model.tokenizer.decode, skip_special=False))}

    return router


async def _aside(given: _Given, how: Callable[[_Given], _Result]) -> _Result:
    """how(given); where that takes long, in a thread, so that others are answered meanwhile."""
    if len(given) <= _SHORT:
        return how(given)
    async with _ONE_LONG:
        return await asyncio.to_thread(how, given)
