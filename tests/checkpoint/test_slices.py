"""Slices of tensors that any grid of writers wrote equal numpy's slices of the whole; what is read, and no more, is
checked."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_parts import SMALL_BLOCKS, dealt_out, numbers, shards_of, write_parts

from modelworks.checkpoint import CorruptedCheckpoint, open_checkpoint, open_storage
from modelworks.checkpoint.formats.safetensors_files import DTYPES
from modelworks.checkpoint.grid import cell_box, cell_volumes, cells_in, grid_of, n_cells, whole_box
from modelworks.checkpoint.tensor_entries import TensorEntry


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # most of the time, and no part of what is tested here
    monkeypatch.setattr("modelworks.checkpoint.formats.safetensors_files.XXH3", SMALL_BLOCKS)
    monkeypatch.setattr("modelworks.checkpoint.commit.XXH3", SMALL_BLOCKS)
    monkeypatch.setattr("modelworks.checkpoint.shard_reader.BUFFER_BYTES", 3 * SMALL_BLOCKS.block_bytes)


@st.composite
def cuts_of(draw: st.DrawFn, size: int) -> list[int]:
    inner = draw(st.sets(st.integers(1, max(size - 1, 1)), max_size=4)) if size > 1 else set()
    return sorted({0, size} | {position for position in inner if position < size})


@st.composite
def grids(draw: st.DrawFn, largest: int) -> tuple[list[int], list[list[int]]]:
    """A shape, empty and scalar ones included, and cuts for it."""
    shape = draw(st.lists(st.integers(0, largest), max_size=3))
    return shape, [draw(cuts_of(size)) for size in shape]


@st.composite
def bounds_in(draw: st.DrawFn, shape: list[int]) -> list[tuple[int, int]]:
    ends = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return [(start, stop) for start, stop in ends]


def slices(bounds: Any) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in bounds)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), grid=grids(24), dtype=st.sampled_from(sorted(DTYPES)), n_ranks=st.integers(1, 4))
def test_any_slice_of_any_grid(
    data: st.DataObject, grid: Any, dtype: str, n_ranks: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shape, cuts = grid
    tensor = numbers(shape, DTYPES[dtype])
    storage = open_storage(tmp_path_factory.mktemp("grid"))
    shards = [*shards_of("w", tensor, cuts), *shards_of("s", torch.tensor(2.5), [])]
    checkpoint = open_checkpoint(write_parts(storage, dealt_out(shards, n_ranks)))
    expected = tensor.view(torch.uint8).numpy() if DTYPES[dtype].itemsize == 1 else tensor.float().numpy()
    whole = checkpoint.tensor("model", "w")
    assert tuple(whole.shape) == checkpoint.shapes("model")["w"] == tuple(shape)
    for _ in range(4):
        bounds = data.draw(bounds_in(shape))
        found = checkpoint.slice("model", "w", bounds)
        assert found.dtype == DTYPES[dtype]
        values = found.view(torch.uint8).numpy() if found.itemsize == 1 else found.float().numpy()
        np.testing.assert_array_equal(values, expected[slices(bounds)])
        assert torch.equal(whole[slices(bounds)].float(), found.float())
    assert checkpoint.tensor("model", "s") == 2.5


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    shape=st.lists(st.integers(1, 60), min_size=2, max_size=3),
    n_ranks=st.integers(1, 3),
    dtype=st.sampled_from([torch.float64, torch.bfloat16]),
)
def test_slices_over_many_blocks(
    data: st.DataObject,
    shape: list[int],
    n_ranks: int,
    dtype: torch.dtype,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pieces of several blocks, and of several buffers: what is not needed is not read, what is read is right."""
    shape = [*shape, 100]
    cuts = [data.draw(cuts_of(size)) for size in shape]
    tensor = torch.randn(shape).to(dtype)
    folder = write_parts(
        open_storage(tmp_path_factory.mktemp("grid")), dealt_out(shards_of("w", tensor, cuts), n_ranks)
    )
    checkpoint = open_checkpoint(folder)
    bounds = data.draw(bounds_in(shape))
    checkpoint.slice("model", "w", [(0, 1)] * len(shape))  # the headers of the files may be read for that
    assert torch.equal(checkpoint.slice("model", "w", bounds), tensor[slices(bounds)])
    asked = []
    original = type(folder).read_into
    with monkeypatch.context() as patch:
        patch.setattr("modelworks.checkpoint.shard_reader.BUFFER_BYTES", 1 << 30)
        patch.setattr(type(folder), "read_into", lambda *given: asked.append(len(given[3])) or original(*given))
        assert torch.equal(checkpoint.slice("model", "w", bounds), tensor[slices(bounds)])
    assert sum(asked) == bytes_touched(cuts, bounds, dtype.itemsize)


