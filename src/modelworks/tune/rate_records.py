"""A search's outcomes as records, for pages: `records.jsonl` beside the store, written anew from it.

    tune/loss        nats/token   of a trial that finished: its validation loss
    tune/train_loss  nats/token   mean training loss of its last tenth
    tune/curve       nats/token   training loss on the way, thinned; one record a point
    tune/diverged    event        why a trial diverged
    tune/failed      event        why a trial failed
    tune/proposal    event        JSON: best, as_good, largest_stable, diverges, noise, remarks, share, steps, …

`step` is the trial's. Tags of all but the proposal: `rate` (text of the number) and `seed`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from modelworks.records import Record, RecordWriter
from modelworks.tune.trials import Outcome

FILE = "records.jsonl"


def write_rate_records(directory: Path, outcomes: Iterable[Outcome], proposal: Mapping[str, Any]) -> Path:
    """proposal: what JSON can hold. Replaces the file. Raises OSError."""
    path, unfinished = directory / FILE, directory / f".{FILE}.tmp"
    unfinished.unlink(missing_ok=True)
    writer = RecordWriter(unfinished)
    try:
        writer.write(*(record for outcome in outcomes for record in _records(outcome)))
        writer.write(Record(0, "tune/proposal", json.dumps(proposal, ensure_ascii=False), kind="event"))
    finally:
        writer.close()
    return unfinished.replace(path)


def _records(outcome: Outcome) -> Iterator[Record]:
    tags: dict[str, str | int] = {"rate": repr(outcome.trial.rate), "seed": outcome.trial.seed}
    unit = "nats/token"
    for step, value in outcome.curve:
        yield Record(step, "tune/curve", value, unit, tags=tags)
    if outcome.loss is not None:
        yield Record(outcome.steps, "tune/loss", outcome.loss, unit, tags=tags)
    if outcome.train_loss is not None:
        yield Record(outcome.steps, "tune/train_loss", outcome.train_loss, unit, tags=tags)
    if outcome.status != "finished":
        yield Record(outcome.steps, f"tune/{outcome.status}", outcome.reason, kind="event", tags=tags)
