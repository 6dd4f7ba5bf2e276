"""How few tokens a text can have, told from its length alone: what is too long for a model need not be tokenised.

A token stands for at most as many bytes as the longest of the vocabulary has, and where it is known which bytes of a
text a tokeniser keeps, its tokens cover all of these. Then bytes / longest is a lower bound. Tokenisers that may drop
or merge characters (white space that is stripped, unknown characters that become one token) have no such bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_NFC_SHRINKS = 4  # NFC makes bytes at most 3.5 times fewer: Unicode's worst is U+03B9 U+0308 U+0301, by singletons
_KEEPING = frozenset({"ByteLevel", "Digits", "Metaspace", "Prepend", "NFC"})  # normalisers and pre-tokenisers


@dataclass(frozen=True)
class LengthBound:
    """longest: bytes of a text that one token covers at most. dropped: bytes that no token covers, such as control
    characters that a vocabulary was trained without."""

    longest: int
    dropped: bytes

    def fewest_tokens(self, text: str) -> int:
        return -(-len(text.encode().translate(None, self.dropped)) // self.longest)


def length_bound(rules: Mapping[str, Any], byte_of: Mapping[str, int]) -> LengthBound | None:
    """rules: of `tokenizer.json`. byte_of: the byte that a character of a byte-level token stands for. None: there may
    be no such bound."""
    model, steps = rules["model"], [*_steps(rules["normalizer"]), *_steps(rules["pre_tokenizer"])]
    kinds = {step["type"] for step in steps}
    added = rules.get("added_tokens") or []
    if not all(_keeps_text(step) for step in steps) or any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    tokens = [entry if isinstance(entry, str) else entry[0] for entry in model.get("vocab") or ()]  # Unigram: pairs
    dropped = b""
    if "ByteLevel" in kinds:  # each character of a token is one byte
        sizes = [len(token) for token in tokens]
        dropped = bytes({*byte_of.values()} - {byte_of.get(token) for token in tokens})
    elif model.get("byte_fallback"):  # "▁" (3 bytes) stands for a blank or for itself
        sizes = [len(token.encode()) for token in tokens]
    else:
        return None
    longest = max([*sizes, *(len(token["content"].encode()) for token in added)])
    if "NFC" not in kinds:
        return LengthBound(longest, dropped)
    return None if dropped else LengthBound(longest * _NFC_SHRINKS, b"")  # it may make what is dropped


def _steps(rule: dict[str, Any] | None) -> list[dict[str, Any]]:
    if rule is None:
        return []
    if rule["type"] == "Sequence":
        return [step for part in rule.get("normalizers") or rule.get("pretokenizers") or () for step in _steps(part)]
    return [rule]


def _keeps_text(step: dict[str, Any]) -> bool:
    if step["type"] == "Split":
        return bool(step["behavior"] != "Removed")
    if step["type"] == "Replace":  # SentencePiece's only: a blank as "▁"
        return bool(step["pattern"] == {"String": " "} and step["content"] == "▁")
    return step["type"] in _KEEPING
