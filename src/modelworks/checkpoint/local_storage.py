"""Checkpoints in a directory of this machine (or of a file system that all machines of the run share).

Written under `.tmp-<name>-<id>` and renamed: a directory that is there under its own name is complete. A directory
cannot be renamed over another, so one of the same step first steps aside as `.replaced-<name>`; readers know that name
as long as its successor is absent. The writer holds a lock (flock) on its temporary directory, which dies with it;
that is how leftovers of dead writers are told from a live one. A run holds another one, `.lock`, from its start to its
end. That file also tells its directory from what appears in its place when a disk is unmounted.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from modelworks.checkpoint.errors import CheckpointError
from modelworks.checkpoint.faults import reached
from modelworks.checkpoint.lock_file import NO_LOCKS, InUse, LockFile
from modelworks.checkpoint.names import LATEST, LOCK, REMOVED, REPLACED, TEMPORARY, checkpoint_directories
from modelworks.checkpoint.storage import check_inside

_ATTEMPT = re.compile(r"(.+)-[0-9a-f]{8}$")
_LARGE = 1 << 20  # bytes


class LocalFolder:
    """The files of one checkpoint directory. Links that lead out of it are refused."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._root = os.path.realpath(path)

    @property
    def label(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    def sizes(self) -> Mapping[str, int]:
        found: dict[str, int] = {}
        for directory, _, files in os.walk(self._root):
            for file in files:
                path = os.path.join(directory, file)
                name = os.path.relpath(path, self._root).replace(os.sep, "/")
                if os.path.isfile(path) and self._is_inside(path):
                    found[name] = os.stat(path).st_size
        return found

    def size(self, file: str) -> int | None:
        path = self._place(file)
        return path.stat().st_size if path.is_file() else None

    def list(self) -> list[str]:
        return sorted(self.sizes())

    def read(self, file: str, start: int, length: int) -> bytes:
        with self._place(file).open("rb", buffering=0) as opened:
            opened.seek(start)
            parts = []
            while length > 0 and (part := opened.read(length)):
                parts.append(part)
                length -= len(part)
        return b"".join(parts)

    def read_into(self, file: str, start: int, buffer: memoryview) -> int:
        return read_into(self._place(file), start, buffer)

    def local(self) -> Path | None:
        return self.path

    def _place(self, file: str) -> Path:
        check_inside(self.label, file)
        path = self.path / file
        if not self._is_inside(os.fspath(path)):
            raise CheckpointError(f"{self.label}: names the file {file!r}, which is not inside the checkpoint")
        return path

    def _is_inside(self, path: str) -> bool:
        return os.path.realpath(path).startswith(os.path.join(self._root, ""))


class LocalWritable:
    """The temporary directory of an attempt."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def label(self) -> str:
        return str(self.path)

    def file_name(self, stem: str, suffix: str) -> str:
        return f"{stem}{suffix}"

    @contextmanager
    def create(self, file: str) -> Iterator[_File]:
        path = self.path / file
        if path.parent != self.path and not path.parent.is_dir():
            os.mkdir(path.parent)
        with path.open("wb", buffering=0) as opened:
            yield _File(opened.fileno())
            os.fsync(opened.fileno())

    def read(self, file: str) -> bytes | None:
        try:
            return (self.path / file).read_bytes()
        except FileNotFoundError:
            return None

    def size(self, file: str) -> int | None:
        path = self.path / file
        return path.stat().st_size if path.is_file() else None

    def remove(self, file: str) -> None:
        (self.path / file).unlink(missing_ok=True)


class LocalStorage:
    """A directory of checkpoints."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._locks: dict[str, int] = {}  # attempt -> descriptor that holds its lock
        self._held: LockFile | None = None
        self._held_directory: os.stat_result | None = None

    @property
    def label(self) -> str:
        return str(self.path)

    def checkpoints(self) -> list[str]:
        return [path.name.removeprefix(REPLACED) for path in checkpoint_directories(self.path)]

    def folder(self, name: str) -> LocalFolder:
        path, aside = self.path / name, self.path / f"{REPLACED}{name}"
        return LocalFolder(aside if aside.is_dir() and not path.exists() else path)

    @contextmanager
    def hold(self) -> Iterator[str | None]:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._held = self._take_lock()
            self._held_directory = self.path.stat()
            if not os.access(self.path, os.W_OK | os.X_OK):
                self._held.release()
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.path))
        except OSError as error:
            place = error.filename or self.path
            raise CheckpointError(f"{place}: checkpoints cannot be kept here: {error.strerror or error}") from None
        try:
            yield None if self._held.is_sole else f"{self.path} has no locks: see that no other run saves there"
        finally:
            self._held.release()
            self._held = None

    def was_held(self) -> bool:
        """Whether a run has begun here before, if only to be killed before its first save."""
        return (self.path / LOCK).is_file()

    def begin(self, name: str) -> str:
        if self._held is None:
            self.path.mkdir(parents=True, exist_ok=True)
        else:
            self._check_held(self._held)
        self.sweep(name)
        reached("leftovers swept")
        attempt = f"{name}-{secrets.token_hex(4)}"
        directory = self._temporary(attempt)
        directory.mkdir()
        self._locks[attempt] = lock_directory(directory)
        return attempt

    def writing(self, attempt: str) -> LocalWritable:
        return LocalWritable(self._temporary(attempt))

    def commit(self, attempt: str) -> LocalFolder:
        name = _name_of(attempt)
        final, aside = self.path / name, self.path / f"{REPLACED}{name}"
        directory = self._temporary(attempt)
        for inner in sorted(path for path in directory.iterdir() if path.is_dir()):
            fsync_directory(inner)
        fsync_directory(directory)
        try:
            if final.exists():
                os.rename(final, aside)
                reached("older one of the step aside")
            os.rename(directory, final)
            reached("renamed")
            fsync_directory(self.path)
        except BaseException:
            if aside.exists() and not final.exists():
                os.rename(aside, final)
            raise
        self._unlock(attempt)
        if aside.exists():
            reached("before the older one of the step is removed")
            with suppress(OSError):  # the new one is visible; the next sweep tries again
                _remove_tree(aside)
        return LocalFolder(final)

    def abort(self, attempt: str) -> None:
        shutil.rmtree(self._temporary(attempt), ignore_errors=True)
        self._unlock(attempt)

    def point_latest(self, name: str) -> None:
        temporary = self.path / f"{TEMPORARY}{LATEST}-{secrets.token_hex(4)}"
        try:
            with LocalWritable(self.path).create(temporary.name) as file:
                file.write(f"{name}\n".encode())
            reached("before latest moves")
            os.replace(temporary, self.path / LATEST)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        fsync_directory(self.path)

    def remove(self, name: str) -> None:
        aside = self.path / f"{REMOVED}{name}"
        with suppress(OSError):
            _remove_tree(aside)
        os.rename(self.folder(name).path, aside)
        reached("old one hidden")
        _remove_tree(aside)

    def clear(self) -> None:
        for name in self.checkpoints():
            self.remove(name)
        (self.path / LATEST).unlink(missing_ok=True)
        self.sweep()

    def sweep(self, name: str | None = None) -> None:
        """Remove what killed writers left: temporaries (of steps, of `latest` and of `name`), half-removed checkpoints
        and replaced ones. One that was replaced and whose successor never arrived is put back under its name.

        What cannot be removed stays hidden and costs space; it must not keep anyone from saving.
        """
        replaced = [*self.path.glob(f"{REPLACED}step-*"), *([self.path / f"{REPLACED}{name}"] if name else [])]
        for path in filter(Path.is_dir, dict.fromkeys(replaced)):
            final = path.with_name(path.name.removeprefix(REPLACED))
            if final.exists():
                with suppress(OSError):
                    _remove_tree(path)
            else:
                os.rename(path, final)
        for path in self.path.glob(f"{REMOVED}step-*"):
            with suppress(OSError):
                _remove_tree(path)
        for path in self.path.glob(f"{TEMPORARY}*"):
            match = _ATTEMPT.fullmatch(path.name.removeprefix(TEMPORARY))
            ours = match and (match[1] in (name, LATEST) or match[1].startswith("step-"))
            if ours and not in_use(path):
                with suppress(OSError):
                    _remove_tree(path)

    def _take_lock(self) -> LockFile:
        try:
            return LockFile(self.path / LOCK)
        except InUse as holder:
            raise CheckpointError(
                f"{self.path}: is in use by another run, or by `checkpoint prune` ({holder}); wait for it, or choose "
                "another place"
            ) from None

    def _check_held(self, held: LockFile) -> None:
        """Raise OSError where the directory is not the one that was taken. One that was mounted again may look new to
        the system: its lock is then taken anew."""
        if held.is_in_place():
            return
        if not self.was_held() and not self._is_same_directory():
            raise OSError(
                f"{self.path} is gone, or is not the directory that this run began in ({LOCK} is not there): unmounted?"
            )
        self._held = self._take_lock()
        held.release()

    def _is_same_directory(self) -> bool:
        assert self._held_directory is not None
        try:
            return os.path.samestat(self.path.stat(), self._held_directory)
        except OSError:
            return False

    def _temporary(self, attempt: str) -> Path:
        return self.path / f"{TEMPORARY}{attempt}"

    def _unlock(self, attempt: str) -> None:
        descriptor = self._locks.pop(attempt, None)
        if descriptor is not None:
            os.close(descriptor)


