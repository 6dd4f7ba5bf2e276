"""What a run left on disk, read for a report: its records, its resolved config, its summary.

A report is also wanted of a run that is still going, was killed, or never validated, so every part may be missing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from modelworks.config import BatchSizes, UserError, parse_run_config
from modelworks.records import Record, mark_undone, read_records


@dataclass
class Series:
    """One measured quantity over the run: one value a step, in the order of steps. times: seconds since the epoch."""

    name: str
    unit: str
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def last(self) -> float | None:
        """The last finite value."""
        return next((value for value in reversed(self.values) if math.isfinite(value)), None)

    def best(self) -> tuple[int, float] | None:
        """(step, value) of the lowest finite value."""
        finite = [(value, step) for step, value in zip(self.steps, self.values, strict=True) if math.isfinite(value)]
        return (min(finite)[1], min(finite)[0]) if finite else None


@dataclass(frozen=True)
class TokenCounts:
    """Tokens that a run's steps are trained on, padding included."""

    batches: BatchSizes
    seq_len: int

    @property
    def of_step(self) -> tuple[int, int]:
        """Least and most: under a batch ramp steps differ."""
        sizes = self.batches.sizes
        return sizes[0] * self.seq_len, sizes[-1] * self.seq_len

    def at(self, step: int) -> int:
        """Of the first `step` steps."""
        return self.batches.first_sample(step) * self.seq_len


@dataclass
class Run:
    """A run directory in memory. config: the resolved YAML as a tree; config_text: as it stands in the file.

    tagged: figures of one rank, axis or stage, measured and predicted; they are in neither `series` nor `predicted`.
    undone: figures of steps that the run went back behind, which are in none of the others. Events of such steps are
    among the others, with the tag `undone`.
    """

    name: str
    directory: Path
    config: dict[str, Any]
    config_text: str
    summary: dict[str, Any]
    series: dict[str, Series]
    predicted: dict[str, Record]
    events: list[Record]
    tagged: list[Record]
    undone: list[Record]
    first_time: float | None
    last_time: float | None

    @property
    def finished(self) -> bool:
        return bool(self.summary)

    @property
    def steps(self) -> int:
        """The last step that left a record."""
        return max((series.steps[-1] for series in self.series.values() if series.steps), default=0)

    @cached_property
    def tokens(self) -> TokenCounts | None:
        """What its steps have read, from the config; None where that does not tell."""
        batch, length = self.setting("train.global_batch"), self.setting("data.seq_len")
        if not isinstance(batch, int) or not isinstance(length, int):
            return None
        if self.setting("train.batch_ramp") is None:
            return TokenCounts(BatchSizes.constant(batch), length)
        try:
            return TokenCounts(parse_run_config(self.config_text, "config.yaml").batches, length)
        except UserError:
            return None

    @property
    def seconds(self) -> float | None:
        """Length of the run: as it reported it, else from its first to its last record."""
        if isinstance(reported := self.summary.get("seconds"), (int, float)):
            return float(reported)
        if self.first_time is None or self.last_time is None:
            return None
        return self.last_time - self.first_time

    def setting(self, key: str) -> Any:
        """A value of the config by its dotted path, or None."""
        value: Any = self.config
        for part in key.split("."):
            if not isinstance(value, dict):
                return None
            value = value.get(part)
        return value

    def last(self, name: str) -> float | None:
        """The last finite value of a series, or None if there is none."""
        return self.series[name].last if name in self.series else None

    def events_named(self, name: str) -> list[Record]:
        return [event for event in self.events if event.name == name]


def read_run(directory: Path) -> Run:
    """Read a run directory. Raises FileNotFoundError if there is no such directory."""
    if not directory.is_dir():
        raise FileNotFoundError(f"there is no run at {directory}")
    config_text = _read(directory / "config.yaml")
    try:
        config = yaml.safe_load(config_text)
    except yaml.YAMLError:
        config = None  # the page shows the text as it is
    try:
        summary = json.loads(_read(directory / "summary.json") or "{}")
    except json.JSONDecodeError:
        summary = {}
    records = directory / "records.jsonl"
    run = Run(
        name=directory.resolve().name,
        directory=directory,
        config=config if isinstance(config, dict) else {},
        config_text=config_text,
        summary=summary if isinstance(summary, dict) else {},
        series={},
        predicted={},
        events=[],
        tagged=[],
        undone=[],
        first_time=None,
        last_time=None,
    )
    _add_records(run, mark_undone(read_records(records)) if records.exists() else ())
    return run


def event_fields(event: Record) -> dict[str, Any]:
    """The JSON object that an event's text holds; `{"text": …}` where it is plain text."""
    try:
        fields = json.loads(str(event.value))
    except json.JSONDecodeError:
        fields = None
    return fields if isinstance(fields, dict) else {"text": str(event.value)}


def _add_records(run: Run, records: Iterable[Record]) -> None:
    measured: dict[str, dict[int, Record]] = {}
    tagged: dict[tuple[Any, ...], Record] = {}
    for record in records:
        run.first_time = record.time if run.first_time is None else min(run.first_time, record.time)
        run.last_time = record.time if run.last_time is None else max(run.last_time, record.time)
        if record.kind == "event":
            run.events.append(record)
        elif "undone" in record.tags:
            run.undone.append(record)
        elif isinstance(record.value, str):
            continue
        elif record.tags:
            tagged[record.step, record.name, record.kind, *sorted(record.tags.items())] = record
        elif record.kind == "predicted":
            run.predicted[record.name] = record
        else:
            # A step that was made again after a crash counts once, as it was made last.
            measured.setdefault(record.name, {})[record.step] = record
    run.tagged = list(tagged.values())
    for name, by_step in measured.items():
        rows = sorted(by_step.values(), key=lambda row: row.step)
        run.series[name] = Series(
            name, rows[-1].unit, [r.step for r in rows], [float(r.value) for r in rows], [r.time for r in rows]
        )


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
