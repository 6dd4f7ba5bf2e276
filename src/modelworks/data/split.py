"""Which documents are for validation: a function of the text alone, so that copies of a text land on one side."""

from __future__ import annotations

import hashlib
from typing import Literal

Split = Literal["train", "validation"]


def content_fraction(text: str, purpose: bytes = b"split") -> float:
    """A number in [0, 1) that looks random and depends on nothing but the text and the purpose."""
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=6, person=purpose).digest()
    return int.from_bytes(digest, "big") / 2**48  # exact in a double, and below 1


def split_of(text: str, validation: float) -> Split:
    """validation: share of the documents, 0-1."""
    return "validation" if content_fraction(text) < validation else "train"
