"""`StreamDecoder`: text from ids as they come, never a broken character.

A character may be spread over several tokens; its bytes wait here until it is whole. For every way of cutting the
ids into pushes, the texts joined are the same.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modelworks.data.tokenizers.tokenizer import Tokenizer


class StreamDecoder:
    """start_of_text: the ids begin a text (SentencePiece's first blank is dropped) rather than go on after a prompt."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, start_of_text: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._strip = start_of_text and tokenizer.strips_first_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def copy(self) -> StreamDecoder:
        """The same text so far, going on by itself."""
        copy = StreamDecoder.__new__(StreamDecoder)
        copy.__dict__.update(self.__dict__)
        copy._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        copy._utf8.setstate(self._utf8.getstate())
        return copy

    def push(self, token_id: int) -> str:
        """The characters that this token completes; often "" in the middle of one."""
        return self.push_all((token_id,))

    def push_all(self, ids: Iterable[int]) -> str:
        """The same for several tokens at once."""
        bytes_of, skipped = self._tokenizer.token_bytes, self._skipped
        data = b"".join([bytes_of(token_id) for token_id in ids if token_id not in skipped])
        if self._strip and data:
            data, self._strip = data.removeprefix(b" "), False
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that never became whole."""
        return self._utf8.decode(b"", final=True)
