"""How checkpoints and their files are named: `step-00001000`, the manifest, and the hidden names of unfinished work."""

from __future__ import annotations

import re
from pathlib import Path

MANIFEST, MANIFEST_CHECKSUM = "manifest.json", "manifest.checksum"
MANIFEST_CRC = "manifest.crc32"  # beside manifests of format version 1
LATEST = "latest"
LOCK = ".lock"  # held by the run that saves to a directory
TEMPORARY, REPLACED, REMOVED = ".tmp-", ".replaced-", ".removed-"
_STEP = re.compile(r"step-([0-9]{8,18})$")


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def is_step(name: str) -> bool:
    return _STEP.fullmatch(name) is not None


def step_number(name: str) -> int:
    """The step that a name says; 0 for a name that says none."""
    match = _STEP.search(name)
    return int(match[1]) if match else 0


def step_of(path: Path) -> int | None:
    """The step in the directory's name, or None when it is not named as a checkpoint of a run."""
    match = _STEP.search(path.name)
    return int(match[1]) if match else None


def checkpoint_directories(directory: Path) -> list[Path]:
    """Checkpoints of a run by their names, oldest first, complete or not.

    One that a killed writer had moved aside to replace it stands in as long as its successor is absent.
    """
    if not directory.is_dir():
        return []
    visible = {path.name: path for path in directory.iterdir() if _STEP.fullmatch(path.name) and path.is_dir()}
    for path in directory.glob(f"{REPLACED}step-*"):
        visible.setdefault(path.name.removeprefix(REPLACED), path)
    return sorted(visible.values(), key=lambda path: step_of(path) or 0)
