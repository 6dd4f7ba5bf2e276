"""The directory of a run: who may use it, and what a resumed run keeps of its records.

    runs/<name>/{config.yaml, records.jsonl, summary.json, tensorboard/, checkpoints/, report.html, lock}

A run holds `lock` (`LockFile`) while it uses the directory; the lock dies with the process, so a killed run leaves
nothing to clean up. Going on from the checkpoint of step c cuts `records.jsonl` after step c: the rows behind it
are of updates that are about to be made again, and are written again. Rows of steps that the run itself went back
behind, before it came to c, are kept: its event `rollback` follows them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from modelworks.checkpoint import InUse, LockFile, open_storage
from modelworks.config import RunConfig, UserError, dump_yaml

# What a run writes, and therefore what `--overwrite` removes, besides checkpoints, which are their storage's. `ranks`,
# the output of a split run's processes, is for whoever starts them.
_CONTENTS = (
    "config.yaml",
    "records.jsonl",
    "summary.json",
    "report.html",
    "stopped.md",
    "tensorboard",
    "profile",
)


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the run's lock; raises `UserError` naming the process that has it, or why there can be no run here."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = LockFile(run_dir / "lock")
    except InUse as holder:
        raise UserError(
            f"{run_dir} is in use by another run ({holder}); wait for it, or choose another `name`"
        ) from None
    except OSError as error:
        raise UserError(f"{error.filename or run_dir}: a run cannot be kept here ({error.strerror})") from None
    try:
        yield
    finally:
        lock.release()


def check_use(run_dir: Path, *, resume: bool, overwrite: bool) -> None:
    """An existing run needs `resume` or `overwrite`. Nothing is touched."""
    if resume and overwrite:
        raise UserError("--resume and --overwrite exclude each other")
    checkpoints = open_storage(run_dir / "checkpoints").checkpoints()
    if (_existing(run_dir) or checkpoints) and not (resume or overwrite):
        raise UserError(
            f"{run_dir} already holds a run; go on with --resume, start over with --overwrite, or choose another `name`"
        )


def clear(run_dir: Path) -> None:
    """Remove what an earlier run wrote but its checkpoints, and nothing else; of a link, only the link."""
    for path in _existing(run_dir):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _existing(run_dir: Path) -> list[Path]:
    return [run_dir / name for name in _CONTENTS if os.path.lexists(run_dir / name)]


def write_config(run_dir: Path, config: RunConfig) -> None:
    write_atomically(run_dir / "config.yaml", dump_yaml(config))


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> None:
    write_atomically(run_dir / "summary.json", json.dumps(summary, indent=1, default=str) + "\n")


def read_summary(run_dir: Path) -> dict[str, Any]:
    """What a run that ended wrote; empty where there is none, or none that can be read."""
    try:
        summary = json.loads((run_dir / "summary.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def cut_records(path: Path, step: int, rollbacks: int = 0) -> int:
    """Drop the records after `step`, and lines that are none (torn, damaged); returns how many were dropped.

    rollbacks: how often the run had gone back when it came to that step.
    """
    if not path.exists():
        return 0
    kept, dropped, seen = [], 0, 0
    with path.open("rb") as lines:
        for line in lines:
            try:
                row = json.loads(line)
                # In the order of writing: behind the last rollback that counts, all that is of no later step.
                keep = line.endswith(b"\n") and (seen < rollbacks or (seen == rollbacks and row["step"] <= step))
                if row["name"] == "rollback":
                    seen += 1
                    keep = keep and seen <= rollbacks
            except (ValueError, KeyError, TypeError):
                keep = False
            if keep:
                kept.append(line.decode("utf-8"))
            else:
                dropped += 1
    if dropped:
        write_atomically(path, "".join(kept))
    return dropped


def write_atomically(path: Path, text: str) -> None:
    """Replace a file so that a reader, or a crash, sees the old text or the new one. Raises OSError naming `path`."""
    unfinished = path.with_name(f".{path.name}.tmp")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
