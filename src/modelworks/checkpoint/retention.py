"""Which checkpoints are kept, and what is swept away.

The invariant: only complete checkpoints count towards what is kept, and the last complete one is never removed. A
removal first renames the directory to a hidden name, so that a reader never sees a half-removed checkpoint.
"""

from __future__ import annotations

import fcntl
import math
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal

from modelworks.checkpoint.errors import CheckpointError
from modelworks.checkpoint.manifest import Manifest, decode_numbers, read_manifest
from modelworks.checkpoint.names import REMOVED, REPLACED, TEMPORARY, checkpoint_directories, step_of
from modelworks.checkpoint.read import open_checkpoint


def retain(
    directory: Path,
    *,
    keep_last: int,
    keep_every: int | None = None,
    best: tuple[str, Literal["min", "max"]] | None = None,
    protect: Collection[Path] = (),
) -> list[Path]:
    """Remove what need not be kept, and return the paths removed.

    Kept: the `keep_last` newest, every step that is a multiple of `keep_every`, the best by the metric `best[0]`,
    and `protect` (the checkpoint a run was resumed from). Incomplete directories are neither counted nor removed.
    """
    complete = [path for path, _ in _complete(directory) if not path.name.startswith(".")]
    kept = set(complete[-max(keep_last, 1) :])
    kept |= {path for path in complete if keep_every and (step_of(path) or 0) % keep_every == 0}
    if best is not None:
        kept |= {path for path in [best_checkpoint(directory, *best)] if path is not None}
    protected = {path.resolve() for path in protect}
    removed = [path for path in complete if path not in kept and path.resolve() not in protected]
    for path in removed:
        aside = path.with_name(f"{REMOVED}{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(path, aside)
        shutil.rmtree(aside)
    return removed


def best_checkpoint(directory: Path, metric: str, mode: Literal["min", "max"]) -> Path | None:
    """The complete checkpoint with the best finite value of `metric`, the newest of equals; None if none has it."""
    sign = 1.0 if mode == "min" else -1.0
    scored = []
    for path, manifest in _complete(directory):
        value = decode_numbers(manifest.metrics.get(metric))
        if isinstance(value, int | float) and math.isfinite(value):
            scored.append((sign * value, -manifest.step, path))
    return min(scored)[2] if scored else None


def latest_checkpoint(
    directory: Path,
    *,
    on_skip: Callable[[Path, str], None] | None = None,
    sections: Collection[str] | None = None,
) -> Path | None:
    """The newest checkpoint of `directory` that is whole, checksums included; None when there is none.

    sections: check only the contents of these (all files must be there in any case); default all.
    on_skip: called with the path and the reason for every newer one that cannot be used, newest first.
    """
    for path in reversed(checkpoint_directories(directory)):
        try:
            open_checkpoint(path).verify(sections)
        except (CheckpointError, OSError) as error:
            if on_skip is not None:
                on_skip(path, str(error))
        else:
            return path
    return None


def clean_leftovers(directory: Path) -> None:
    """Sweep what killed writers left: their temporaries, half-removed checkpoints, and replaced ones.

    A replaced checkpoint whose successor never arrived is put back under its name.
    """
    for path in directory.glob(f"{REPLACED}step-*"):
        final = path.with_name(path.name.removeprefix(REPLACED))
        if final.exists():
            shutil.rmtree(path)
        else:
            os.rename(path, final)
    for path in directory.glob(f"{REMOVED}step-*"):
        shutil.rmtree(path)
    for path in directory.glob(f"{TEMPORARY}*"):
        if not in_use(path):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def in_use(path: Path) -> bool:
    """Whether a living writer holds its lock; a file system without locks counts as in use, to be safe."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _complete(directory: Path) -> list[tuple[Path, Manifest]]:
    """Complete checkpoints (manifest valid, every file there with its size), oldest first."""
    found = []
    for path in checkpoint_directories(directory):
        try:
            found.append((path, read_manifest(path)))
        except (CheckpointError, OSError):
            continue
    return found