def read_into(path: Path, start: int, buffer: memoryview) -> int:
    """Fill `buffer` (writable bytes) from byte `start` of a file; the number of bytes filled, fewer where it ends."""
    with path.open("rb", buffering=0) as opened:
        opened.seek(start)
        filled = 0
        while filled < len(buffer) and (count := opened.readinto(buffer[filled : filled + (1 << 30)])):
            filled += count
    return filled


def lock_directory(directory: Path) -> int:
    """The descriptor that holds its lock, by which `in_use` knows a living writer."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in NO_LOCKS:  # without locks, leftovers are never swept: space is lost, nothing else
            os.close(descriptor)
            raise
    return descriptor


def in_use(path: Path) -> bool:
    """Whether a living writer holds its lock; a file system without locks counts as in use, to be safe."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return True  # it was renamed into place at this moment
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _remove_tree(path: Path) -> None:
    """A directory, a file, or a link to a checkpoint that someone has moved: the link goes, what it leads to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _File:
    """An open file that writes all it is given."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._end = descriptor, 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        size = len(view)
        while len(view):
            view = view[os.write(self._descriptor, view) :]
        if size >= _LARGE and hasattr(os, "posix_fadvise"):
            # The disk begins at once instead of at the fsync: half as much time again for gigabytes. And what was
            # written does not push out what training reads.
            with suppress(OSError):
                os.posix_fadvise(self._descriptor, self._end, size, os.POSIX_FADV_DONTNEED)
        self._end += size
        return size


def _name_of(attempt: str) -> str:
    match = _ATTEMPT.fullmatch(attempt)
    assert match is not None
    return match[1]
