"""`--html FILE`: what must hold of the file."""

from __future__ import annotations

import os
from pathlib import Path

from modelworks.config import UserError


def check_writable(path: Path, usual: str) -> None:
    """Raise UserError where no page can be written, before anything is computed for it. usual: a name for it."""
    if path.is_dir():
        raise UserError(f"--html: {path} is a directory, expected a file such as {path / usual}")
    if path.exists() and not path.is_file():
        raise UserError(f"--html: {path} is no ordinary file, expected a file such as {usual}")
    there = next(parent for parent in path.absolute().parents if parent.exists())
    if not there.is_dir() or not os.access(path if path.exists() else there, os.W_OK):
        raise UserError(f"--html: {path} cannot be written")
