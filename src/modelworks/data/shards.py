"""Token shards: what a tokenised stream of documents looks like on disk.

    tokens-00000.bin …   ids, uint16 or uint32, little-endian, document after document
    starts.bin           int64, first token of each document in the stream, and the stream's length at the end
    text_bytes.bin       int64, UTF-8 bytes of each document's text

Everything is read through memory maps: a corpus larger than memory opens at once. Files carry their size, checked
when the set is opened, and a SHA-256, checked when asked.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelworks.config import UserError

SHARD_BYTES = 256 << 20


@dataclass(frozen=True)
class FileRecord:
    """file: relative to the data set's directory."""

    file: str
    size: int
    sha256: str


@dataclass(frozen=True)
class StreamRecord:
    """What the manifest says of one split of one source. tokens include each document's start and end."""

    documents: int
    tokens: int
    text_bytes: int
    shards: list[FileRecord]
    starts: FileRecord
    bytes: FileRecord
    text: FileRecord | None = None  # validation keeps the documents' own text, end to end

    @classmethod
    def read(cls, row: dict[str, Any]) -> StreamRecord:
        records = {key: FileRecord(**row[key]) for key in ("starts", "bytes")}
        text = FileRecord(**row["text"]) if row["text"] else None
        shards = [FileRecord(**shard) for shard in row["shards"]]
        return cls(row["documents"], row["tokens"], row["text_bytes"], shards, **records, text=text)

    def files(self) -> list[FileRecord]:
        return [*self.shards, self.starts, self.bytes, *([self.text] if self.text else [])]


class StreamWriter:
    """Writes one stream. Nothing is complete before `finish`, which fsyncs every file."""

    def __init__(
        self, root: Path, relative: str, dtype: np.dtype[Any], *, keep_text: bool, shard_bytes: int = SHARD_BYTES
    ) -> None:
        self._root, self._relative, self._dtype, self._shard_bytes = root, relative, dtype, shard_bytes
        (root / relative).mkdir(parents=True)
        self._starts = self._open("starts.bin")
        self._bytes = self._open("text_bytes.bin")
        self._text = self._open("text.bin") if keep_text else None
        self._shard: _HashedFile | None = None
        self._shards: list[FileRecord] = []
        self._documents = self._tokens = self._text_bytes = 0

    def write(self, tokens: NDArray[Any], text: str) -> None:
        """Append one document. A shard ends with a document, so that it may grow past its intended size."""
        data = text.encode("utf-8")
        if self._shard is None:
            self._shard = self._open(f"tokens-{len(self._shards):05d}.bin")
        self._shard.write(tokens.astype(self._dtype).tobytes())
        self._starts.write(np.int64(self._tokens).astype("<i8").tobytes())
        self._bytes.write(np.int64(len(data)).astype("<i8").tobytes())
        if self._text is not None:
            self._text.write(data)
        self._documents += 1
        self._tokens += len(tokens)
        self._text_bytes += len(data)
        if self._shard.size >= self._shard_bytes:
            self._shards.append(self._shard.finish())
            self._shard = None

    def finish(self) -> StreamRecord:
        if self._shard is not None:
            self._shards.append(self._shard.finish())
        self._starts.write(np.int64(self._tokens).astype("<i8").tobytes())
        return StreamRecord(
            self._documents,
            self._tokens,
            self._text_bytes,
            self._shards,
            self._starts.finish(),
            self._bytes.finish(),
            self._text.finish() if self._text is not None else None,
        )

    def close(self) -> None:
        """Let go of open files after a failure."""
        for file in (self._starts, self._bytes, self._text, self._shard):
            if file is not None:
                file.close()

    def _open(self, name: str) -> _HashedFile:
        return _HashedFile(self._root, f"{self._relative}/{name}")


class TokenStream:
    """Reads one stream: ids by place, and where its documents begin."""

    def __init__(self, root: Path, record: StreamRecord, dtype: np.dtype[Any]) -> None:
        self.record = record
        self._root, self._dtype = root, dtype
        # documents begin at starts[:-1]; starts[-1] is the length of the stream
        self.starts: NDArray[np.int64] = _map(root / record.starts.file, np.dtype("<i8"))
        self.text_bytes: NDArray[np.int64] = _map(root / record.bytes.file, np.dtype("<i8"))
        lengths = [shard.size // dtype.itemsize for shard in record.shards]
        self._shard_starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
        self._maps: dict[int, NDArray[Any]] = {}

    def __len__(self) -> int:
        return self.record.tokens

    @property
    def n_documents(self) -> int:
        return self.record.documents

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Ids [start, stop) of the stream, in its own dtype; a view where they lie in one shard."""
        first = int(np.searchsorted(self._shard_starts, start, side="right")) - 1
        parts = []
        while start < stop:
            begin, end = self._shard_starts[first], self._shard_starts[first + 1]
            parts.append(self._shard(first)[start - begin : min(stop, end) - begin])
            start, first = int(min(stop, end)), first + 1
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, self._dtype)

    def document(self, number: int) -> NDArray[Any]:
        """The ids of one document, with its start and end."""
        return self.read(int(self.starts[number]), int(self.starts[number + 1]))

    def text(self, number: int) -> str:
        """The text of one document; only where it is kept (validation)."""
        if self.record.text is None:
            raise ValueError("this split keeps no text: decode its tokens")
        if not hasattr(self, "_text_starts"):
            self._text_starts = np.concatenate([[0], np.cumsum(self.text_bytes)])
            self._text_map = _map(self._root / self.record.text.file, np.dtype(np.uint8))
        data = bytes(self._text_map[self._text_starts[number] : self._text_starts[number + 1]])
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            place = self._root / self.record.text.file
            raise UserError(f"{place}: corrupt, document {number} is not UTF-8: {_remedy(self._root)}") from None

    def _shard(self, number: int) -> NDArray[Any]:
        if number not in self._maps:
            self._maps[number] = _map(self._root / self.record.shards[number].file, self._dtype)
        return self._maps[number]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds every id, little-endian."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def check_size(root: Path, record: FileRecord) -> None:
    """Raises UserError where a file is missing or not of its recorded size."""
    path = root / record.file
    size = path.stat().st_size if path.exists() else None
    if size != record.size:
        found = "missing" if size is None else f"truncated or overgrown, {size} bytes"
        raise UserError(f"{path}: {found}, expected {record.size}: {_remedy(root)}")


def check_content(root: Path, record: FileRecord) -> None:
    """Raises UserError where a file's bytes are not those that were written."""
    check_size(root, record)
    with (root / record.file).open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != record.sha256:
            raise UserError(f"{root / record.file}: corrupt, its checksum differs from the manifest's: {_remedy(root)}")


def _remedy(root: Path) -> str:
    return f"delete {root} and build the data again"


def _map(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    mapped: NDArray[Any] = np.memmap(path, dtype=dtype, mode="r")
    return mapped


class _HashedFile:
    def __init__(self, root: Path, relative: str) -> None:
        self._relative = relative
        self._file = (root / relative).open("xb")
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data)

    def finish(self) -> FileRecord:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileRecord(self._relative, self.size, self._hash.hexdigest())

    def close(self) -> None:
        self._file.close()


def as_row(record: StreamRecord) -> dict[str, Any]:
    """For the manifest."""
    return asdict(record)
