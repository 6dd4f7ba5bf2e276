"""Values of a body that have several forms, each brought to one. A problem is a ValueError, told under the field."""

from __future__ import annotations

import json
from typing import Any

MOST_PROMPTS = 128
_DEEPEST = 64  # levels of a schema or of a tool's parameters
_LARGEST = 2**18  # characters of one of these, written as JSON
_MOST_IDS = 2**20  # of a prompt: more than any context has; to look at each of more takes long


def one_or_list(value: Any) -> Any:
    """`"a"` is `["a"]`."""
    return [value] if isinstance(value, str) else value


def checked_prompt(value: Any) -> Any:
    """A text, ids, or a list of either, as a list of them. Only one kind at a time, as OpenAI has it."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError("expected a text, a list of texts, token ids or a list of them, none empty")
    if _are_ids(value):
        value = [value]
    if len(value) > MOST_PROMPTS:
        raise ValueError(f"{len(value)} of them are too many: expected at most {MOST_PROMPTS} prompts")
    if all(isinstance(item, str) for item in value):
        return [checked_text(item) for item in value]
    if all(isinstance(item, list) and item and _are_ids(item) for item in value):
        return value
    raise ValueError("expected a text, a list of texts, token ids (whole numbers >= 0) or a list of lists of them")


def checked_text(text: str) -> str:
    """Text that can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"not Unicode text: half of a character (surrogate) at {error.start}") from None
    return text


def checked_json(value: Any) -> Any:
    """A JSON value of ours to pass on: not too large or deep, finite numbers, text that is Unicode."""
    try:
        text = checked_text(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except RecursionError:
        raise ValueError(f"nested deeper than {_DEEPEST} levels") from None
    except ValueError as error:
        raise ValueError(f"not JSON that can be written: {error}") from None
    if len(text) > _LARGEST:
        raise ValueError(f"{len(text)} characters of JSON, expected at most {_LARGEST}")
    if _depth(value, _DEEPEST) > _DEEPEST:
        raise ValueError(f"nested deeper than {_DEEPEST} levels")
    return value


def text_of_parts(value: Any) -> Any:
    """`[{"type": "text", "text": "a"}, …]` is the texts, a line each. Other kinds of parts are refused by name."""
    if isinstance(value, str):
        return checked_text(value)
    if not isinstance(value, list):
        return value
    texts = []
    for place, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(f"part {place} is {str(kind)[:40]!r}: this model reads text parts only")
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError(f'part {place}: expected {{"type": "text", "text": "…"}} and no more')
        texts.append(checked_text(part["text"]))
    return "\n".join(texts)


def _are_ids(items: list[Any]) -> bool:
    if len(items) > _MOST_IDS and type(items[0]) is int:
        raise ValueError(f"{len(items)} token ids are more than any context has")
    return all(type(item) is int and 0 <= item < 2**31 for item in items)


def _depth(value: Any, limit: int) -> int:
    """Levels of nesting, counted no further than one over the limit."""
    level, depth = [value], 0
    while level and depth <= limit:
        level = [
            item
            for each in level
            for item in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
            if isinstance(item, dict | list)
        ]
        depth += 1
    return depth
