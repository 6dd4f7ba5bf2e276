"""Reading what torch.save wrote, its tensors left on disk.

Such a file is a zip archive of one pickle, `data.pkl`, and one uncompressed member for each storage, so that a tensor
is read, whole or in part, without reading its file. The pickle is read by `restricted_pickle`, which runs nothing.
"""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

from modelworks.checkpoint.errors import CheckpointError
from modelworks.checkpoint.formats.restricted_pickle import MAX_PICKLE_BYTES, unpickle


def read_torch_file(path: Path, begin: int = 0, length: int | None = None) -> Any:
    """The value that `torch.save` wrote, its tensors as `StoredTensor`; of the whole file, or of a part of it."""
    size = path.stat().st_size
    length = size - begin if length is None else length
    if begin < 0 or length < 0 or begin + length > size:
        raise CheckpointError(f"{path}: has {size:,} bytes, expected {begin + length:,}; the file is truncated")
    with path.open("rb") as file:
        try:
            archive = zipfile.ZipFile(_Window(file, begin, length))
            names = {name.partition("/")[2]: name for name in archive.namelist()}
            if archive.getinfo(names["data.pkl"]).file_size > MAX_PICKLE_BYTES:
                raise CheckpointError(f"{path}: its pickle is larger than a file of this kind may have")
            if "byteorder" in names and archive.read(names["byteorder"]) != b"little":
                raise CheckpointError(f"{path}: was written on a machine of another byte order")
            text = archive.read(names["data.pkl"])
            storages = {
                name.removeprefix("data/"): _member(archive.getinfo(full), file, path, begin)
                for name, full in names.items()
                if name.startswith("data/")
            }
        except (zipfile.BadZipFile, KeyError, NotImplementedError, EOFError) as error:
            raise CheckpointError(f"{path}: not a file that torch.save (1.6 or later) wrote, or damaged") from error
    return unpickle(text, path, storages)


def _member(info: zipfile.ZipInfo, file: BinaryIO, path: Path, begin: int) -> tuple[int, int]:
    """First byte of a member's data in the file, and the byte after its last."""
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise CheckpointError(f"{path}: holds compressed tensors, which torch.save does not write")
    file.seek(begin + info.header_offset)
    header = file.read(30)  # the local header: its lengths of name and extra field are at 26 and 28
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    start = begin + info.header_offset + 30 + lengths
    return start, start + info.file_size


class _Window(io.RawIOBase):
    """Bytes [begin, begin + length) of a file, as a file."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        self._file, self._begin, self._length, self._position = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("a position before the start")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._position))
        self._file.seek(self._begin + self._position)
        data = self._file.read(count)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)
