"""The header of a GGUF file: metadata as plain Python values, and where each tensor lies.

The idea: a header is a stream of counts, lengths and offsets, any of which may be garbage. Each is checked against
what is left of the file before it is believed, so that a damaged file costs neither memory nor time, only an error.

Layout (version 2 and 3, little-endian): magic, version, tensor count, metadata count; metadata (key, type, value);
tensors (name, dimensions with the fastest first, type, offset); padding to `general.alignment`; the data.
Specification: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from modelworks.checkpoint.errors import CheckpointError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class GgufTensor:
    """shape: slowest dimension first, as torch has it. kind: how it is stored. begin: bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    begin: int
    size: int


@dataclass(frozen=True)
class GgufHeader:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def read_bytes(self, name: str) -> bytes:
        """The tensor's bytes as they are stored."""
        tensor = self.tensors[name]
        with self.path.open("rb") as file:
            file.seek(tensor.begin)
            data = file.read(tensor.size)
        if len(data) != tensor.size:
            raise CheckpointError(f"{self.path}: ends inside tensor `{name}`; the file is truncated")
        return data


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and check a header. Raises CheckpointError for anything but a whole GGUF file of version 2 or 3."""
    size = path.stat().st_size
    with path.open("rb") as file:
        magic = file.read(4)
        if magic != MAGIC:
            raise CheckpointError(f"{path}: not a GGUF file (it begins with {magic!r}, expected {MAGIC!r})")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(path, data, size).header()


class _Cursor:
    """Walks the header; every step is checked against the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size = path, data, size
        self.position = len(MAGIC)

    def header(self) -> GgufHeader:
        version = self._number("I")
        if version not in _VERSIONS:
            hint = " (a big-endian file?)" if version & 0xFFFF == 0 else ""
            raise self._error(f"GGUF version {version}{hint} is not supported, expected 2 or 3")
        n_tensors, n_metadata = self._number("Q"), self._number("Q")
        self._expect(n_tensors, 24, "tensors")
        self._expect(n_metadata, 13, "metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(n_metadata):
            key = self._string("a metadata key")
            if key in metadata:
                raise self._error(f"metadata key `{key}` appears twice")
            metadata[key] = self._value(self._number("I"), key)
        raw = [self._tensor() for _ in range(n_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._error(f"general.alignment is {alignment!r}, expected a power of two")
        start = -(-self.position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in raw:
            if name in tensors:
                raise self._error(f"tensor `{name}` appears twice")
            tensors[name] = self._placed(name, shape, kind, start + offset)
        return GgufHeader(self.path, metadata, tensors)

    def _placed(self, name: str, shape: tuple[int, ...], kind: int, begin: int) -> GgufTensor:
        try:
            known = GGMLQuantizationType(kind)
        except ValueError:
            raise CheckpointError(f"{self.path}: tensor `{name}` has the unknown type {kind}") from None
        block, block_bytes = GGML_QUANT_SIZES[known]
        if shape[-1] % block:
            raise self._error(f"tensor `{name}`: rows of {shape[-1]} are not whole blocks of {block} ({known.name})")
        size = math.prod(shape) // block * block_bytes
        if begin + size > self.size:
            raise CheckpointError(
                f"{self.path}: tensor `{name}` ends at byte {begin + size:,}, the file has {self.size:,}; "
                "it is truncated or corrupted, fetch it again"
            )
        return GgufTensor(name, shape, known, begin, size)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("a tensor's name")
        n_dimensions = self._number("I")
        if not 1 <= n_dimensions <= _MAX_DIMENSIONS:
            raise self._error(f"tensor `{name}` has {n_dimensions} dimensions, expected 1 to {_MAX_DIMENSIONS}")
        dimensions = [self._number("Q") for _ in range(n_dimensions)]
        return name, tuple(reversed(dimensions)), self._number("I"), self._number("Q")

    def _value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string(f"`{key}`")
        if kind != _ARRAY or depth > 3:
            raise self._error(f"metadata `{key}` has the unknown type {kind}")
        item, count = self._number("I"), self._number("Q")
        code = _SCALARS.get(item)
        self._expect(count, struct.calcsize(f"<{code}") if code else 8, f"items of `{key}`")
        if code:
            return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(f"<{code}"), key)))
        return [self._value(item, key, depth + 1) for _ in range(count)]

    def _string(self, what: str) -> str:
        length = self._number("Q")
        self._expect(length, 1, f"bytes of {what}")
        try:
            return self._take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            raise self._error(f"{what} is not UTF-8") from None

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}"), "a number"))[0]

    def _take(self, count: int, what: str) -> bytes:
        self._expect(count, 1, f"bytes of {what}")
        self.position += count
        return self.data[self.position - count : self.position]

    def _expect(self, count: int, each: int, what: str) -> None:
        left = self.size - self.position
        if count * each > left:
            raise self._error(f"claims {count:,} {what}, but {left:,} bytes are left")

    def _error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: byte {self.position:,}: {text}; the file is truncated or corrupted")
