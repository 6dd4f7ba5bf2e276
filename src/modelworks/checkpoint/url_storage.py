"""Checkpoints in object storage, by URL, through fsspec.

Nothing can be renamed there, so a checkpoint becomes complete by its manifest, which is uploaded last and is visible
whole or not at all. Files of two attempts at one step share a folder: their names carry the attempt's id, and the
manifest says which ones count. `manifest.checksum` has no such name; while a step is written again it holds the
digests of both manifests (see `manifest.write_manifest`).

There are no locks: a folder without a manifest is taken for what a dead writer left, so one run at a time may write to
a storage. The lock on the run's directory sees to that for runs of one directory, and for others the user does.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped, unused-ignore]

from modelworks.checkpoint.errors import CheckpointError
from modelworks.checkpoint.faults import reached
from modelworks.checkpoint.names import LATEST, MANIFEST, MANIFEST_CHECKSUM, is_step, step_number
from modelworks.checkpoint.storage import Folder, Storage, check_inside
from modelworks.config import nearest

# Where a folder is only the beginning of a name. Elsewhere (sftp, hdfs, …) folders are made before files.
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "memory"}
_ATTEMPT = re.compile(r"(.+)-([0-9a-f]{8})$")


def open_url(url: str) -> Storage:
    """The storage at a URL. Raises CheckpointError for a scheme that cannot be used here."""
    scheme = url.partition("://")[0]
    if scheme in ("file", "local"):
        from modelworks.checkpoint.local_storage import LocalStorage

        return LocalStorage(Path(url.partition("://")[2]))
    if scheme not in fsspec.available_protocols():
        near = nearest(scheme, fsspec.available_protocols())
        hint = f" (did you mean `{near}://`?)" if near else ""
        raise CheckpointError(f"{url}: no storage is known by the scheme `{scheme}`{hint}; use a path or e.g. s3://")
    try:
        system, path = fsspec.url_to_fs(url)
    except ImportError as error:
        raise CheckpointError(f"{url}: storage of this kind needs another package: {error}") from None
    except Exception as error:  # every file system has its own way to reject an address
        raise CheckpointError(f"{url}: this storage cannot be opened: {error}") from None
    return UrlStorage(system, path.rstrip("/"), url.rstrip("/"))


class UrlFolder:
    """The files of one checkpoint below a URL."""

    def __init__(self, system: Any, path: str, label: str) -> None:
        self._system, self._path, self._label = system, path, label

    @property
    def label(self) -> str:
        return self._label

    @property
    def name(self) -> str:
        return self._path.rpartition("/")[2]

    def sizes(self) -> Mapping[str, int]:
        with _as_os_error(self._label):
            return _sizes(self._system, self._path)

    def size(self, file: str) -> int | None:
        path = self._place(file)
        with _as_os_error(self._label):
            self._system.invalidate_cache(self._path)
            try:
                return int(self._system.info(path)["size"])
            except FileNotFoundError:
                return None

    def list(self) -> list[str]:
        return sorted(self.sizes())

    def read(self, file: str, start: int, length: int) -> bytes:
        path = self._place(file)
        if length <= 0:
            return b""
        with _as_os_error(self._label):
            return bytes(self._system.cat_file(path, start=start, end=start + length))

    def read_into(self, file: str, start: int, buffer: memoryview) -> int:
        data = self.read(file, start, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def local(self) -> Path | None:
        return None

    def _place(self, file: str) -> str:
        check_inside(self._label, file)
        return f"{self._path}/{file}"


class UrlWritable:
    """The same folder for one attempt, whose id all names carry but the manifest's."""

    def __init__(self, system: Any, path: str, label: str, attempt: str) -> None:
        self._system, self._path, self._label, self._attempt = system, path, label, attempt

    @property
    def label(self) -> str:
        return self._label

    def file_name(self, stem: str, suffix: str) -> str:
        return f"{stem}-{self._attempt}{suffix}"

    @contextmanager
    def create(self, file: str) -> Iterator[Any]:
        path = f"{self._path}/{file}"
        with _as_os_error(self._label):
            if not _is_object_store(self._system):
                self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
        if not file.endswith(".safetensors"):  # small, and the manifest must not be seen before it is whole
            collected = BytesIO()
            yield collected
            with _as_os_error(self._label):
                self._system.pipe_file(path, collected.getvalue())
            return
        with _as_os_error(self._label):
            opened = self._system.open(path, "wb")
        try:
            yield _Upload(opened, self._label)
            with _as_os_error(self._label):
                opened.close()
        except BaseException:
            # Closing it, as its finalizer would, makes half a file appear.
            with suppress(Exception):
                opened.discard()
            with suppress(AttributeError):  # a buffer in memory is no file of fsspec's
                opened.closed = True
            raise

    def read(self, file: str) -> bytes | None:
        with _as_os_error(self._label):
            return _read(self._system, f"{self._path}/{file}")

    def size(self, file: str) -> int | None:
        return UrlFolder(self._system, self._path, self._label).size(file)

    def remove(self, file: str) -> None:
        with _as_os_error(self._label):
            _remove(self._system, f"{self._path}/{file}")


