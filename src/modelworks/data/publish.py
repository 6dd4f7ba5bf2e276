"""A directory that is complete or absent, built by at most one process at a time.

A build writes under a temporary name beside the final one and renames it when every file is on disk. A lock on the
key, which the operating system drops when its holder dies, keeps two builders apart and tells a dead builder's
leavings, which the next build removes, from a living one's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

_TEMPORARY = ".building-"


@contextlib.contextmanager
def sole_builder(root: Path, key: str, wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of `key`; call `wait` once if another process holds it."""
    root.mkdir(parents=True, exist_ok=True)
    with _lock_file(root, key).open("a") as file:
        if not _try_lock(file):
            wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def published(final: Path) -> Iterator[Path]:
    """A new directory to fill, which becomes `final` at the end, or disappears on any error. Needs the lock."""
    temporary = final.parent / f"{_TEMPORARY}{final.name}-{os.getpid()}"
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for directory, _, _ in os.walk(temporary):
            _sync_directory(Path(directory))
        os.rename(temporary, final)
        _sync_directory(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_leavings(root: Path, held: str) -> None:
    """Remove temporary directories whose builders are dead. held: the key whose lock the caller has."""
    for leaving in root.glob(f"{_TEMPORARY}*"):
        key = leaving.name.removeprefix(_TEMPORARY).rsplit("-", 1)[0]
        with _lock_file(root, key).open("a") as file:
            if key == held or _try_lock(file):
                shutil.rmtree(leaving, ignore_errors=True)


def write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _lock_file(root: Path, key: str) -> Path:
    return root / f".lock-{key}"


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
