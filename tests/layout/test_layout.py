"""Layout: ranks and coordinates are one to one, and shards cover each element once."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelworks.config import ParallelConfig, UserError
from modelworks.layout import AXES, Coordinates, Layout, ShardSpec, split_evenly, whole_tensors

_DEGREES = st.fixed_dictionaries(dict.fromkeys(AXES, st.integers(1, 3)))
layouts = _DEGREES.map(lambda degrees: Layout(**degrees))


@settings(max_examples=30, deadline=None)
@given(layouts)
def test_ranks_and_coordinates_are_one_to_one(layout: Layout) -> None:
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert len(set(places)) == layout.world_size
    assert [layout.rank(place) for place in places] == list(range(layout.world_size))
    # numbered like the digits of a counter whose last axis runs fastest
    assert places == sorted(places, key=astuple)


@settings(max_examples=30, deadline=None)
@given(layouts, st.sampled_from(AXES))
def test_groups_along_an_axis_split_the_world(layout: Layout, axis: str) -> None:
    groups = {layout.ranks(rank, axis) for rank in range(layout.world_size)}
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    for group in groups:
        assert len(group) == getattr(layout, axis)
        assert all(layout.ranks(rank, axis) == group for rank in group)
        assert [getattr(layout.coordinates(rank), axis) for rank in group] == list(range(len(group)))


@settings(max_examples=30, deadline=None)
@given(layouts, st.data())
def test_sizes_and_places_are_those_of_the_listed_groups(layout: Layout, data: st.DataObject) -> None:
    ranks = layout.dp_replicate * layout.dp_shard * layout.cp
    layout = replace(layout, ep=data.draw(st.sampled_from([ep for ep in range(1, ranks + 1) if ranks % ep == 0])))
    for group in (*AXES, "world", "dp", "shard", "data", "ep", "expert_shard", "expert_replicate"):
        for rank in range(layout.world_size):
            listed = layout.ranks(rank, group)
            assert (layout.size(rank, group), layout.place(rank, group)) == (len(listed), listed.index(rank))


def test_tensor_parallel_ranks_are_neighbours_and_stages_are_far_apart() -> None:
    layout = Layout(pp=2, dp_shard=2, tp=2)
    assert layout.world_size == 8
    assert layout.ranks(0, "tp") == (0, 1)
    assert layout.ranks(0, "dp_shard") == (0, 2)
    assert layout.ranks(0, "pp") == (0, 4)
    assert layout.coordinates(5) == Coordinates(pp=1, tp=1)


def test_refused() -> None:
    with pytest.raises(UserError, match=r"parallel.tp: got 0"):
        Layout(tp=0)
    with pytest.raises(UserError, match=r"parallel.ep: got 3, expected a divisor of .* 4"):
        Layout(dp_shard=4, ep=3)
    assert Layout(dp_replicate=2, cp=2, tp=3, ep=4).world_size == 12
    for rank in (-1, 8):
        with pytest.raises(IndexError):
            Layout(tp=8).coordinates(rank)
    with pytest.raises(IndexError):
        Layout(tp=8).rank(Coordinates(pp=1))


def test_a_single_process() -> None:
    layout = Layout.of(ParallelConfig())
    assert (layout.world_size, layout.coordinates(0)) == (1, Coordinates())
    specs = whole_tensors({"w": (3, 4), "b": (3,)})
    assert all(spec.is_whole and spec.counted for spec in specs.values())
    assert (specs["w"].n_local, specs["w"].slices) == (12, (slice(0, 3), slice(0, 4)))


@given(st.integers(0, 50), st.integers(1, 9))
def test_parts_are_consecutive_and_differ_by_at_most_one(size: int, parts: int) -> None:
    bounds = [split_evenly(size, parts, index) for index in range(parts)]
    assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
    assert bounds[-1][1] == size
    lengths = [stop - start for start, stop in bounds]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@given(
    st.tuples(st.integers(0, 6), st.integers(0, 6)),
    st.lists(st.tuples(st.integers(0, 1), st.integers(1, 4)), max_size=3),
)
def test_cuts_in_any_order_cover_each_element_once(shape: tuple[int, int], cuts: list[tuple[int, int]]) -> None:
    specs = [ShardSpec.whole("w", shape)]
    for dimension, parts in cuts:
        specs = [spec.cut(dimension, parts, index) for spec in specs for index in range(parts)]
    held = [(i, j) for spec in specs for i in range(*spec.bounds[0]) for j in range(*spec.bounds[1])]
    assert sorted(held) == [(i, j) for i in range(shape[0]) for j in range(shape[1])]
    assert all(spec.n_local == (s := spec.local_shape)[0] * s[1] for spec in specs)


def test_a_slice_outside_the_tensor_is_a_defect() -> None:
    with pytest.raises(ValueError, match="not inside"):
        ShardSpec("w", (3,), ((1, 4),))
