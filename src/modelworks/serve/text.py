"""From tokens to text as it comes: no half characters, no half stop strings, and nothing lost at the end.

A token may be a part of a character; the decoder holds its bytes back until the character is whole. Text that may be
the beginning of a stop string is held back too. Both are functions of the tokens so far: however they arrive, one by
one or many at once, the same text comes out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Protocol


class Decoder(Protocol):
    """What `modelworks.data.StreamDecoder` does: characters as soon as they are whole, and at the end what is left."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...

    def copy(self) -> Decoder: ...


class CompletionText:
    """The text of one completion, up to a stop string.

    decoder: None where there is no tokeniser, and then no text. first_checked: so many tokens come before one may end
    it (`min_tokens`). A stop string counts where its last character comes with a later token; it may begin before.
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
        self._unchecked -= 1
        return self._stops.push(text, ends=self._unchecked < 0)

    def flush(self) -> str:
        """What was held back, at the end."""
        text = "" if self._decoder is None else self._decoder.flush()
        if self._stops is None:
            return text
        return self._stops.push(text, ends=self._unchecked < 0) + self._stops.flush()

    def copy(self) -> CompletionText:
        """The same text so far, going on by itself. It takes as long whatever the length of the text."""
        copy = CompletionText.__new__(CompletionText)
        copy._decoder = None if self._decoder is None else self._decoder.copy()
        copy._stops = None if self._stops is None else self._stops.copy()
        copy._unchecked = self._unchecked
        return copy


class StopStrings:
    """Ends a text before (or with) the first of `stops` that it completes."""

    def __init__(self, stops: Iterable[str], *, included: bool = False) -> None:
        self._stops = sorted(stops)  # so that those with a beginning in common stand together
        if not all(self._stops):
            raise ValueError("an empty stop string would stop at once")
        self._longest = max(map(len, self._stops), default=0)
        self._included = included
        self._held = ""
        self._free = 0  # characters of `_held` from its first on that nothing can end in
        self.found: str | None = None

    def push(self, text: str, *, ends: bool = True) -> str:
        """What may be shown now. After a stop string was found: nothing. ends: whether a stop string may end in this
        text; if not, it may still begin there."""
        if self.found is not None:
            return ""
        self._held += text
        if not ends:
            self._free = len(self._held)
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := self._held.find(stop, max(0, self._free - len(stop) + 1))) >= 0
        ]
        if found:
            end, start, self.found = min(found)
            shown, self._held = self._held[: end if self._included else start], ""
            return shown
        certain = self._certain()
        shown, self._held = self._held[:certain], self._held[certain:]
        self._free = max(0, self._free - certain)
        return shown

    def flush(self) -> str:
        """What was held back: the text ended, so it is no stop string."""
        shown, self._held = self._held, ""
        return shown

    def copy(self) -> StopStrings:
        copy = StopStrings.__new__(StopStrings)
        copy.__dict__.update(self.__dict__)
        return copy

    def _certain(self) -> int:
        """Characters before the longest end that is the beginning of a stop string. It takes as long for a thousand
        stop strings as for ten, since a request may have so many."""
        for start in range(max(0, len(self._held) - self._longest + 1), len(self._held)):
            end = self._held[start:]
            place = bisect_left(self._stops, end)
            if place < len(self._stops) and self._stops[place].startswith(end):
                return start
        return len(self._held)
