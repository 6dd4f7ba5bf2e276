"""Quantities on the command line of `modelworks plan`: GPUs, shares, and batches in rows or in tokens.

512, 512 rows                 rows: a bare number counts sequences, as `train.global_batch` does
4M, 4M tokens, 4194304 tokens tokens: a number with a suffix or with the word
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from modelworks.config import UserError, format_count, parse_count

MOST_GPUS = 2**20  # what one axis of a layout may have; the largest clusters have a fifth of it
_NEAR = 0.05  # how far from the tokens that were asked for a rounder number of rows may lie
_BATCH = re.compile(r"\s*(?P<number>.*?)\s*(?P<unit>rows?|sequences?|tokens?)?\s*$", re.IGNORECASE)


class Batch(NamedTuple):
    """rows of a step, and in words how that came of what was written (empty where it is what was written)."""

    rows: int
    how: str


def parse_batch(text: str, seq_len: int) -> Batch:
    """Rows of a step. Raises UserError.

    Tokens that are no whole number of rows become the number of rows within 5 % that can be halved most often, so
    that layouts can divide it: 4M tokens of 8,192 are 488.3 rows, and 512 are meant.
    """
    match = _BATCH.match(text)
    number, unit = (match["number"], (match["unit"] or "").lower()) if match else (text, "")
    try:
        count = parse_count(number)
    except ValueError:
        expected = "tokens, such as 4M or `4194304 tokens`, or rows, such as 512"
        raise UserError(f"--global-batch: got {text!r}, expected {expected}") from None
    if count == 0:
        raise UserError("--global-batch: got 0, expected at least one row")
    in_tokens = unit.startswith("token") or (not unit and not number.strip()[-1:].isdigit())
    if not in_tokens:
        return Batch(count, "")
    if count < seq_len:
        raise UserError(
            f"--global-batch: got {text!r}, expected at least one row, which is {seq_len:,} tokens "
            f"(rows are written without a suffix: {min(count, 512)})"
        )
    if count % seq_len == 0:
        return Batch(count // seq_len, f"{count:,} tokens are {count // seq_len:,} rows of {seq_len:,}")
    rows = _round_rows(count / seq_len)
    return Batch(
        rows,
        f"{format_count(count)} tokens are {count / seq_len:,.1f} rows of {seq_len:,}, no whole number: taken as "
        f"{rows:,} rows, {rows * seq_len:,} tokens",
    )


def parse_gpus(text: str) -> int:
    """Raises UserError for anything but a whole number from 1 to `MOST_GPUS`."""
    try:
        count = parse_count(text)
    except ValueError:
        count = 0
    if not 1 <= count <= MOST_GPUS:
        raise UserError(f"--gpus: got {text}, expected a whole number from 1 to {MOST_GPUS:,}")
    return count


def parse_share(text: str, flag: str) -> float:
    """`0.1` or `10%` -> 0.1, from 0 up to but not including 1. Raises UserError."""
    number = text.strip()
    try:
        value = float(number.removesuffix("%")) / (100.0 if number.endswith("%") else 1.0)
    except ValueError:
        value = math.nan
    if not 0.0 <= value < 1.0:
        raise UserError(f"{flag}: got {text}, expected a share from 0 up to 1, such as 0.1 or 10%")
    return value


def _round_rows(exact: float) -> int:
    """The whole number within `_NEAR` of it with the most factors of two, the nearest of those; else the nearest."""
    power = 1 << math.ceil(math.log2(exact))
    while power >= 1:
        nearest = max(1, round(exact / power)) * power
        if abs(nearest - exact) <= _NEAR * exact:
            return nearest
        power //= 2
    return max(1, round(exact))
