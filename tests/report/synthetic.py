"""Runs that never were, for tests of the pages about them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modelworks.records import Record, RecordWriter

START = 1_767_000_000.0


def write_run(
    directory: Path,
    *,
    losses: Sequence[float],
    validate_every: int = 0,
    events: Sequence[tuple[int, str, Any]] = (),
    more: Sequence[Record] = (),
    config: Mapping[str, Any] | None = None,
    summary: Mapping[str, Any] | None = None,
) -> Path:
    """A run directory with a loss a step, some validation, and any further records."""
    directory.mkdir(parents=True, exist_ok=True)
    values = {"name": directory.name, "data": {"seq_len": 256}, "train": {"global_batch": 4}, **(config or {})}
    (directory / "config.yaml").write_text(json.dumps(values), encoding="utf-8")
    rows = [
        Record(step, name, value if isinstance(value, str) else json.dumps(value), kind="event", time=START + step)
        for step, name, value in events
    ]
    rows += more
    for step, loss in enumerate(losses, start=1):
        time = START + step
        rows.append(Record(step, "train/loss", loss, "nats/token", time=time))
        rows.append(Record(step, "train/lr", 1e-3, time=time))
        rows.append(Record(step, "train/grad_norm", abs(loss), time=time))
        rows.append(Record(step, "train/tokens_per_second", 1000.0 + step, "tokens/s", time=time))
        if validate_every and step % validate_every == 0:
            rows.append(Record(step, "val/loss", loss, "nats/token", time=time))
            rows.append(Record(step, "val/bits_per_byte", loss / math.log(2) / 2, "bits/byte", time=time))
    writer = RecordWriter(directory / "records.jsonl")
    writer.write(*rows)
    writer.close()
    if summary is not None:
        (directory / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return directory


def baselines(bz2: float, xz: float) -> list[Record]:
    return [
        Record(0, f"baseline/{name}_bits_per_byte", value, "bits/byte", time=START)
        for name, value in (("bz2", bz2), ("xz", xz))
    ]
