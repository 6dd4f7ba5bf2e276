"""A conversation as text: OpenAI's messages, as the model's chat template expects them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from modelworks.config import UserError
from modelworks.serve.api.errors import ApiError, bad_field
from modelworks.serve.api.schemas import Message, Tool
from modelworks.serve.api.values import checked_json
from modelworks.serve.served_model import ServedModel

_OURS = ("messages", "tools", "add_generation_prompt")


def render(
    model: ServedModel,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
    *,
    generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The conversation as text. variables: further ones that the template knows (`chat_template_kwargs`). Raises
    ApiError without a template, or where the template refuses the conversation."""
    if model.tokenizer.chat_template is None:
        message = f"`{model.name}` has no chat template, so it cannot read messages; use /v1/completions"
        raise ApiError(400, message, param="messages", code="no_chat_template")
    for name in variables or {}:
        if name in _OURS:
            raise bad_field(f"chat_template_kwargs.{name}", "is a field of its own")
    shown = [_for_template(message, place) for place, message in enumerate(messages)]
    offered = None if tools is None else [tool.model_dump(exclude_none=True) for tool in tools]
    try:
        return model.tokenizer.render_chat(
            shown, generation_prompt=generation_prompt, tools=offered, variables=variables or {}
        )
    except UserError as error:
        raise bad_field("messages", str(error)) from None


def _for_template(message: Message, place: int) -> dict[str, Any]:
    """Templates know `system`, not OpenAI's newer `developer`, and take a call's arguments as values, not as JSON."""
    where = f"messages[{place}]"
    if message.tool_calls is not None and message.role != "assistant":
        raise bad_field(f"{where}.tool_calls", "only an assistant calls tools")
    if (message.tool_call_id is not None) != (message.role == "tool"):
        raise bad_field(f"{where}.tool_call_id", "belongs to messages with the role `tool`, and they need it")
    if message.content is None and message.tool_calls is None:
        raise bad_field(f"{where}.content", "expected a text")
    shown: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    shown["content"] = message.content or ""
    if message.name is not None:
        shown["name"] = message.name
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    if message.tool_calls is not None:
        shown["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments, where)},
            }
            for call in message.tool_calls
        ]
    return shown


def _arguments(text: str, where: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise bad_field(f"{where}.tool_calls", "arguments: not JSON") from None
    try:
        return checked_json(value)
    except ValueError as error:  # half a character, for instance, which JSON can write and no tokeniser reads
        raise bad_field(f"{where}.tool_calls", f"arguments: {error}") from None
