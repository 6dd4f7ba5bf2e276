"""Tiles: the blocks of up to 256 elements that share one scale in 8-bit optimiser state, laid over a *logical* tensor.

A tensor's last two dimensions are cut into tiles of h rows and w columns, h and w powers of two and h w = 256, from the
first row and column of the whole tensor; tiles at the lower and right edge may be smaller. Of the nine shapes the one
that needs fewest tiles is taken, and of equals the widest. So a matrix whose rows are a multiple of 256 long has blocks
of 256 consecutive elements of a row, and one with rows of 64 has blocks of four rows.

Invariant: tiles depend on the logical shape alone. A shard holds the scale of every tile that it touches; where a cut
goes through a tile, its holders agree on the scale (the largest magnitude of all of them), and the codes are those of
the whole tensor. Scales are themselves a logical tensor, of shape `tile_grid`, so they are saved and resharded as any
other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from modelworks.layout.shards import Bounds, ShardSpec

TILE = 256  # elements that share one scale


def tile_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, columns) of a tile of a tensor of this shape."""
    return _tile_shape(*_last_two(shape))


def tile_grid(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a tensor's scales: leading dimensions as they are, tiles along the last two (or the only one)."""
    height, width = tile_shape(shape)
    rows, columns = _last_two(shape)
    last = (-(-rows // height), -(-columns // width))
    return (*shape[:-2], *last[2 - min(len(shape), 2) :])


def n_tiles(shape: Sequence[int], held: Sequence[int] | None = None) -> int:
    """Scales of a tensor. held: the shape of a part of it that is cut at tiles' edges; all of it by default."""
    height, width = tile_shape(shape)
    local = tuple(shape if held is None else held)
    rows, columns = _last_two(local)
    return math.prod(local[:-2]) * -(-rows // height) * -(-columns // width)


def tiles_of(spec: ShardSpec, name: str = "") -> ShardSpec:
    """The scales that a shard holds: those of all tiles that it touches. name: of the scales; the shard's by default.

    Neighbours overlap where a cut goes through a tile: both hold the scale, the same value.
    """
    height, width = tile_shape(spec.shape)
    sides = (1,) * (len(spec.shape) - 2) + (height, width)[2 - min(len(spec.shape), 2) :]
    bounds = tuple(_touched(bound, side) for bound, side in zip(spec.bounds, sides, strict=True))
    return replace(spec, name=name or spec.name, shape=tile_grid(spec.shape), bounds=bounds)


def _touched(bound: Bounds, side: int) -> Bounds:
    start, stop = bound
    return (start // side, -(-stop // side)) if stop > start else (start // side, start // side)


def _last_two(shape: Sequence[int]) -> tuple[int, int]:
    rows, columns = (1, 1, *shape)[-2:]
    return rows, columns


@cache
def _tile_shape(rows: int, columns: int) -> tuple[int, int]:
    shapes = [(1 << power, TILE >> power) for power in range(TILE.bit_length())]
    return min(shapes, key=lambda tile: -(-rows // tile[0]) * -(-columns // tile[1]))
