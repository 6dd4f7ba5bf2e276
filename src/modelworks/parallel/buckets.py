"""Buckets: several parameters in one flat buffer, so that one collective reduces or gathers them all.

A bucket over N shards is a matrix of N rows; row r holds, one after the other, shard r of each of its parameters:

    row 0   | a[0:2] | b[0:4] |         a has 3 rows, b has 8: a is cut as torch.chunk cuts it, and the row that
    row 1   | a[2:3] . b[4:8] |         its last shard lacks is padding (.)

A reduce-scatter of the buffer gives rank r the sum of row r, an all-gather of rows gives the whole buffer, and each
shard is a box of its parameter. Where nothing is cut there is one row, and the collective is an all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Member:
    """One parameter's place in the rows. shape: of the whole; dimension: that is cut, None for a bucket of one row;
    rows: of `dimension` in each part, the last ones possibly fewer; start, size: elements of each row."""

    name: str
    shape: tuple[int, ...]
    dimension: int | None
    rows: int
    start: int
    size: int

    def part_shape(self, rows: int) -> tuple[int, ...]:
        if self.dimension is None:
            return self.shape
        return (*self.shape[: self.dimension], rows, *self.shape[self.dimension + 1 :])


@dataclass(frozen=True)
class Parcel:
    """What goes into a bucket. groups: names of those it is reduced over, the first by a reduce-scatter if `cut`."""

    name: str
    shape: tuple[int, ...]
    dimension: int | None
    groups: tuple[str, ...]
    dtype: torch.dtype
    trained: bool
    owners: int

    @property
    def kind(self) -> tuple[object, ...]:
        """Parcels of one kind can share a bucket."""
        return (self.dimension is not None, self.groups, self.dtype, self.trained, self.owners)


class Bucket:
    """Parameters that travel together, and the layout of their buffer. Holds no memory itself."""

    def __init__(self, parcels: Sequence[Parcel], shards: int) -> None:
        first = parcels[0]
        self.groups, self.dtype, self.trained, self.owners = first.groups, first.dtype, first.trained, first.owners
        self.cut, self.shards = first.dimension is not None, shards if first.dimension is not None else 1
        self.members: list[Member] = []
        self.width = 0  # elements of a row
        for parcel in parcels:
            length = parcel.shape[parcel.dimension] if parcel.dimension is not None else 1
            rows = -(-length // self.shards)
            member = Member(parcel.name, parcel.shape, parcel.dimension, rows, self.width, 0)
            size = torch.Size(member.part_shape(rows)).numel()
            self.members.append(Member(parcel.name, parcel.shape, parcel.dimension, rows, self.width, size))
            self.width += size

    @property
    def names(self) -> list[str]:
        return [member.name for member in self.members]

    def pack(self, values: Mapping[str, Tensor | None], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer (shards, width) of whole tensors, cast to `dtype`; one that is None counts as zeros."""
        buffer = torch.empty(self.shards, self.width, dtype=dtype, device=device)
        for member in self.members:
            value = values[member.name]
            columns = buffer[:, member.start : member.start + member.size]
            if value is None:
                columns.zero_()
                continue
            for place, part, whole in self._parts(columns, member, value):
                part.copy_(whole)
                if place is not None:  # a part that may be short
                    columns[place, part.numel() :].zero_()
        return buffer

    def unpack(self, buffer: Tensor, targets: Mapping[str, Tensor]) -> None:
        """Copy the buffer (shards, width) into whole tensors."""
        for member in self.members:
            columns = buffer[:, member.start : member.start + member.size]
            for _, part, whole in self._parts(columns, member, targets[member.name]):
                whole.copy_(part)

    def pack_row(self, shards: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
        """One rank's row (width,) of its shards."""
        row = torch.zeros(self.width, dtype=dtype, device=device)
        for member in self.members:
            shard = shards[member.name]
            row[member.start : member.start + shard.numel()].view(shard.shape).copy_(shard)
        return row

    def views(self, row: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """The shards inside a row, without padding. shapes: of the shards."""
        views = {}
        for member in self.members:
            shape = torch.Size(shapes[member.name])
            views[member.name] = row[member.start : member.start + shape.numel()].view(shape)
        return views

    def _parts(self, columns: Tensor, member: Member, whole: Tensor) -> Iterable[tuple[int | None, Tensor, Tensor]]:
        """Pairs of places in the buffer and in the whole tensor that hold the same elements.

        All full parts are one pair, so that a large group costs no more copies than a small one; each part that is
        short or empty follows with its place.
        """
        if member.dimension is None:
            yield None, columns.view(member.shape), whole
            return
        dimension, length = member.dimension, member.shape[member.dimension]
        full = length // member.rows
        if full:
            parts = torch.unflatten(columns[:full], 1, member.part_shape(member.rows))
            split = torch.unflatten(whole.narrow(dimension, 0, full * member.rows), dimension, (full, member.rows))
            yield None, parts, split.movedim(dimension, 0)
        for place in range(full, self.shards):
            start = min(place * member.rows, length)
            rows = min(member.rows, length - start)
            shape = member.part_shape(rows)
            part = columns[place, : torch.Size(shape).numel()].view(shape)
            yield place, part, whole.narrow(dimension, start, rows)


def fill_buckets(parcels: Iterable[Parcel], shards: Mapping[str, int], bucket_bytes: int) -> list[Bucket]:
    """Parcels in buckets of their kind, each closed once it holds `bucket_bytes` of gradients.

    parcels: in the order in which their gradients come. shards: size of each group by name. The buckets' order is
    that in which they become complete, and is the same on every rank: collectives are matched by their order.
    """
    kept: dict[tuple[object, ...], list[Parcel]] = {}
    closed: list[tuple[int, list[Parcel]]] = []
    last_seen: dict[tuple[object, ...], int] = {}
    for number, parcel in enumerate(parcels):
        held = kept.setdefault(parcel.kind, [])
        held.append(parcel)
        last_seen[parcel.kind] = number
        if sum(_gradient_bytes(one) for one in held) >= bucket_bytes:
            closed.append((number, kept.pop(parcel.kind)))
    closed += [(last_seen[kind], held) for kind, held in kept.items()]
    return [
        Bucket(held, shards[held[0].groups[0]] if held[0].dimension is not None else 1)
        for _, held in sorted(closed, key=lambda pair: pair[0])
    ]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What gradients are summed and reduced in: at least float32."""
    return torch.float32 if dtype in LOW_PRECISION else dtype


def _gradient_bytes(parcel: Parcel) -> int:
    return torch.Size(parcel.shape).numel() * wide_dtype(parcel.dtype).itemsize
