"""Quantities with units: durations, counts and byte sizes are written once, with their unit.

2000 steps | 4M tokens | 1 epoch | 2%        a Duration
4M, 64K, 1.5B                                a count (decimal: K = 1,000)
512KiB, 2 GB                                 a byte size (KiB = 1,024, KB = 1,000)
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, GetCoreSchemaHandler, PlainSerializer, Strict
from pydantic_core import CoreSchema, core_schema

Unit = Literal["steps", "tokens", "epochs", "percent"]

_COUNT = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_BYTES = {
    "b": 1,
    **{f"{p}b": 10 ** (3 * i) for i, p in enumerate("kmgt", start=1)},
    **{f"{p}ib": 1024**i for i, p in enumerate("kmgt", start=1)},
}
_LARGEST = 10**18  # beyond anything meant
_NUMBER = r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?)\s*"
_DURATION = re.compile(_NUMBER + r"([kmbgtKMBGT]?)\s*(steps?|tokens?|epochs?|%)\s*$")
_COUNT_TEXT = re.compile(_NUMBER + r"([kmbgtKMBGT]?)\s*$")
_BYTES_TEXT = re.compile(_NUMBER + r"([kmgtKMGT]?[iI]?[bB])\s*$")


def _number(text: str) -> Decimal:
    return Decimal(text.replace("_", "").replace(",", ""))


def parse_count(text: str | int | float) -> int:
    """`4M` -> 4_000_000, exactly. Raises ValueError unless the result is a whole number from 0 to 10^18."""
    match = None if isinstance(text, bool) else _COUNT_TEXT.match(str(text))
    if not match:
        raise ValueError("a count such as 4096, 64K or 1.5M")
    return _exact(_number(match[1]) * _COUNT[match[2].lower()], "a whole number")


def parse_bytes(text: str | int) -> int:
    """`512KiB` -> 524_288, `2 GB` -> 2_000_000_000; a bare integer is bytes. Raises ValueError otherwise."""
    match = None if isinstance(text, bool) else _BYTES_TEXT.match(f"{text}B" if isinstance(text, int) else str(text))
    if not match:
        raise ValueError("a size with a unit, such as 512KiB or 2GB")
    return _exact(_number(match[1]) * _BYTES[match[2].lower()], "a whole number of bytes")


def _exact(value: Decimal, expected: str) -> int:
    if value > _LARGEST:
        raise ValueError(f"{expected} of at most 10^18")
    if value != value.to_integral_value():
        raise ValueError(expected)
    return int(value)


def exact_bytes(value: int) -> str:
    """64_000_000 -> `64MB`, 524_288 -> `512KiB`: the shortest text that `parse_bytes` reads back exactly."""
    units = ((10**9, "GB"), (1024**3, "GiB"), (10**6, "MB"), (1024**2, "MiB"), (10**3, "KB"), (1024, "KiB"), (1, "B"))
    return min((f"{value // size}{unit}" for size, unit in units if value % size == 0), key=len)


def format_count(value: float) -> str:
    """15_700_000 -> `15.7M`: three significant digits, for people."""
    for size, suffix in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if abs(value) >= 0.9995 * size:  # 999,500 and more round to 1M, not to 1e+03K
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


def format_bytes(value: float) -> str:
    """1_572_864 -> `1.50 MiB`."""
    for power, suffix in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(value) >= 1024**power:
            return f"{value / 1024**power:.2f} {suffix}"
    return f"{value:.0f} B"


@dataclass(frozen=True)
class Duration:
    """A length of training: `value` in `unit`. `percent` is a share of the whole run (0-100)."""

    value: float
    unit: Unit

    expected: ClassVar[str] = "a duration with a unit, such as 2000 steps, 4M tokens, 1 epoch or 2%"

    @classmethod
    def parse(cls, text: object) -> Duration:
        """Read `2000 steps`, `4M tokens`, `1 epoch` or `2%`; raises ValueError naming the forms."""
        if isinstance(text, Duration):
            return text
        match = _DURATION.match(text) if isinstance(text, str) else None
        if not match:
            raise ValueError(cls.expected)
        unit: dict[str, Unit] = {"s": "steps", "t": "tokens", "e": "epochs", "%": "percent"}
        kind = unit[match[3][0].lower()]
        value = _number(match[1]) * _COUNT[match[2].lower()]
        if kind == "percent" and value > 100:
            raise ValueError("a percentage of at most 100%")
        if kind in ("steps", "tokens"):
            return cls(_exact(value, f"a whole number of {kind}"), kind)
        if value > _LARGEST:
            raise ValueError(f"at most 10^18 {kind}")
        return cls(float(value), kind)

    def steps(self, *, tokens_per_step: int, steps_per_epoch: float, total_steps: int | None = None) -> int:
        """This duration in optimiser steps of the *global* batch, rounded up so that it is fully covered."""
        if self.unit == "steps":
            return int(self.value)
        if self.unit == "tokens":
            return math.ceil(self.value / tokens_per_step)
        if self.unit == "epochs":
            return math.ceil(self.value * steps_per_epoch - 1e-9)
        if total_steps is None:
            raise ValueError("a percentage needs the length of the run")
        return round(total_steps * self.value / 100)

    def __str__(self) -> str:
        number = int(self.value) if self.value == int(self.value) else _positional(self.value)
        if self.unit == "percent":
            return f"{number}%"
        return f"{number} {self.unit if self.value != 1 else self.unit[:-1]}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )


def _positional(value: float) -> str:
    """Without an exponent, and read back to the same float."""
    return format(Decimal(repr(value)), "f")


@dataclass(frozen=True)
class Words:
    """Attached to a type: what it accepts, as error messages and the reference page say it."""

    text: str


def _whole(value: object) -> object:
    """Text such as `64K` and whole floats such as 1e6 become ints; the rest is left for pydantic to judge."""
    if isinstance(value, bool):
        raise ValueError("a whole number")
    if isinstance(value, str) or (isinstance(value, float) and value >= 0):
        return parse_count(value)
    return value


def _not_truth(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("a number")
    return value


def _byte_size(value: object) -> int:
    if not isinstance(value, (int, str)):
        raise ValueError("a size with a unit, such as 512KiB or 2GB")
    return parse_bytes(value)


# Python takes True for 1; a person who writes `true` does not.
Real = Annotated[float, BeforeValidator(_not_truth)]
Flag = Annotated[bool, Strict()]
# Plain ints once validated. Whole: `4096`, `64K`, `1.5M`. ByteSize: `512KiB`, `2GB`, written back with its unit.
Whole = Annotated[int, BeforeValidator(_whole)]
ByteSize = Annotated[
    int,
    BeforeValidator(_byte_size),
    PlainSerializer(exact_bytes),
    Words("a size with a unit, such as 512KiB or 2GB"),
]
