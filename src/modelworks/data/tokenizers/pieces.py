"""Cutting long text into pieces that are tokenised apart, so that time and memory stay bounded.

Invariant: `"".join(pieces(text)) == text`, and a function of the text alone. A cut is made between a letter or
digit and the blank that follows it wherever the text has one: every pre-tokeniser in use (GPT-2, Llama 3, Qwen 2,
SentencePiece) starts a new word there, so the tokens are those of the whole text. A stretch without any such place
(a 50 MB line of base64) is cut at a fixed length: its tokens differ at the cut, its text does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

PIECE = 1 << 14  # characters
GROUP = 1 << 20  # characters tokenised by one call
_SAFE = re.compile(r"[^\W_](?=[ \n\t])")
_LONG_WORD = re.compile(r"\S{256,}")


@dataclass(frozen=True)
class Part:
    """A piece of a document; `continuing` unless it is the first."""

    text: str
    continuing: bool


def document_parts(text: str) -> Iterator[Part]:
    """The pieces of a document's text."""
    for place, piece in enumerate(pieces(text)):
        yield Part(piece, continuing=place > 0)


def grouped(parts: Iterable[Part], size: int = GROUP) -> Iterator[list[Part]]:
    """Consecutive parts, about `size` characters together."""
    group: list[Part] = []
    length = 0
    for part in parts:
        group.append(part)
        length += len(part.text)
        if length >= size:
            yield group
            group, length = [], 0
    if group:
        yield group


def pieces(text: str, length: int = PIECE) -> Iterator[str]:
    """Yield consecutive parts of `text` of at most `length` characters."""
    start = 0
    while len(text) - start > length:
        cut = _last_safe_cut(text, start, start + length)
        yield text[start:cut]
        start = cut
    if start < len(text) or not text:
        yield text[start:]


def training_pieces(text: str, length: int = PIECE, word: int = 64) -> Iterator[str]:
    """Pieces whose words are short too: a trainer's time grows with the square of a word's length."""
    for piece in pieces(text, length):
        start = 0
        for match in _LONG_WORD.finditer(piece):
            yield piece[start : match.start()]
            for offset in range(match.start(), match.end(), word):
                yield piece[offset : min(offset + word, match.end())]
            start = match.end()
        yield piece[start:]


def _last_safe_cut(text: str, start: int, end: int) -> int:
    """The last safe place in (start, end], or `end`. The look-ahead may see the character at `end`."""
    step = 512
    high = end
    while high > start:  # backwards in small steps: the usual text has a safe place within a line or two
        low = max(start, high - step)
        last = None
        for match in _SAFE.finditer(text, low, min(high + 1, len(text))):
            last = match
        if last is not None and last.end() <= end:
            return last.end()
        high, step = low, step * 2
    return end
