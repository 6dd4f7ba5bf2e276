"""What one rank writes of a checkpoint: shard files, and a part file that says what is in them.

The part file `rank-00003.json` comes last, so that a rank which has one has written everything. It lives until the
manifest, made from all of them, takes its place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any

import torch
from torch import Tensor

from modelworks.checkpoint.errors import CheckpointError
from modelworks.checkpoint.faults import reached
from modelworks.checkpoint.formats.safetensors_files import DTYPE_NAMES, write_safetensors
from modelworks.checkpoint.grid import Box
from modelworks.checkpoint.lazy_tensor import LazyTensor
from modelworks.checkpoint.owners import Shard
from modelworks.checkpoint.storage import WritableFolder

MAX_SHARD_BYTES = 4 << 30  # of a file, unless a single piece is larger


@dataclass(frozen=True)
class File:
    """header: digest of the safetensors header."""

    name: str
    bytes: int
    header: str


@dataclass(frozen=True)
class Piece:
    """One rank's part of a logical tensor. file: which of the part's files; checksums: of its blocks. key: its name in
    the file where it is not `<section>/<name>`, as for tied tensors, which one process writes once."""

    section: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    file: int
    checksums: str
    key: str | None = None


@dataclass(frozen=True)
class Part:
    rank: int
    files: list[File]
    pieces: list[Piece]


class Cancelled(Exception):
    """Another rank has failed, so what this one writes is of no use any more."""


class PartWriter:
    """Writes shards as they are given, each file durable before `add` returns, then the part file.

    stop: when set, `add` raises `Cancelled` before the next tensor. Errors (OSError, `CheckpointError` for weights that
    are not finite) pass as they are.
    """

    def __init__(self, folder: WritableFolder, rank: int, stop: Event, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        self._folder, self._rank, self._stop, self._max_shard_bytes = folder, rank, stop, max_shard_bytes
        self._files: list[File] = []
        self._pieces: list[Piece] = []

    @property
    def bytes(self) -> int:
        """Of the files written so far."""
        return sum(file.bytes for file in self._files)

    def add(self, shards: Sequence[Shard]) -> None:
        for shard in shards:
            if shard.tensor.dtype not in DTYPE_NAMES:
                raise CheckpointError(f"{shard.key}: tensors of {shard.tensor.dtype} cannot be stored in safetensors")
        for group in _by_file(shards, self._max_shard_bytes):
            self._write_file(group)

    def finish(self) -> None:
        """The part file, by which the rank says that it has written everything."""
        content = {
            "rank": self._rank,
            "files": [[file.name, file.bytes, file.header] for file in self._files],
            "pieces": [[p.section, p.name, p.dtype, p.shape, p.box, p.file, p.checksums] for p in self._pieces],
        }
        reached("before the part file")
        with self._folder.create(part_name(self._folder, self._rank)) as file:
            file.write(json.dumps(content, separators=(",", ":")).encode())
            reached("part file written")
        reached("part file durable")

    def _write_file(self, group: Sequence[Shard]) -> None:
        filled = [shard for shard in group if shard.bytes]
        checksums: dict[str, str] = {}
        if filled:
            number = len(self._files) + 1
            stem = f"rank-{self._rank:05d}" if number == 1 else f"rank-{self._rank:05d}-{number}"
            name = self._folder.file_name(stem, ".safetensors")
            reached("before a shard file")
            with self._folder.create(name) as file:
                written = write_safetensors(file, [(shard.key, self._checked(shard)) for shard in filled])
                reached("shard file written")
            reached("shard file durable")
            checksums = written.checksums
            self._files.append(File(name, written.bytes, written.header))
        for shard in group:
            spec, dtype = shard.spec, DTYPE_NAMES[shard.tensor.dtype]
            found = checksums.get(shard.key, "")
            piece = Piece(shard.section, spec.name, dtype, spec.shape, spec.bounds, len(self._files) - 1, found)
            self._pieces.append(piece)

    def _checked(self, shard: Shard) -> LazyTensor:
        def load() -> Tensor:
            if self._stop.is_set():
                raise Cancelled
            reached("between two tensors")
            tensor = shard.tensor.detach().cpu()
            # Saved, they would be the newest checkpoint, and retention would remove good ones for its sake.
            if shard.section == "model" and not is_finite(tensor):
                raise CheckpointError(f"the weights are not finite any more ({shard.spec.name})")
            return tensor

        return LazyTensor(shard.tensor.dtype, tuple(shard.tensor.shape), load)


def is_finite(tensor: Tensor) -> bool:
    """Whether all elements are; one pass over memory that makes no tensor of flags."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.itemsize == 1:  # torch does not compare 8-bit floats
        tensor = tensor.float()
    low, high = torch.aminmax(tensor)  # both are NaN where any element is
    return math.isfinite(low) and math.isfinite(high)


def part_name(folder: WritableFolder, rank: int) -> str:
    return folder.file_name(f"rank-{rank:05d}", ".json")


def read_part(folder: WritableFolder, rank: int) -> Part:
    """Raises `CheckpointError` where it, or a file that it names, is not what the rank wrote."""
    name = part_name(folder, rank)
    try:
        text = folder.read(name)
        if text is None:
            raise CheckpointError(f"{folder.label}: lacks {name}, which rank {rank} has written: {_NOT_SHARED}")
        content = json.loads(text)
        part = Part(
            content["rank"],
            [File(*entry) for entry in content["files"]],
            [_piece(*entry) for entry in content["pieces"]],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder.label}: {name} is damaged ({error})") from None
    for file in part.files:
        size = folder.size(file.name)
        if size != file.bytes:
            found = "is not there" if size is None else f"has {size:,} bytes"
            raise CheckpointError(
                f"{folder.label}: {file.name} {found}, but rank {rank} wrote {file.bytes:,} bytes: {_NOT_SHARED}"
            )
    return part


_NOT_SHARED = "is `checkpoint.storage` a directory that all machines share?"


def _piece(section: str, name: str, dtype: str, shape: Any, box: Any, file: int, checksums: str) -> Piece:
    return Piece(section, name, dtype, tuple(shape), tuple((a, b) for a, b in box), file, checksums)


def _by_file(shards: Iterable[Shard], max_bytes: int) -> Iterator[list[Shard]]:
    """Shards by file: of at most `max_bytes`, and at most one piece of a tensor in each."""
    group: list[Shard] = []
    used, keys = 0, set[str]()
    for shard in shards:
        if group and (used + shard.bytes > max_bytes or shard.key in keys):
            yield group
            group, used, keys = [], 0, set()
        group.append(shard)
        used += shard.bytes
        keys.add(shard.key)
    if group:
        yield group
