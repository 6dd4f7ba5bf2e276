"""`Record`: one measured row. Training writes them, reports read nothing else.

A run's `records.jsonl` holds one record a line, appended and flushed, so that a killed run keeps every line
but perhaps the last; a torn last line is skipped by the reader.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

Kind = Literal["measured", "predicted", "event"]


@dataclass(frozen=True)
class Record:
    """step: optimiser steps done. name: e.g. `train/loss`. unit: e.g. `nats/token`, `tokens/s`, `bytes`.

    value: a number for measured and predicted, text for events. time: seconds since the epoch.
    """

    step: int
    name: str
    value: float | str
    unit: str = ""
    kind: Kind = "measured"
    tags: dict[str, str | int] = field(default_factory=dict)
    time: float = field(default_factory=time.time)


class RecordWriter:
    """Appends records to a file, one JSON object a line. Non-finite numbers are written as the text `nan`, `inf`."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, *records: Record) -> None:
        for record in records:
            row: dict[str, Any] = {
                "step": record.step,
                "name": record.name,
                "value": record.value,
                "unit": record.unit,
                "kind": record.kind,
                "time": round(record.time, 3),
            }
            if isinstance(record.value, float) and not math.isfinite(record.value):
                row["value"], row["non_finite"] = str(record.value), True
            if record.tags:
                row["tags"] = record.tags
            self._file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a file in order; a torn last line (a killed run) is skipped."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            value = float(row["value"]) if row.pop("non_finite", False) else row["value"]
            yield Record(
                row["step"], row["name"], value, row["unit"], row["kind"], row.get("tags", {}), row["time"]
            )
