"""Numbers as people read them, with their units."""

from __future__ import annotations

import math
from datetime import UTC, datetime

MISSING = "–"


def count(value: float | None) -> str:
    """15_700_000 -> `15.7M`."""
    if value is None or not math.isfinite(value):
        return MISSING if value is None else str(value)
    for size, suffix, least in ((1e12, "T", 1e12), (1e9, "B", 1e9), (1e6, "M", 1e6), (1e3, "K", 1e4)):
        if abs(value) >= 0.9995 * least:  # 999,500 and more round to 1M, not to 1e+03K
            return f"{value / size:.3g}{suffix}"
    return f"{value:,.0f}" if abs(value) >= 999.5 or value == int(value) else f"{value:.3g}"


def size(value: float | None) -> str:
    """1_572_864 -> `1.5 MiB`."""
    if value is None:
        return MISSING
    for power, suffix in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(value) >= 1024**power:
            return f"{value / 1024**power:.3g} {suffix}"
    return f"{value:.0f} B"


def duration(seconds: float | None) -> str:
    """3_725 -> `1 h 2 min`."""
    if seconds is None:
        return MISSING
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def percent(share: float | None, digits: int = 1) -> str:
    return MISSING if share is None else f"{100 * share:.{digits}f}\u00a0%"


def figure(value: float | None, digits: int = 3) -> str:
    """A measured figure with so many decimals."""
    return MISSING if value is None else f"{value:,.{digits}f}"


def quantity(value: float, unit: str) -> str:
    """A value in its unit, scaled for people: bytes in binary steps, large counts with a suffix."""
    if not math.isfinite(value):
        return str(value)
    if unit == "bytes":
        return size(value)
    if unit.startswith("FLOP"):
        for scale, suffix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
            if abs(value) >= scale:
                return f"{value / scale:.3g}\u00a0{suffix}{unit}"
    number = count(value) if abs(value) >= 100 else f"{value:.4g}"
    return f"{number} {unit}".strip()


def moment(time: float | None) -> str:
    """Seconds since the epoch -> `2026-01-31 14:05 UTC`."""
    return MISSING if time is None else datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M UTC")
