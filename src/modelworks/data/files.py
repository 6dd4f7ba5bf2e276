"""The files of a source: globs expanded, compressed files opened, contents hashed.

A content hash is remembered by (path, size, modification time), so that an unchanged corpus is recognised without
reading it; the time itself is no part of the identity, which therefore agrees between machines.
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import hashlib
import io
import json
import lzma
import os
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from modelworks.config import SourceConfig, UserError, nearest

_GLOB_CHARACTERS = set("*?[")


def source_files(source: SourceConfig) -> list[Path]:
    """The files of a source, sorted by path. Raises UserError where a path or a glob finds none."""
    if source.type == "python-stdlib":
        if source.path is not None:
            raise UserError(
                f"source `{source.name}`: python-stdlib reads the running interpreter's files, remove `path`"
            )
        return _standard_library()
    paths = [source.path] if isinstance(source.path, str) else source.path
    if not paths:
        raise UserError(f"source `{source.name}`: type {source.type} needs `path` (a file or a glob)")
    found = {file for pattern in paths for file in _expand(source.name, pattern)}
    return sorted(found)


def open_bytes(path: Path) -> IO[bytes]:
    """Open for reading, decompressing by extension (.gz, .zst, .xz)."""
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    if path.suffix == ".xz":
        return cast(IO[bytes], lzma.open(path, "rb"))
    if path.suffix == ".zst":
        import zstandard

        # buffered: zstandard's own reader has no lines
        return io.BufferedReader(cast(io.RawIOBase, zstandard.open(path, "rb")))
    return path.open("rb")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Failures of the file itself become the user's one line."""
    import zstandard

    try:
        yield
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zstandard.ZstdError) as error:
        raise UserError(f"{path}: damaged or not compressed as its name says ({error})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None


class ContentHashes:
    """Hashes of files' bytes, remembered in `path` between builds."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changed = False
        try:
            self._known: dict[str, list[int | str]] = json.loads(path.read_text())
        except (OSError, ValueError):  # absent, or torn by hand: hash again
            self._known = {}

    def of(self, file: Path) -> str:
        with reading(file):
            stat = file.stat()
            key = str(file.absolute())
            known = self._known.get(key)
            if known and known[:2] == [stat.st_size, stat.st_mtime_ns]:
                return str(known[2])
            with file.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
        self._known[key] = [stat.st_size, stat.st_mtime_ns, digest]
        self._changed = True
        return digest

    def save(self) -> None:
        """Replace the remembered table at once; of two builders the last wins, which costs only time."""
        if not self._changed:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=".hashes-")
        with os.fdopen(handle, "w") as file:
            json.dump(self._known, file)
        os.replace(name, self._path)


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for directory, children, names in os.walk(root):
        children[:] = sorted(set(children) - {"site-packages", "dist-packages", "__pycache__"})
        files += [Path(directory, name) for name in names if name.endswith(".py")]
    if not files:
        raise UserError(f"{root}: this Python has no standard library source files, use a `text` source")
    return sorted(files)


def _expand(source: str, pattern: str) -> list[Path]:
    text = os.path.expanduser(pattern)
    if not _GLOB_CHARACTERS & set(text) or Path(text).exists():
        path = Path(text)
        if path.is_dir():
            raise UserError(f"source `{source}`: {path} is a directory, write a glob such as `{path}/**/*.txt`")
        if not path.exists():
            raise UserError(f"source `{source}`: {path}: no such file{_near(path)}")
        return [path]
    found = [Path(name) for name in glob.glob(text, recursive=True) if Path(name).is_file()]
    if not found:
        raise UserError(f"source `{source}`: the glob `{pattern}` matches no file{_near(Path(text))}")
    return found


def _near(path: Path) -> str:
    """The nearest existing name, looked for in the deepest part of the path that exists."""
    parent, missing = path.parent, path.name
    while not parent.is_dir() and parent != parent.parent:
        parent, missing = parent.parent, parent.name
    near = nearest(missing, [entry.name for entry in parent.iterdir()]) if parent.is_dir() else None
    return f" (did you mean `{parent / near}`?)" if near else ""