def bytes_touched(cuts: list[list[int]], bounds: Any, itemsize: int) -> int:
    """Of all blocks that hold an element of the bounds, found element by element."""
    total = 0
    for box in itertools.product(*(list(itertools.pairwise(positions)) for positions in cuts)):
        mine = np.zeros([stop - start for start, stop in box], bool)
        mine[tuple(slice(max(a, c) - c, max(min(b, d), c) - c) for (a, b), (c, d) in zip(bounds, box, strict=True))] = 1
        blocks = {int(index) * itemsize // 4096 for index in np.flatnonzero(mine)}
        total += sum(min(4096, mine.size * itemsize - block * 4096) for block in blocks)
    return total


def test_only_the_blocks_of_a_slice_are_checked(tmp_path: Any) -> None:
    tensor = torch.randn(64, 256)  # four rows a block
    folder = write_parts(open_storage(tmp_path), [shards_of("w", tensor, [[0, 64], [0, 256]])])
    file = folder.local() / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # in the last block
    file.write_bytes(data)
    checkpoint = open_checkpoint(folder)
    assert torch.equal(checkpoint.slice("model", "w", [(0, 60), (3, 7)]), tensor[:60, 3:7])
    with pytest.raises(CorruptedCheckpoint, match=r"rank-00000\.safetensors: .* `model/w` differs \(block 15\)"):
        checkpoint.slice("model", "w", [(0, 61), (3, 7)])
    with pytest.raises(CorruptedCheckpoint, match="model/w"):
        checkpoint.verify()


def test_bounds_outside_of_a_tensor(tmp_path: Any) -> None:
    checkpoint = open_checkpoint(write_parts(open_storage(tmp_path), [shards_of("w", torch.ones(4, 4), [[0, 4]] * 2)]))
    for bounds in ([(0, 5), (0, 4)], [(0, 4)], [(3, 2), (0, 4)], [(-1, 2), (0, 4)]):
        with pytest.raises(ValueError, match=r"model/w: .* is not inside its shape \[4, 4\]"):
            checkpoint.slice("model", "w", bounds)
    with pytest.raises(KeyError):
        checkpoint.slice("model", "v", [(0, 1)])


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_many_verify_together(tmp_path: Any, count: int) -> None:
    """Each piece is checked by exactly one of them."""
    shards = [
        shard for index in range(5) for shard in shards_of(f"w{index}", torch.randn(8, 600), [[0, 3, 8], [0, 600]])
    ]
    folder = write_parts(open_storage(tmp_path), dealt_out(shards, 2))
    checkpoint = open_checkpoint(folder)
    shares = [checkpoint.verify(part=(index, count)) for index in range(count)]
    assert sum(shares) == 5 * 8 * 600 * 4
    assert max(shares) <= sum(shares) / count + 2 * 5 * 600 * 4


@settings(max_examples=80, deadline=None)
@given(data=st.data(), grid=grids(12))
def test_the_arithmetic_of_grids(data: st.DataObject, grid: Any) -> None:
    shape, cuts = grid
    boxes = list(itertools.product(*(list(itertools.pairwise(positions)) for positions in cuts)))
    order = data.draw(st.permutations(range(len(boxes))))
    found, places = grid_of(shape, [boxes[index] for index in order])
    if 0 not in shape:
        assert [list(positions) for positions in found] == cuts
        assert [order[place] for place in places] == list(range(len(boxes)))
    assert n_cells(found) == len(places) == len(cell_volumes(found))
    assert [cell_box(found, index) for index in range(n_cells(found))] == boxes
    assert sum(cell_volumes(found)) == (int(np.prod(shape)) if shape else 1)
    bounds = tuple(data.draw(bounds_in(shape)))
    inside = [cell.index for cell in cells_in(found, bounds)]
    expected = [
        index
        for index, box in enumerate(boxes)
        if all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(box, bounds, strict=True))
    ]
    assert inside == expected
    assert [cell.index for cell in cells_in(found, whole_box(shape))] == list(range(n_cells(found)))


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([((0, 2), (0, 4)), ((2, 4), (0, 2))], "no grid"),
        ([((0, 4), (0, 4)), ((0, 4), (0, 4))], "do not cover"),
        ([((0, 4), (0, 2)), ((0, 2), (2, 4)), ((2, 4), (2, 4))], "no grid"),
        ([((0, 4), (0, 5))], "outside"),
    ],
)
def test_pieces_that_are_no_grid(boxes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grid_of([4, 4], boxes)


def test_shares_of_a_check_are_found_and_not_searched_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand ranks write half a million pieces, and a bar moves a thousand times: their product is hours."""
    ranks = [shards_of("w", numbers([8, 3]), [[0, 1, 3, 8], [0, 2, 3]])]
    checkpoint = open_checkpoint(write_parts(open_storage(tmp_path), [[shard] for shard in ranks[0]]))
    listed = []
    real = TensorEntry.piece_bytes
    monkeypatch.setattr(TensorEntry, "piece_bytes", lambda entry: listed.append(entry) or real(entry))
    assert sum(checkpoint.verify(part=(index, 50)) for index in range(50)) == 8 * 3 * numbers([1]).element_size()
    assert len(listed) == 1