class _Upload:
    """An open file whose failures are OSErrors; what else is raised while it is open passes unchanged."""

    def __init__(self, opened: Any, label: str) -> None:
        self._opened, self._label = opened, label

    def write(self, data: Any) -> int:
        with _as_os_error(self._label):
            return int(self._opened.write(data))


class UrlStorage:
    """Checkpoints below a URL."""

    def __init__(self, system: Any, path: str, label: str) -> None:
        self._system, self._path, self._label = system, path, label

    @property
    def label(self) -> str:
        return self._label

    def checkpoints(self) -> list[str]:
        with _as_os_error(self._label):
            self._system.invalidate_cache(self._path)
            try:
                found = self._system.ls(self._path, detail=False)
            except FileNotFoundError:
                return []
        names = {path.rstrip("/").rpartition("/")[2] for path in found}
        return sorted(filter(is_step, names), key=step_number)

    def folder(self, name: str) -> Folder:
        return UrlFolder(self._system, f"{self._path}/{name}", f"{self._label}/{name}")

    def hold(self) -> AbstractContextManager[str | None]:
        return nullcontext()

    def begin(self, name: str) -> str:
        with _as_os_error(self._label):
            for left in {*self.checkpoints(), name}:
                sizes = _sizes(self._system, f"{self._path}/{left}")
                if sizes and MANIFEST not in sizes:
                    self._remove_files(left, sizes)
        return f"{name}-{secrets.token_hex(4)}"

    def writing(self, attempt: str) -> UrlWritable:
        name, identity = _parts(attempt)
        return UrlWritable(self._system, f"{self._path}/{name}", f"{self._label}/{name}", identity)

    def commit(self, attempt: str) -> Folder:
        name, _ = _parts(attempt)
        with _as_os_error(self._label):
            manifest = _read(self._system, f"{self._path}/{name}/{MANIFEST}") or b""
            present = _sizes(self._system, f"{self._path}/{name}")
            kept = (MANIFEST, MANIFEST_CHECKSUM)
            self._remove_files(name, [f for f in present if f not in kept and f'"{f}"'.encode() not in manifest])
        return self.folder(name)

    def abort(self, attempt: str) -> None:
        name, identity = _parts(attempt)
        with suppress(OSError), _as_os_error(self._label):
            manifest = _read(self._system, f"{self._path}/{name}/{MANIFEST}")
            if manifest is not None and identity.encode() in manifest:
                return  # it was complete already
            present = _sizes(self._system, f"{self._path}/{name}")
            own = [file for file in present if f"-{identity}" in file]
            self._remove_files(name, own if manifest is not None else present)

    def point_latest(self, name: str) -> None:
        with _as_os_error(self._label):
            self._system.pipe_file(f"{self._path}/{LATEST}", f"{name}\n".encode())

    def remove(self, name: str) -> None:
        with _as_os_error(self._label):
            self._remove_files(name, _sizes(self._system, f"{self._path}/{name}"))

    def clear(self) -> None:
        for name in self.checkpoints():
            self.remove(name)
        with _as_os_error(self._label):
            _remove(self._system, f"{self._path}/{LATEST}")

    def _remove_files(self, name: str, files: Mapping[str, int] | list[str]) -> None:
        """The manifest first: without it the rest does not look complete."""
        for file in sorted(files, key=lambda file: file != MANIFEST):
            reached("before a file is removed")
            _remove(self._system, f"{self._path}/{name}/{file}")


def _sizes(system: Any, path: str) -> dict[str, int]:
    system.invalidate_cache(path)
    try:
        found = system.find(path, detail=True)
    except FileNotFoundError:
        return {}
    prefix = f"{path}/"
    return {place.removeprefix(prefix): int(info["size"]) for place, info in found.items() if place.startswith(prefix)}


def _read(system: Any, path: str) -> bytes | None:
    try:
        return bytes(system.cat_file(path))
    except FileNotFoundError:
        return None


def _remove(system: Any, path: str) -> None:
    with suppress(FileNotFoundError):
        system.rm_file(path)


def _is_object_store(system: Any) -> bool:
    protocol = system.protocol
    return bool(_OBJECT_STORES & {*((protocol,) if isinstance(protocol, str) else protocol)})


def _parts(attempt: str) -> tuple[str, str]:
    match = _ATTEMPT.fullmatch(attempt)
    assert match is not None
    return match[1], match[2]


@contextmanager
def _as_os_error(label: str) -> Iterator[None]:
    """What goes wrong with storage is an OSError to its users, whatever the package behind it raises."""
    try:
        yield
    except (OSError, CheckpointError):
        raise
    except Exception as error:  # the packages' own errors: credentials, connections, timeouts
        raise OSError(f"{label}: {type(error).__name__}: {error}") from error
