"""From tokens to text as it comes: no half characters, no half stop strings, and nothing lost at the end.

A token may be a part of a character. What decodes to U+FFFD at the end may yet become one, so up to three of them are
held back (a character of UTF-8 has at most four bytes), and shown as they are when the stream ends. Text that may be
the beginning of a stop string is held back too. Both are functions of the tokens so far: however they arrive, one by
one or many at once, the same text comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

_REPLACEMENT = "\ufffd"
_LONGEST_HALF = 3  # replacement characters that a character's missing bytes can leave
_LONGEST_TAIL = 64  # tokens without a whole character at their end: no text, and decoded again no more


class TextStream:
    """decode: text of token ids, special ones left out, invalid bytes as U+FFFD; decoding never raises."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._context = 0  # where the tokens begin that are decoded for their effect on later ones (a leading space)
        self._shown_tokens = 0  # all their text was given out
        self._shown = 0  # characters given out of what comes after those

    def push(self, token: int) -> str:
        """The text that is certain with this token, beyond what was given out before."""
        self._tokens.append(token)
        text = self._after()
        tail = len(text) - len(text.rstrip(_REPLACEMENT))
        if tail == 0 or len(self._tokens) - self._shown_tokens > _LONGEST_TAIL:
            given, self._shown = text[self._shown :], 0
            self._context, self._shown_tokens = self._shown_tokens, len(self._tokens)
            return given
        certain = max(len(text) - min(tail, _LONGEST_HALF), self._shown)
        given, self._shown = text[self._shown : certain], certain
        return given

    def flush(self) -> str:
        """What was held back, at the end."""
        given = self._after()[self._shown :]
        self._context, self._shown_tokens, self._shown = self._shown_tokens, len(self._tokens), 0
        return given

    def _after(self) -> str:
        """Text of the tokens after those that were shown whole."""
        known = self._decode(self._tokens[self._context : self._shown_tokens])
        return self._decode(self._tokens[self._context :])[len(known) :]


class StopStrings:
    """Ends a text before (or with) the first of `stops` that it completes."""

    def __init__(self, stops: Iterable[str], *, included: bool = False) -> None:
        self._stops = tuple(stops)
        if not all(self._stops):
            raise ValueError("an empty stop string would stop at once")
        self._included = included
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """What may be shown now. After a stop string was found: nothing."""
        if self.found is not None:
            return ""
        self._held += text
        ends = [(start + len(stop), start, stop) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if ends:
            end, start, self.found = min(ends)
            shown, self._held = self._held[: end if self._included else start], ""
            return shown
        kept = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return shown

    def flush(self) -> str:
        """What was held back: the text ended, so it is no stop string."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, and not all of it."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
