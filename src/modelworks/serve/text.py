"""From tokens to text as it comes: no half characters, no half stop strings, and nothing lost at the end.

A token may be a part of a character; the decoder holds its bytes back until the character is whole. Text that may be
the beginning of a stop string is held back too. Both are functions of the tokens so far: however they arrive, one by
one or many at once, the same text comes out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Decoder(Protocol):
    """What `modelworks.data.StreamDecoder` does: characters as soon as they are whole, and at the end what is left."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class CompletionText:
    """The text of one completion, up to a stop string.

    decoder: None where there is no tokeniser, and then no text. first_checked: tokens before which no stop string ends
    anything (`min_tokens`).
    """

    def __init__(
        self, decoder: Decoder | None, stops: Iterable[str] = (), *, included: bool = False, first_checked: int = 0
    ) -> None:
        self._decoder = decoder
        stops = tuple(stops)
        self._stops = StopStrings(stops, included=included) if stops else None
        self._unchecked = first_checked

    @property
    def found(self) -> str | None:
        """The stop string that ended it."""
        return None if self._stops is None else self._stops.found

    def push(self, token: int) -> str:
        """What may be shown now that this token is there too."""
        text = "" if self._decoder is None else self._decoder.push(token)
        if self._stops is None:
            return text
        if self._unchecked > 0:
            self._unchecked -= 1
            return text
        return self._stops.push(text)

    def flush(self) -> str:
        """What was held back, at the end."""
        text = "" if self._decoder is None else self._decoder.flush()
        return text if self._stops is None else self._stops.push(text) + self._stops.flush()


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
