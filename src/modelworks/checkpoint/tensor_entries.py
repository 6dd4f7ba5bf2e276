"""The logical tensors that a manifest lists, checked: what each says of its pieces must fit the files that are there.

There may be half a million pieces, so those of a tensor are checked together, as arrays. After that, what a reader
allocates for it is bounded by the sizes of the files that it lies in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelworks.checkpoint.checksums import Scheme
from modelworks.checkpoint.errors import CorruptedCheckpoint
from modelworks.checkpoint.formats.safetensors_files import DTYPES
from modelworks.checkpoint.grid import Cuts, cell_volumes, cuts_problem, n_cells

_HEX = b"0123456789abcdef"
_MAX_DIMENSIONS = 64


@dataclass(frozen=True)
class TensorEntry:
    """One logical tensor. dtype: the safetensors name. shape: global. files, checksums: of each cell, row-major.

    key: its name inside the files; tied tensors share it, and all of their pieces.
    """

    section: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    cuts: Cuts
    files: NDArray[np.int64]
    checksums: Sequence[str]
    key: str

    @property
    def full_name(self) -> str:
        """For messages."""
        return f"{self.section}/{self.name}"

    def piece_bytes(self) -> NDArray[np.int64]:
        """Of every cell."""
        return cell_volumes(self.cuts) * DTYPES[self.dtype].itemsize


def read_entries(tensors: Sequence[Any], sizes: Sequence[int], scheme: Scheme, path: str) -> list[TensorEntry]:
    """Check what a manifest lists under `tensors`. sizes: bytes of its files. path: of the manifest, for messages.

    Raises `CorruptedCheckpoint` naming the tensor.
    """
    file_bytes = np.array(sizes, np.int64)
    used = np.zeros(len(file_bytes), np.int64)
    entries: dict[tuple[str, str], TensorEntry] = {}
    by_key: dict[str, TensorEntry] = {}
    for number, raw in enumerate(tensors):
        entry = _tensor(raw, number, file_bytes, scheme, path)
        problem = None
        first = by_key.setdefault(entry.key, entry)
        if (entry.section, entry.name) in entries:
            problem = "appears twice"
        elif first is entry:
            used[entry.files] += entry.piece_bytes()
            if (used[entry.files] > file_bytes[entry.files]).any():
                problem = "its files are too short for all that they shall hold"
        elif not _same_pieces(first, entry):
            problem = f"shares the key {entry.key!r} with {first.full_name}, but not its pieces"
        if problem:
            raise CorruptedCheckpoint(f"{path}: tensor `{entry.full_name}`: {problem}; the manifest is corrupted")
        entries[entry.section, entry.name] = entry
    return list(entries.values())


def _tensor(raw: Any, number: int, file_bytes: NDArray[np.int64], scheme: Scheme, path: str) -> TensorEntry:
    fields: dict[str, Any] = raw if isinstance(raw, dict) else {}
    section, name, dtype = fields.get("section"), fields.get("name"), fields.get("dtype")
    if not isinstance(section, str) or not isinstance(name, str):
        raise CorruptedCheckpoint(f"{path}: tensors.{number}: has no section and name; the manifest is corrupted")
    shape: Any = fields.get("shape")
    cuts: Any = fields.get("cuts")
    checksums: Any = fields.get("checksums")
    key = fields.get("key", f"{section}/{name}")
    problem = _shape_problem(dtype, shape, cuts)
    if problem is None:
        assert isinstance(dtype, str)
        entry = TensorEntry(
            section,
            name,
            dtype,
            tuple(shape),
            tuple(map(tuple, cuts)),
            _whole_numbers(fields.get("files")),
            checksums,
            key,
        )
        problem = _pieces_problem(entry, file_bytes, scheme)
    if problem:
        raise CorruptedCheckpoint(f"{path}: tensor `{section}/{name}`: {problem}; the manifest is corrupted")
    return entry


def _shape_problem(dtype: Any, shape: Any, cuts: Any) -> str | None:
    if not isinstance(dtype, str) or dtype not in DTYPES:
        return f"unknown dtype {dtype!r}"
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS:
        return "its shape is no list of sizes"
    if not all(type(size) is int and size >= 0 for size in shape) or math.prod(shape) * 8 >= 2**63:
        return f"impossible shape {shape}"
    return cuts_problem(cuts, shape)


def _pieces_problem(entry: TensorEntry, file_bytes: NDArray[np.int64], scheme: Scheme) -> str | None:
    count, files = n_cells(entry.cuts), entry.files
    key: Any = entry.key
    checksums: Any = entry.checksums
    if not isinstance(key, str):
        return "its key is no text"
    if len(files) != count or not isinstance(checksums, list) or len(checksums) != count:
        return f"its cuts make {count:,} pieces, but it does not list a file and a checksum for each"
    if count == 0:
        return None
    if files.min() < 0 or files.max() >= len(file_bytes):
        return "lies in a file that is not among the checkpoint's files"
    if len(np.unique(files)) != count:
        return "two of its pieces lie in one file"
    sizes = entry.piece_bytes()
    if (sizes > file_bytes[files]).any():
        return "a piece is larger than the file that it lies in"
    if set(map(type, checksums)) != {str}:
        return "its checksums are no text"
    lengths = np.fromiter(map(len, checksums), np.int64, count)
    together = "".join(checksums)
    expected = -(-sizes // scheme.block_bytes) * scheme.digits
    if (lengths != expected).any() or not together.isascii() or together.encode().translate(None, _HEX):
        return f"its checksums are not {scheme.digits} hexadecimal digits for each block"
    return None


def _whole_numbers(value: Any) -> NDArray[np.int64]:
    """A JSON list of whole numbers; no numbers at all where it is something else."""
    nothing = np.zeros(0, np.int64)
    if not isinstance(value, list) or not value or set(map(type, value)) != {int}:
        return nothing
    try:
        return np.array(value, np.int64)
    except OverflowError:
        return nothing


def _same_pieces(one: TensorEntry, other: TensorEntry) -> bool:
    same = (one.dtype, one.shape, one.cuts) == (other.dtype, other.shape, other.cuts)
    return same and np.array_equal(one.files, other.files) and list(one.checksums) == list(other.checksums)
