"""A run's figures, from what it left in its directory: the summary when it ended, its records while it runs."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelworks.config import RunConfig, UserError, load_run_config, nearest
from modelworks.records import mark_undone, read_records

# Names of the summary, in the order shown. What records call them, for a run without a summary yet.
FIGURES = {
    "steps": None,
    "tokens": None,
    "train_loss": "train/loss",
    "val_loss": "val/loss",
    "val_bits_per_byte": "val/bits_per_byte",
    "tokens_per_second": "train/tokens_per_second",
    "mfu": "train/mfu",
    "seconds": None,
}
_FILES = ("config.yaml", "records.jsonl", "report.html", "stopped.md", "checkpoints")
_TOLD = ("spike", "rollback", "divergence", "judgement")
_TAIL_BYTES = 1 << 20  # of the records: enough for the last evaluation of any run that logs every step


@dataclass(frozen=True)
class RunFigures:
    """directory, and what is in it. config is None when it cannot be read; `problem` then says why.

    state: `running` (its lock is held), `done` (it wrote a summary), `stopped` (it did neither).
    """

    directory: Path
    config: RunConfig | None
    problem: str
    state: str
    values: dict[str, Any]
    files: dict[str, Path]

    @property
    def name(self) -> str:
        return self.directory.name


def all_runs(runs_dir: Path) -> list[Path]:
    """The directories that hold a run, by the time of their configuration."""
    found = runs_dir.glob("*/config.yaml") if runs_dir.is_dir() else []
    return [path.parent for path in sorted(found, key=lambda path: (path.stat().st_mtime, path))]


def find_run(name: str, runs_dir: Path) -> Path:
    """A run by its name, or by its directory. Raises UserError naming the nearest."""
    for path in (runs_dir / name, Path(name)):
        if (path / "config.yaml").is_file():
            return path
    names = [path.name for path in all_runs(runs_dir)]
    close = nearest(name, names)
    known = f"known: {', '.join(names)}" if names else f"there are none in {runs_dir}/"
    raise UserError(f"no run is called {name!r}; " + (f"did you mean `{close}`?" if close else known))


def read_figures(directory: Path) -> RunFigures:
    """Whatever the directory tells; a damaged file costs its own figures, not the listing."""
    config, problem = None, ""
    try:
        config = load_run_config(directory / "config.yaml")
    except UserError as error:
        problem = str(error).splitlines()[0]
    summary = _read_summary(directory / "summary.json")
    running = _is_locked(directory / "lock")
    values = summary if summary and not running else _from_records(directory / "records.jsonl", config)
    state = "running" if running else "done" if summary else "stopped"
    files = {name: directory / name for name in _FILES if (directory / name).exists()}
    return RunFigures(directory, config, problem, state, values, files)


@dataclass(frozen=True)
class Told:
    """What was told of a run's health at a step. kind: spike, rollback, divergence, or what was judged. undone: the run
    went back behind it."""

    step: int
    kind: str
    text: str
    undone: bool


def health_told(directory: Path) -> list[Told]:
    """In the order in which it was told; empty where there are no records."""
    path = directory / "records.jsonl"
    told = []
    for event in mark_undone(read_records(path)) if path.is_file() else []:
        if event.kind != "event" or event.name not in _TOLD:
            continue
        try:
            fields = json.loads(str(event.value))
            kind = str(fields.get("kind", event.name))
            text = fields.get("text") or fields.get("reason") or f"back to step {fields.get('good')}"
        except (ValueError, AttributeError):
            continue
        told.append(Told(event.step, kind, str(text), "undone" in event.tags))
    return told


def _read_summary(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _from_records(path: Path, config: RunConfig | None) -> dict[str, Any]:
    """The last value of each figure among the last records, and the steps and tokens they speak of."""
    last: dict[str, Any] = {}
    for row in _last_rows(path):
        if row.get("kind") == "measured":
            last[str(row.get("name"))] = row
    values = {name: last[record]["value"] for name, record in FIGURES.items() if record in last}
    if step := max((row["step"] for row in last.values()), default=0):
        values["steps"] = step
        if config is not None:
            values["tokens"] = config.batches.first_sample(step) * config.data.seq_len
    return values


def _last_rows(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue  # the first line may be cut by where we began, the last by a kill
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
