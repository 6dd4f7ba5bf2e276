"""Options that are one of a few words."""

from __future__ import annotations

from modelworks.config import UserError, nearest


def check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise UserError, with the nearest choice, where `value` is none of them."""
    if value not in choices:
        near = nearest(value, choices)
        hint = f" (did you mean `{near}`?)" if near else ""
        raise UserError(f"{option}: got {value!r}, expected {', '.join(choices)}{hint}")
