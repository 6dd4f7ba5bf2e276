"""`Record`: one measured row. Training writes them, reports read nothing else.

A run's `records.jsonl` holds one record a line, appended and flushed, so that a killed run keeps every line
but perhaps the last; a torn last line is skipped by the reader.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

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
    """Appends records to a file, one JSON object a line. Non-finite numbers are written as the text `nan`, `inf`.

    A call writes all of its records or, raising OSError (a full disk), none: it can be repeated later.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, *records: Record) -> None:
        rows = "".join(_row(record) for record in records).encode()
        size = os.fstat(self._descriptor).st_size
        try:
            while rows:
                rows = rows[os.write(self._descriptor, rows) :]
        except OSError:
            os.ftruncate(self._descriptor, size)
            raise

    def close(self) -> None:
        os.close(self._descriptor)


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a file in order; a line that is none (torn by a kill, damaged) is skipped."""
    with path.open("rb") as lines:
        for line in lines:
            try:
                row = json.loads(line)
                value = float(row["value"]) if row.pop("non_finite", False) else row["value"]
                record = Record(
                    row["step"], row["name"], value, row["unit"], row["kind"], row.get("tags", {}), row["time"]
                )
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
            yield record


def mark_undone(records: Iterable[Record]) -> list[Record]:
    """The records in order, those of steps that the run went back behind with the tag `undone`: the number of the
    rollback. The event `rollback` follows the rows that it undid; what is written after it is of the steps made anew.
    """
    marked: list[Record] = []
    for record in records:
        if record.name == "rollback" and record.kind == "event":
            try:
                fields = json.loads(str(record.value))
                good, number = int(fields["good"]), int(fields["number"])
            except (ValueError, KeyError, TypeError):
                good, number = record.step, 0  # damaged: it undoes nothing
            marked = [_undone(row, number) if row.step > good else row for row in marked]
        marked.append(record)
    return marked


def _undone(record: Record, number: int) -> Record:
    known = record.name == "rollback" or "undone" in record.tags
    return record if known else replace(record, tags={**record.tags, "undone": number})


def _row(record: Record) -> str:
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
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
