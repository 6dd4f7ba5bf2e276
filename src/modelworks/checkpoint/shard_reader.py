"""Reading pieces of tensors from a checkpoint's files, every byte checked before it is handed out.

The idea: a piece is checked block by block (`checksums`), so what is read are the blocks that hold an element of the
box that is asked for, and no others. A whole piece goes straight to where it belongs; parts of one pass through a
buffer of bounded size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelworks.checkpoint.block_checks import PENDING, BlockChecks
from modelworks.checkpoint.errors import ADVICE, CheckpointError, CorruptedCheckpoint
from modelworks.checkpoint.formats.safetensors_files import (
    DTYPES,
    TensorInfo,
    byte_view,
    parse_prefix,
    read_prefix,
)
from modelworks.checkpoint.grid import Box, Cell, box_shape, overlap, within
from modelworks.checkpoint.manifest import Manifest
from modelworks.checkpoint.storage import Folder
from modelworks.checkpoint.tensor_entries import TensorEntry

BUFFER_BYTES = 1 << 28  # of a piece that is read in parts, at once


@dataclass(frozen=True)
class _Place:
    """Where a piece lies. start: byte in the file. size: bytes."""

    file: str
    start: int
    size: int
    digests: str
    tensor: str


class ShardReader:
    """The shard files of one checkpoint; their headers are read when first needed, and kept."""

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self._folder, self._manifest, self._scheme = folder, manifest, manifest.scheme
        self._headers: dict[int, tuple[int, dict[str, TensorInfo]]] = {}

    def read(self, tensor: TensorEntry, cell: Cell, box: Box, out: Tensor, checks: BlockChecks) -> None:
        """Fill `out` (on the CPU, of the box's shape) with the elements that `box` and the cell share.

        They may be used once `checks` has ended.
        """
        place = self._place(tensor, cell)
        shared = overlap(cell.box, box)
        target = out[within(shared, box)]
        if shared == cell.box and target.is_contiguous():
            self._read_blocks(place, 0, memoryview(byte_view(target)), checks)
            return
        for part in _parts(cell.box, shared, out.element_size(), max(BUFFER_BYTES, self._scheme.block_bytes)):
            target = out[within(part, box)]
            target.copy_(self._read_part(place, cell.box, part, out.dtype, checks))

    def check(self, tensor: TensorEntry, cell: Cell) -> int:
        """Read a piece only to check it; returns its bytes."""
        place = self._place(tensor, cell)
        step = min(self._scheme.block_bytes, place.size)
        starts = range(0, place.size, step) if step else ()
        buffers = [memoryview(bytearray(step)) for _ in range(min(len(starts), PENDING + 1))]
        with BlockChecks(self._scheme) as checks:
            for number, start in enumerate(starts):
                buffer = buffers[number % len(buffers)]
                self._read_blocks(place, start, buffer[: min(step, place.size - start)], checks)
        return place.size

    def _read_part(self, place: _Place, cell: Box, part: Box, dtype: torch.dtype, checks: BlockChecks) -> Tensor:
        """A box inside a piece, as a view of a buffer that holds the blocks from its first to its last element."""
        shape, first = box_shape(part), [a - c for (a, _), (c, _) in zip(part, cell, strict=True)]
        strides = _strides(box_shape(cell))
        low = sum(place * stride for place, stride in zip(first, strides, strict=True)) * dtype.itemsize
        high = low + (sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1) * dtype.itemsize
        step = self._scheme.block_bytes
        first_block, end_block = low // step, -(-high // step)
        begin, end = first_block * step, min(end_block * step, place.size)
        buffer = torch.empty(end - begin, dtype=torch.uint8)
        needed = _blocks_with_elements(shape, strides, dtype.itemsize, low - begin, step, end_block - first_block)
        view = memoryview(byte_view(buffer))
        for start, stop in _runs(needed):
            self._read_blocks(place, begin + start * step, view[start * step : stop * step], checks)
        return buffer.view(dtype).as_strided(shape, strides, (low - begin) // dtype.itemsize)

    def _read_blocks(self, place: _Place, start: int, buffer: memoryview, checks: BlockChecks) -> None:
        """Whole blocks of a piece, from byte `start` of it."""
        step = self._scheme.block_bytes
        where = f"{self._folder.label}/{place.file}"
        for offset in range(0, len(buffer), step):
            block = buffer[offset : offset + step]
            filled = self._folder.read_into(place.file, place.start + start + offset, block)
            if filled != len(block):
                raise CorruptedCheckpoint(f"{where}: truncated: ends inside tensor `{place.tensor}`; {ADVICE}")
            index = (start + offset) // step
            checks.add(block, self._scheme.of_block(place.digests, index), where, place.tensor, index)

    def _place(self, tensor: TensorEntry, cell: Cell) -> _Place:
        number = int(tensor.files[cell.index])
        file = self._manifest.files[number].name
        if number not in self._headers:
            self._headers[number] = self._read_header(number)
        data_start, tensors = self._headers[number]
        info = tensors.get(tensor.key)
        if info is None or info.dtype != DTYPES[tensor.dtype] or info.shape != box_shape(cell.box):
            raise CorruptedCheckpoint(
                f"{self._folder.label}/{file}: its header does not hold tensor `{tensor.full_name}` as the manifest "
                f"describes it; {ADVICE}"
            )
        digests = tensor.checksums[cell.index]
        return _Place(file, data_start + info.begin, info.end - info.begin, digests, tensor.full_name)

    def _read_header(self, number: int) -> tuple[int, dict[str, TensorInfo]]:
        entry = self._manifest.files[number]
        where = f"{self._folder.label}/{entry.name}"
        size = self._folder.size(entry.name)
        if size != entry.bytes:
            found = "missing" if size is None else f"{size:,} bytes, expected {entry.bytes:,}"
            raise CorruptedCheckpoint(f"{where}: {found}; {ADVICE}")
        position = 0

        def read(length: int) -> bytes:
            nonlocal position
            position += length
            return self._folder.read(entry.name, position - length, length)

        try:
            prefix = read_prefix(where, entry.bytes, read)
            if entry.header is not None and self._scheme.digest(prefix) != entry.header:
                raise CheckpointError(f"{where}: its header is not the one that was written (its checksum differs)")
            return len(prefix), parse_prefix(where, entry.bytes, prefix)[0]
        except CorruptedCheckpoint:
            raise
        except CheckpointError as error:
            raise CorruptedCheckpoint(f"{error}; {ADVICE}") from None


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """In elements, of a row-major tensor."""
    return tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))


def _parts(cell: Box, box: Box, itemsize: int, limit: int) -> Iterator[Box]:
    """`box` in parts of which each spans at most about `limit` bytes of the piece `cell`, as long as rows allow."""
    for dimension, stride in enumerate(_strides(box_shape(cell))):
        start, stop = box[dimension]
        if stop - start > 1:
            step = max(limit // (stride * itemsize), 1)
            for begin in range(start, stop, step):
                yield (*box[:dimension], (begin, min(begin + step, stop)), *box[dimension + 1 :])
            return
    yield box


def _blocks_with_elements(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, low: int, step: int, count: int
) -> NDArray[np.bool_]:
    """Which of `count` blocks of `step` bytes hold an element of a strided box whose first byte is at `low`."""
    run, outer = itemsize, len(shape)  # bytes that lie one after the other, and dimensions outside of them
    while outer and strides[outer - 1] * itemsize == run:
        outer -= 1
        run *= shape[outer]
    starts = np.full(1, low, np.int64)
    for size, stride in zip(shape[:outer], strides[:outer], strict=True):
        starts = np.add.outer(starts, np.arange(size, dtype=np.int64) * stride * itemsize).reshape(-1)
    change = np.zeros(count + 1, np.int64)
    np.add.at(change, starts // step, 1)
    np.add.at(change, (starts + run - 1) // step + 1, -1)
    needed: NDArray[np.bool_] = np.cumsum(change[:-1]) > 0
    return needed


def _runs(needed: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """(start, stop) of every run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], needed, [False]]).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
