"""Reading checkpoints of torch.distributed.checkpoint (DCP): `.metadata`, a pickle, and the `.distcp` files it names.

The idea: the metadata lists each tensor's global shape and its chunks, and for each chunk a range of bytes of a file,
which is a file of torch.save by itself. A tensor, or a box of it, is put together from the chunks that it meets.

The invariant: chunks lie inside their tensor and cover it exactly once, and files lie beside the metadata.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelworks.checkpoint.errors import CheckpointError
from modelworks.checkpoint.formats.restricted_pickle import Inert, read_pickle
from modelworks.checkpoint.formats.stored_tensor import StoredTensor
from modelworks.checkpoint.formats.torch_files import read_torch_file

METADATA = ".metadata"
_MODULE = "torch.distributed.checkpoint.metadata"

Bounds = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Chunk:
    """The box [offset, offset + extent) of a tensor, stored in `length` bytes of a file from `begin`."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]
    file: Path
    begin: int
    length: int


@dataclass(frozen=True)
class DistributedTensor:
    """One tensor of a checkpoint, on disk."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[Chunk] = field(repr=False)

    def read(self, bounds: Bounds) -> Tensor:
        """The part within bounds (start, stop) along each dimension."""
        out = torch.empty([stop - start for start, stop in bounds], dtype=self.dtype)
        for chunk in self.chunks:
            ends = [offset + extent for offset, extent in zip(chunk.offset, chunk.extent, strict=True)]
            box = [
                (max(start, low), min(stop, high))
                for (start, stop), low, high in zip(bounds, chunk.offset, ends, strict=True)
            ]
            if all(start < stop for start, stop in box):
                value = self._value(chunk)
                there = tuple(slice(a - low, b - low) for (a, b), low in zip(box, chunk.offset, strict=True))
                here = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(box, bounds, strict=True))
                out[here] = value[there]
        return out

    def _value(self, chunk: Chunk) -> Tensor:
        stored = read_torch_file(chunk.file, chunk.begin, chunk.length)
        if not isinstance(stored, StoredTensor) or stored.dtype != self.dtype or stored.shape != chunk.extent:
            raise CheckpointError(f"{chunk.file}: does not hold `{self.name}` as {METADATA} describes it")
        return stored.read()


def open_distributed(directory: Path) -> dict[str, DistributedTensor]:
    """Every tensor of the checkpoint by name. What it holds besides (objects as bytes) is left out. Raises
    CheckpointError for what is damaged or was written with an extension."""
    where = directory / METADATA
    if not where.is_file():
        raise CheckpointError(f"{directory}: has no {METADATA}, so it is no checkpoint of torch.distributed")
    metadata = read_pickle(where)
    try:
        _require(metadata, "Metadata")
        places = _places(directory, metadata.fields()["storage_data"])
        return {
            name: _tensor(where, name, entry, places)
            for name, entry in metadata.fields()["state_dict_metadata"].items()
            if entry.kind == f"{_MODULE}.TensorStorageMetadata"
        }
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{where}: not the metadata that torch writes ({error!r})") from None


def _places(directory: Path, storage_data: dict[Inert, Inert]) -> dict[tuple[str, tuple[int, ...]], Any]:
    """(tensor, offset of a chunk) -> (file, first byte, bytes)."""
    places = {}
    for index, info in storage_data.items():
        key, place = index.fields(), info.fields()
        if place.get("transform_descriptors"):
            raise CheckpointError(f"{directory}: was written through an extension of torch's, which is not read")
        file, begin, length = place["relative_path"], place["offset"], place["length"]
        if Path(file).name != file or file in ("", ".", "..") or "\0" in file or "\\" in file:
            raise CheckpointError(f"{directory / METADATA}: names the file {file!r}, which is not inside the directory")
        if type(begin) is not int or type(length) is not int:
            raise CheckpointError(f"{directory / METADATA}: no place of {key['fqn']!r} in {file}")
        places[key["fqn"], tuple(key.get("offset") or ())] = (directory / file, begin, length)
    return places


def _tensor(where: Path, name: str, entry: Inert, places: dict[tuple[str, tuple[int, ...]], Any]) -> DistributedTensor:
    values = entry.fields()
    shape = tuple(values["size"])
    properties = values["properties"].state
    dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{where}: tensor `{name}` has the unknown dtype {dtype!r}")
    chunks = []
    for item in values["chunks"]:
        box = item.fields()
        offset, extent = tuple(box["offsets"]), tuple(box["sizes"])
        inside = len(offset) == len(extent) == len(shape) and all(
            min(low, size) >= 0 and low + size <= whole for low, size, whole in zip(offset, extent, shape, strict=True)
        )
        if not inside:
            raise CheckpointError(f"{where}: tensor `{name}` of shape {shape} has a chunk {extent} at {offset}")
        if math.prod(extent):
            if (name, offset) not in places:
                raise CheckpointError(f"{where}: the chunk of `{name}` at {offset} lies in no file")
            chunks.append(Chunk(offset, extent, *places[name, offset]))
    # Equal offsets would be the same chunk; those that differ overlap only if the volumes add up to too much.
    if sum(math.prod(chunk.extent) for chunk in chunks) != math.prod(shape) or _any_overlap(chunks):
        raise CheckpointError(f"{where}: the chunks of `{name}` do not cover it exactly once")
    return DistributedTensor(name, dtype, shape, chunks)


def _any_overlap(chunks: list[Chunk]) -> bool:
    """Whether two boxes share an element. Sorted by where they start, only neighbours along that axis are compared."""
    ordered = sorted(chunks, key=lambda chunk: chunk.offset) if len(chunks) > 1 else []
    active: list[Chunk] = []
    for chunk in ordered:
        active = [other for other in active if other.offset[0] + other.extent[0] > chunk.offset[0]]
        for other in active:
            boxes = zip(chunk.offset, chunk.extent, other.offset, other.extent, strict=True)
            if all(low < there + size and there < low + extent for low, extent, there, size in boxes):
                return True
        active.append(chunk)
    return False


def _require(value: object, kind: str) -> None:
    if not isinstance(value, Inert) or value.kind != f"{_MODULE}.{kind}":
        raise TypeError(f"expected {kind}")
