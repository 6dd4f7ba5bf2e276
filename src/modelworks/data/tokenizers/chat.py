"""Chat templates: a conversation as text, by the Jinja source that the model was published with.

The source comes from a downloaded file, so it runs in Jinja's immutable sandbox: it sees the messages and nothing else.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from modelworks.config import UserError

if TYPE_CHECKING:
    from jinja2 import Template

    from modelworks.data.tokenizers.tokenizer import Tokenizer


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render `messages` (each with `role` and `content`). tools: that the model may call, as JSON descriptions.
    variables: others that the template knows. Raises UserError for a missing or failing template."""
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        raise UserError("this tokenizer has no chat template: give the prompt as plain text")
    names = {
        name: None if token_id is None else tokenizer.id_to_token(token_id)
        for name, token_id in [
            ("bos_token", tokenizer.bos_id),
            ("eos_token", tokenizer.eos_id),
            ("pad_token", tokenizer.pad_id),
        ]
    }
    try:
        template = _compiled(tokenizer.chat_template)
        known = {
            **names,
            **(variables or {}),
            "messages": list(messages),
            "tools": None if tools is None else list(tools),
        }
        return template.render(**known, add_generation_prompt=generation_prompt)
    except TemplateError as error:
        raise UserError(f"chat template: {error}") from None
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # What a template's own expressions raise: a message of a kind that its author did not think of.
        raise UserError(f"chat template: {type(error).__name__}: {error}") from None


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    """The template, compiled once: that takes longer than to render it. It keeps nothing of what it renders."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    return environment.from_string(source)


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
