"""Text to tokens and back: for the other routes, and as /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from modelworks.data import Tokenizer
from modelworks.serve.api.conversation import render
from modelworks.serve.api.errors import bad_field
from modelworks.serve.api.logprobs import exact_text
from modelworks.serve.api.parameters import check_ids, check_model, check_text
from modelworks.serve.api.schemas import DetokenizeBody, Message, TokenizeBody, Tool
from modelworks.serve.api.service import Service
from modelworks.serve.served_model import ServedModel

_SHORT = 2000  # characters or tokens: done at once, in less time than handing them to a thread and back would save
_PER_MESSAGE = 50  # characters that a message counts for beside its own: the template's loop takes time too
_LONG_TEXTS = ThreadPoolExecutor(1, thread_name_prefix="modelworks-texts")  # one at a time: each may take much memory
_Given = TypeVar("_Given")
_Result = TypeVar("_Result")


async def prompt_ids(model: ServedModel, text: str) -> list[int]:
    """The ids of a prompt, after the token that the model expects before a text. Raises ApiError for one that cannot
    fit the context, without tokenising it."""
    check_text(text, model, param="prompt")
    return await _aside(text, len(text), model.tokenizer.encode_prompt)


async def conversation_ids(
    model: ServedModel,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
    *,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """The ids of messages in the form that the model's template gives them. Raises ApiError as `render` does, and for
    a conversation that cannot fit the context, without tokenising it."""
    text = await _rendered(model, messages, tools, variables=variables)
    check_text(text, model, param="messages")
    return await _aside(text, len(text), model.tokenizer.encode)


def token_routes(service: Service) -> APIRouter:
    router = APIRouter()
    model = service.model

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> JSONResponse:
        check_model(body.model, model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_field("prompt", "expected either `prompt` or `messages`")
        if body.messages is not None:
            if body.add_special_tokens is not None:
                raise bad_field("add_special_tokens", "is for a `prompt`: the chat template writes its own")
            wanted = body.add_generation_prompt is not False
            text = await _rendered(model, body.messages, body.tools, generation_prompt=wanted)
            ids = await _aside(text, len(text), model.tokenizer.encode)
        else:
            for name in ("tools", "add_generation_prompt"):
                if getattr(body, name) is not None:
                    raise bad_field(name, "is for `messages`")
            text = body.prompt or ""
            special = body.add_special_tokens is not False
            how = model.tokenizer.encode_prompt if special else model.tokenizer.encode
            ids = await _aside(text, len(text), how)
        answer = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = await _aside(ids, len(ids), partial(_texts, model.tokenizer))
        return JSONResponse(answer)  # as it is: FastAPI would look at each of a million tokens

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        check_model(body.model, model)
        check_ids(body.tokens, model, param="tokens")
        return {
            "prompt": await _aside(body.tokens, len(body.tokens), partial(model.tokenizer.decode, skip_special=False))
        }

    return router


async def _rendered(model: ServedModel, messages: Sequence[Message], tools: Sequence[Tool] | None, **how: Any) -> str:
    size = sum(len(message.content or "") + _PER_MESSAGE for message in messages)
    return await _aside(messages, size, lambda given: render(model, given, tools, **how))


def _texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    return [exact_text(tokenizer, token) for token in ids]


async def _aside(given: _Given, size: int, how: Callable[[_Given], _Result]) -> _Result:
    """how(given); where that takes long, in a thread, so that others are answered meanwhile."""
    if size <= _SHORT:
        return how(given)
    return await asyncio.get_running_loop().run_in_executor(_LONG_TEXTS, how, given)
