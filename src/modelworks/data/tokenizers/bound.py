"""How few tokens a text can have, told from its length alone: what is too long for a model need not be tokenised.

A token stands for at most as many bytes as the longest of the vocabulary has, and where a tokeniser keeps every byte of
a text, its tokens cover all of them. Then bytes / longest is a lower bound. Tokenisers that may drop or merge
characters (white space that is stripped, unknown characters that become one token) have no such bound.
"""

from __future__ import annotations

from typing import Any

_NFC_SHRINKS = 4  # NFC makes bytes at most 3.5 times fewer: Unicode's worst is U+03B9 U+0308 U+0301, by singletons
_KEEPING = frozenset({"ByteLevel", "Digits", "Metaspace", "Prepend", "NFC"})


def longest_token(rules: dict[str, Any]) -> int | None:
    """Bytes of a text that one token covers at most. rules: of `tokenizer.json`. None: there may be no such bound."""
    model, steps = rules["model"], [*_steps(rules["normalizer"]), *_steps(rules["pre_tokenizer"])]
    if not all(_keeps_text(step) for step in steps):
        return None
    added = rules.get("added_tokens") or []
    if any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    vocabulary = model.get("vocab") or ()
    tokens = [entry if isinstance(entry, str) else entry[0] for entry in vocabulary]  # a Unigram lists pairs
    byte_level = any(step["type"] == "ByteLevel" for step in steps)
    if byte_level:  # each character of a token is one byte; all 256 must be there, or bytes are dropped
        if len([token for token in tokens if len(token) == 1]) < 256:
            return None
        sizes = [len(token) for token in tokens]
    elif model.get("byte_fallback"):  # "▁" (3 bytes) stands for a blank or for itself
        sizes = [len(token.encode()) for token in tokens]
    else:
        return None
    longest = max([*sizes, *(len(token["content"].encode()) for token in added)])
    return longest * (_NFC_SHRINKS if any(step["type"] == "NFC" for step in steps) else 1)


def _steps(rule: dict[str, Any] | None) -> list[dict[str, Any]]:
    if rule is None:
        return []
    if rule["type"] == "Sequence":
        return [step for part in rule.get("normalizers") or rule.get("pretokenizers") or () for step in _steps(part)]
    return [rule]


def _keeps_text(step: dict[str, Any]) -> bool:
    kind = step["type"]
    if kind == "Split":
        return bool(step["behavior"] != "Removed")
    if kind == "Replace":  # SentencePiece's only: a blank as "▁"
        return step["pattern"] == {"String": " "} and step["content"] == "▁"
    return kind in _KEEPING
