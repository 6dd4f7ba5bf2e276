"""The grid that cuts a logical tensor into pieces, as plain numbers.

The idea: along each dimension the tensor is cut at increasing positions, `cuts[d] = (0, …, size)`, and every
combination of intervals is one cell. Cells are numbered in row-major order. A scalar has no dimensions and one cell;
a dimension of size 0 has the cuts `(0,)`, so that an empty tensor has no cells.

The invariant: the cells of a grid cover the tensor exactly once, whatever the cuts are. So a manifest that gives cuts
and one file for each cell cannot describe a hole or an overlap, and neither needs to be searched for.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Box = tuple[tuple[int, int], ...]  # (start, stop) along each dimension
Cuts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Cell:
    """One cell: its number in row-major order, and its place in the whole tensor."""

    index: int
    box: Box


def whole_box(shape: Sequence[int]) -> Box:
    """All of a tensor of that shape."""
    return tuple((0, size) for size in shape)


def n_cells(cuts: Cuts) -> int:
    return math.prod(len(positions) - 1 for positions in cuts)


def cell_volumes(cuts: Cuts) -> NDArray[np.int64]:
    """Elements of every cell, in the order of their numbers."""
    volumes = np.ones(1, np.int64)
    for positions in cuts:
        volumes = np.multiply.outer(volumes, np.diff(np.asarray(positions, np.int64))).reshape(-1)
    return volumes


def cell_box(cuts: Cuts, index: int) -> Box:
    """Where cell `index` lies."""
    box = []
    for positions in reversed(cuts):
        index, place = divmod(index, len(positions) - 1)
        box.append((positions[place], positions[place + 1]))
    return tuple(reversed(box))


def cells_in(cuts: Cuts, bounds: Box) -> Iterator[Cell]:
    """The cells that share an element with `bounds`, in order."""
    if any(start >= stop for start, stop in bounds):
        return
    ranges = [
        range(bisect.bisect_right(positions, start) - 1, bisect.bisect_left(positions, stop))
        for positions, (start, stop) in zip(cuts, bounds, strict=True)
    ]
    for places in itertools.product(*ranges):
        index = 0
        for positions, place in zip(cuts, places, strict=True):
            index = index * (len(positions) - 1) + place
        yield Cell(index, tuple((p[place], p[place + 1]) for p, place in zip(cuts, places, strict=True)))


def overlap(one: Box, other: Box) -> Box:
    """What two boxes share, where they share something."""
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Indexes a tensor that holds `outer` to give its part `inner`."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(inner, outer, strict=True))


def grid_of(shape: Sequence[int], boxes: Sequence[Box]) -> tuple[Cuts, list[int]]:
    """The cuts of which `boxes` are the cells, and for each cell in order which box it is. Empty boxes play no part.

    Raises ValueError where the boxes do not cover the shape exactly once, or are no grid.
    """
    bounds = np.array(boxes, np.int64).reshape(len(boxes), len(shape), 2)
    filled = np.flatnonzero((bounds[..., 0] < bounds[..., 1]).all(axis=1))
    bounds = bounds[filled]
    if (bounds[..., 0] < 0).any() or (bounds[..., 1] > np.array(shape, np.int64)).any():
        raise ValueError(f"a piece lies outside the shape {list(shape)}")
    cuts: list[tuple[int, ...]] = []
    number = np.zeros(len(filled), np.int64)
    for dimension, size in enumerate(shape):
        positions = np.unique(np.concatenate([[0, size], bounds[:, dimension].reshape(-1)]))
        starts = np.searchsorted(positions, bounds[:, dimension, 0])
        if (np.searchsorted(positions, bounds[:, dimension, 1]) != starts + 1).any():
            raise ValueError(f"the pieces of shape {list(shape)} are no grid: one spans another's cut")
        number = number * (len(positions) - 1) + starts
        cuts.append(tuple(positions.tolist()))
    count = n_cells(tuple(cuts))
    if len(filled) != count or len(np.unique(number)) != count:
        raise ValueError(f"{len(filled)} pieces do not cover the shape {list(shape)} exactly once")
    return tuple(cuts), filled[np.argsort(number)].tolist()


def cuts_problem(cuts: object, shape: Sequence[int]) -> str | None:
    """What is wrong with cuts that a manifest claims, in words; None when they cut the shape."""
    if not isinstance(cuts, list) or len(cuts) != len(shape):
        return f"its cuts are not one list for each of the {len(shape)} dimensions"
    for positions, size in zip(cuts, shape, strict=True):
        if not isinstance(positions, list) or not all(type(position) is int for position in positions):
            return "its cuts must be lists of whole numbers"
        ends = positions[:1] == [0] and positions[-1] == size
        if not ends or any(a >= b for a, b in itertools.pairwise(positions)):
            return f"its cuts do not rise from 0 to {size}"
    return None
