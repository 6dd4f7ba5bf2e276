"""Where the checkpoints of a run lie: a local directory, or a URL of object storage through fsspec.

The idea: writers and readers see two small interfaces, a storage of checkpoints and the folder of one; what differs is
how a checkpoint becomes visible. On a disk it is written under a hidden name and renamed. Object storage has no rename:
there the manifest is written last, by one upload that is visible whole or not at all, and the names of all other files
carry the attempt's id, so that a second attempt at the same step never touches the files of a complete one.

The invariant: whoever is killed whenever, a checkpoint that a reader takes for complete is complete, and one that was
complete stays so until it is removed or replaced as a whole. One run at a time writes to a storage: on a disk it holds
a lock for as long as it runs (`hold`); object storage has none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from modelworks.checkpoint.errors import CheckpointError

_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+)://")


class Folder(Protocol):
    """The files of one checkpoint. Names are relative, with `/`; one that leads outside raises CheckpointError."""

    @property
    def label(self) -> str:
        """For messages: path or URL."""

    @property
    def name(self) -> str:
        """The checkpoint's own name, `step-XXXXXXXX` for one of a run."""

    def sizes(self) -> Mapping[str, int]:
        """Name and size in bytes of every file, subfolders included, from one listing; empty where there is none."""

    def size(self, file: str) -> int | None:
        """In bytes; None where there is no such file."""

    def list(self) -> list[str]:
        """Sorted names of all files."""

    def read(self, file: str, start: int, length: int) -> bytes:
        """At most `length` bytes from byte `start`; fewer where the file ends. Raises OSError."""

    def read_into(self, file: str, start: int, buffer: memoryview) -> int:
        """Fill `buffer` (writable bytes) from byte `start`; the number of bytes filled, fewer where the file ends."""

    def local(self) -> Path | None:
        """The directory, where it is one of this machine."""


class Output(Protocol):
    """An open file."""

    def write(self, data: Any) -> int:
        """Write all of `data` (bytes-like). Raises OSError."""


class WritableFolder(Protocol):
    """The files of a checkpoint that is being written; not visible to readers yet."""

    @property
    def label(self) -> str: ...

    def file_name(self, stem: str, suffix: str) -> str:
        """`stem` + `suffix`, with the attempt's id between them where files of several attempts share a folder."""

    def create(self, file: str) -> AbstractContextManager[Output]:
        """A new file. A clean exit makes it durable; after an exception it is gone or of no account. Raises OSError."""

    def read(self, file: str) -> bytes | None:
        """A small file that any rank wrote, whole; None where there is none."""

    def size(self, file: str) -> int | None:
        """In bytes, of a file that any rank wrote; None where there is none."""

    def remove(self, file: str) -> None:
        """Remove a file, if it is there."""


class Storage(Protocol):
    """A directory of checkpoints."""

    @property
    def label(self) -> str:
        """For messages: path or URL."""

    def checkpoints(self) -> list[str]:
        """Names `step-XXXXXXXX`, oldest first, complete or not."""

    def folder(self, name: str) -> Folder:
        """To read the checkpoint `name`."""

    def hold(self) -> AbstractContextManager[str | None]:
        """Keep it to this process, and make the directory where it is not there. Gives a remark where that has no
        effect, for people. From then on the directory is never made again: one that is gone is an error of each save.

        Raises CheckpointError naming the process that has it, or why nothing can be kept here.
        """

    def begin(self, name: str) -> str:
        """Make room for writing `name` and return the attempt's id. What dead writers left is swept away first; the
        attempt is locked, so that no one sweeps it, until `commit` or `abort`. One process calls these three."""

    def writing(self, attempt: str) -> WritableFolder:
        """The folder of an attempt, for any process that knows its id."""

    def commit(self, attempt: str) -> Folder:
        """Everything is there and durable, the manifest included: make it visible, in place of an older one."""

    def abort(self, attempt: str) -> None:
        """Remove what was written. Nothing that was complete is touched. Never raises OSError."""

    def point_latest(self, name: str) -> None:
        """Let the pointer `latest`, which is for people and other tools, name this checkpoint."""

    def remove(self, name: str) -> None:
        """Remove a checkpoint; killed in the middle, what is left does not look complete."""

    def clear(self) -> None:
        """Remove all checkpoints, the pointer, and nothing else."""


def open_storage(where: str | Path) -> Storage:
    """The storage at a path or URL (`file://`, `memory://`, `s3://` and whatever fsspec knows). Nothing is made yet.

    Raises CheckpointError for a scheme that is unknown or whose package is not installed.
    """
    from modelworks.checkpoint.local_storage import LocalStorage

    if not is_url(where):
        return LocalStorage(Path(where).expanduser())
    from modelworks.checkpoint.url_storage import open_url

    return open_url(str(where))


def open_folder(where: str | Path) -> Folder:
    """The folder of one checkpoint at a path or URL. Raises CheckpointError as `open_storage` does."""
    from modelworks.checkpoint.local_storage import LocalFolder

    if not is_url(where):
        return LocalFolder(Path(where))
    parent, _, name = str(where).rstrip("/").rpartition("/")
    return open_storage(parent).folder(name)


def is_url(where: str | Path) -> bool:
    return isinstance(where, str) and _URL.match(where) is not None


def check_inside(label: str, file: str) -> None:
    """Raise CheckpointError unless `file` is a plain relative name below its folder."""
    parts = file.split("/")
    # No disk can hold half a surrogate pair, which JSON can spell.
    odd = any(character < " " or "\ud800" <= character <= "\udfff" or character == "\\" for character in file)
    if odd or any(part in ("", ".", "..") for part in parts):
        raise CheckpointError(f"{label}: names the file {file!r}, which is not inside the checkpoint")
