"""Manifests of format version 1, which one process wrote: read, never written.

There a piece was a box with offset and extent, checked by one CRC-32 however large it was, and the whole manifest by
`manifest.crc32`. What was written had one piece for each tensor, so it is a grid, and the rest of the room need not
know that it was another version.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import Field

from modelworks.checkpoint.checksums import CRC32
from modelworks.checkpoint.errors import ADVICE, CorruptedCheckpoint
from modelworks.checkpoint.formats.safetensors_files import DTYPES
from modelworks.checkpoint.grid import Box, grid_of
from modelworks.checkpoint.manifest import MANIFEST, FileEntry, Head, Manifest, Stored, validated
from modelworks.checkpoint.names import MANIFEST_CRC
from modelworks.checkpoint.storage import Folder
from modelworks.checkpoint.tensor_entries import TensorEntry


class _File(Stored):
    bytes: int = Field(ge=0, lt=2**63)
    crc32: str = Field(pattern="^[0-9a-f]{8}$")


class _Piece(Stored):
    """The box [offset, offset + extent) of a logical tensor, stored under `key` of a safetensors `file`."""

    file: str
    key: str
    offset: list[int]
    extent: list[int]
    bytes: int = Field(ge=0)
    crc32: str = Field(pattern="^[0-9a-f]{8}$")


class _Tensor(Stored):
    section: str
    name: str
    dtype: str
    shape: list[int]
    pieces: list[_Piece] = Field(min_length=1)


class _Version1(Head):
    tensors: list[_Tensor]
    files: dict[str, _File]


def read_version_1(folder: Folder, raw: Mapping[str, Any], text: bytes) -> Manifest:
    """`raw`: the manifest, `text`: its bytes. Raises `CorruptedCheckpoint`; the files are not looked at."""
    path = f"{folder.label}/{MANIFEST}"
    size = folder.size(MANIFEST_CRC)
    if size is None:
        raise CorruptedCheckpoint(f"{folder.label}/{MANIFEST_CRC}: missing; the checkpoint is incomplete; {ADVICE}")
    expected = folder.read(MANIFEST_CRC, 0, 64).decode("ascii", "replace").strip()
    if expected != f"{zlib.crc32(text):08x}":
        raise CorruptedCheckpoint(f"{path}: was changed after it was written (its checksum differs); {ADVICE}")
    stored = validated(_Version1, raw, path)
    numbers = {name: index for index, name in enumerate(stored.files)}
    tensors: dict[tuple[str, str], TensorEntry] = {}
    for tensor in stored.tensors:
        try:
            if (tensor.section, tensor.name) in tensors:
                raise ValueError("appears twice")
            tensors[tensor.section, tensor.name] = _entry(tensor, stored.files, numbers)
        except ValueError as error:
            raise CorruptedCheckpoint(
                f"{path}: tensor `{tensor.section}/{tensor.name}`: {error}; the manifest is corrupted"
            ) from None
    files = [
        FileEntry(name=name, bytes=file.bytes, checksum=None if name.endswith(".safetensors") else file.crc32)
        for name, file in stored.files.items()
    ]
    return Manifest(stored, CRC32, files, list(tensors.values()))


def _entry(tensor: _Tensor, files: Mapping[str, _File], numbers: Mapping[str, int]) -> TensorEntry:
    if tensor.dtype not in DTYPES:
        raise ValueError(f"unknown dtype {tensor.dtype!r}")
    if any(size < 0 for size in tensor.shape) or math.prod(tensor.shape) * 8 >= 2**63:
        raise ValueError(f"impossible shape {tensor.shape}")
    keys = {piece.key for piece in tensor.pieces}
    if len(keys) > 1:
        raise ValueError("its pieces have several keys")
    for piece in tensor.pieces:
        if piece.file not in files:
            raise ValueError(f"lies in {piece.file!r}, which is not among the checkpoint's files")
        if not len(piece.offset) == len(piece.extent) == len(tensor.shape) or min(piece.extent, default=0) < 0:
            raise ValueError(f"piece at {piece.offset} of {piece.extent} is outside the shape {tensor.shape}")
        size = math.prod(piece.extent) * DTYPES[tensor.dtype].itemsize
        if piece.bytes != size or size > files[piece.file].bytes:
            raise ValueError(f"a piece of {piece.extent} cannot have {piece.bytes:,} bytes")
    boxes: list[Box] = [
        tuple((start, start + extent) for start, extent in zip(piece.offset, piece.extent, strict=True))
        for piece in tensor.pieces
    ]
    cuts, order = grid_of(tensor.shape, boxes)
    pieces = [tensor.pieces[index] for index in order]
    return TensorEntry(
        tensor.section,
        tensor.name,
        tensor.dtype,
        tuple(tensor.shape),
        cuts,
        np.array([numbers[piece.file] for piece in pieces], np.int64),
        [piece.crc32 for piece in pieces],
        keys.pop(),
    )
