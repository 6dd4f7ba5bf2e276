"""A bucket's buffer against torch.chunk: each row holds one rank's chunk of every parameter, and padding."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelworks.layout.placement import zero_dimension
from modelworks.parallel.buckets import Bucket, Parcel, fill_buckets

Shape = tuple[int, ...]
shapes = st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6)


def parcels(of: list[Shape], shards: int, cut: bool = True, dtype: torch.dtype = torch.float32) -> list[Parcel]:
    return [
        Parcel(f"p{number}", shape, zero_dimension(shape, shards) if cut else None, ("shard",), dtype, True, 1)
        for number, shape in enumerate(of)
    ]


def values(of: list[Shape]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"p{number}": torch.randn(shape, generator=generator) for number, shape in enumerate(of)}


@settings(max_examples=200, deadline=None)
@given(of=shapes, shards=st.integers(2, 9))
def test_rows_are_chunks_and_come_back_whole(of: list[Shape], shards: int) -> None:
    held = values(of)
    bucket = Bucket(parcels(of, shards), shards)
    buffer = bucket.pack(held, torch.float64, torch.device("cpu"))
    assert buffer.shape == (shards, bucket.width)
    for place in range(shards):
        expected = {}
        for member in bucket.members:
            chunks = held[member.name].chunk(shards, member.dimension)
            empty = held[member.name].narrow(member.dimension or 0, 0, 0)
            expected[member.name] = chunks[place] if place < len(chunks) else empty
        views = bucket.views(buffer[place], {name: tuple(chunk.shape) for name, chunk in expected.items()})
        for name, chunk in expected.items():
            assert torch.equal(views[name].float(), chunk)
        row = bucket.pack_row(expected, torch.float64, torch.device("cpu"))
        assert torch.equal(row, buffer[place])  # with zeros for padding, so that a norm of buffers is one of gradients
    back = {name: torch.full_like(tensor, torch.nan) for name, tensor in held.items()}
    bucket.unpack(buffer, back)
    assert all(torch.equal(back[name], tensor) for name, tensor in held.items())


def test_without_a_cut_there_is_one_row_and_what_is_missing_is_zero() -> None:
    of: list[Shape] = [(2, 3), (4,)]
    bucket = Bucket(parcels(of, 1, cut=False), 1)
    buffer = bucket.pack({"p0": values(of)["p0"], "p1": None}, torch.float32, torch.device("cpu"))
    assert torch.equal(buffer[0, :6], values(of)["p0"].flatten())
    assert torch.equal(buffer[0, 6:], torch.zeros(4))


@given(of=shapes, limit=st.integers(1, 2000))
def test_buckets_close_at_their_size_and_keep_kinds_apart(of: list[Shape], limit: int) -> None:
    low = parcels(of, 2, dtype=torch.bfloat16)
    mixed = [one for pair in zip(parcels(of, 2), low, strict=True) for one in pair]
    mixed = [Parcel(f"{one.name}.{one.dtype}", *list(vars(one).values())[1:]) for one in mixed]
    buckets = fill_buckets(mixed, {"shard": 2}, limit)
    names = [name for bucket in buckets for name in bucket.names]
    assert sorted(names) == sorted(one.name for one in mixed)
    order = {one.name: number for number, one in enumerate(mixed)}
    completed = [max(order[name] for name in bucket.names) for bucket in buckets]
    assert completed == sorted(completed)  # each can start while those after it still wait for gradients
    sizes = {one.name: 4 * torch.Size(one.shape).numel() for one in mixed}
    for bucket in buckets:
        assert len({name.rsplit(".", 1)[1] for name in bucket.names}) == 1
        assert sum(sizes[name] for name in bucket.names[:-1]) < limit
