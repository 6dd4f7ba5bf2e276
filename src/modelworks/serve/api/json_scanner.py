"""One JSON object read character by character: the text of one of its values as it grows, and a string beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence

_CLOSED_BY = {"{": "}", "[": "]"}


class ObjectScanner:
    """Begins at the opening brace. names: keys of the string that is wanted whole; arguments: keys of the value that is
    wanted as it grows, as it is written. A value that is a string holding JSON (some models quote twice) is unquoted,
    and so known only at its end."""

    def __init__(self, names: Sequence[str], arguments: Sequence[str]) -> None:
        self._names, self._arguments = names, arguments
        self.name: str | None = None
        self.arguments_begun = False
        self.complete = self.broken = False
        self._open: list[str] = []  # what closes the brackets that are open
        self._in_string = self._escaped = False
        self._key: str | None = None  # of the value that is read, at the outermost level
        self._token = ""  # the key or the value so far
        self._reads_value = False
        self._wanted = ""  # of the arguments, not taken yet

    def take(self, character: str) -> None:
        if self.complete or self.broken:
            return
        outermost = len(self._open) == 1
        if self._in_string:
            self._within_string(character)
        elif character == '"':
            self._in_string = True
            self._add(character)
        elif character in _CLOSED_BY:
            self._add(character)
            self._open.append(_CLOSED_BY[character])
            if len(self._open) == 1:
                self._token = ""
        elif character in "]}":
            self._close(character)
        elif outermost and character == ":" and not self._reads_value:
            self._begin_value()
        elif outermost and character == ",":
            self._end_value()
        elif not (outermost and character.isspace()):
            self._add(character)

    def take_arguments(self) -> str:
        """What has come of the arguments since the last call."""
        taken, self._wanted = self._wanted, ""
        return taken

    def _within_string(self, character: str) -> None:
        self._add(character)
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False

    def _close(self, character: str) -> None:
        if not self._open or self._open[-1] != character:
            self.broken = True
            return
        if len(self._open) == 1:
            self._end_value()
            self.complete = not self.broken
        self._open.pop()
        if self._open:
            self._add(character)

    def _add(self, character: str) -> None:
        if not self._open:
            return
        self._token += character
        if self._reads_value and self._key in self._arguments and not self._token.startswith('"'):
            self.arguments_begun = True
            self._wanted += character

    def _begin_value(self) -> None:
        key = _string(self._token)
        self.broken = key is None
        self._key, self._token, self._reads_value = key, "", True

    def _end_value(self) -> None:
        if not self._reads_value:
            self.broken = bool(self._token)  # a key without a value; nothing at all is an empty object
            return
        if self._key in self._names:
            self.name = _string(self._token)
            self.broken = self.name is None
        elif self._key in self._arguments and self._token.startswith('"'):
            text = _string(self._token)
            self.broken = text is None
            self.arguments_begun, self._wanted = not self.broken, self._wanted + (text or "")
        self._key, self._token, self._reads_value = None, "", False


def _string(text: str) -> str | None:
    """The value of a JSON string, or None where the text is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
