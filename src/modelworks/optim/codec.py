"""Moments in 8 bits: block-wise dynamic quantisation (Dettmers et al. 2021, 2110.02861).

An element is stored as one of 256 values between -1 and 1 (0 and 1 for a second moment), times the largest magnitude
of its block, a float32. The values are spread as a dynamic data type's: with n = 6 - i, those between 10^-(n+1) and
10^-n are the 2^i (unsigned: 2^(i+1)) midpoints of equal parts of that range, i = 0 ... 6; 0 and 1 complete the 256. The
relative error is at most about 3 % in the upper decade and grows below it; what is less than 3e-7 of its block's
largest becomes 0.

Blocks are the tiles of `modelworks.layout.tiles`: they depend on the logical tensor alone. Encoding multiplies by the
float32 next to one over the largest magnitude and takes the nearest value, of two as near the lower one. Below 3e-39
there is no such float32, and the largest one stands for it: what so small a block holds shrinks. Both directions work
on pieces of whole rows of tiles, so that beside the codes there are never more than `PIECE` elements (or one row of
tiles) in floating point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from modelworks.layout import ShardSpec, tile_grid, tile_shape, tiles_of

PIECE = 1 << 18  # elements decoded at once: a few buffers of 1 MB; with less, starting kernels takes longer than they

_LARGEST = torch.finfo(torch.float32).max


def dynamic_map(signed: bool) -> Tensor:
    """The 256 values, ascending, float32. signed: from -0.993 to 1; otherwise from 0 to 1."""
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1.0, 2 ** (decade + (not signed)) + 1, dtype=torch.float32)
        positive = (10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        values += positive
        if signed:
            values += [-value for value in positive]
    return torch.tensor(sorted(values), dtype=torch.float32)


def nearest_codes(values: Tensor, signed: bool) -> Tensor:
    """The code of the nearest of the 256 values for each element, uint8. values: float32, not above 1 in magnitude."""
    tables = code_tables(signed, values.device)
    # A float's upper 16 bits leave two codes at most, one comparison decides between them: `bucketize` takes 15 times
    # as long. Adding 2^15 makes an index of what is a signed number.
    index = values.contiguous().view(-1).view(torch.int32).bitwise_right_shift(16).add_(1 << 15)
    codes = torch.index_select(tables.lower, 0, index)
    codes += values.reshape(-1) > torch.index_select(tables.limits, 0, codes.int())
    return codes.view(values.shape)


@dataclass(frozen=True)
class Piece:
    """Part of a shard seen as (stacked, rows, columns): whole rows of tiles. first_tile: the first of these rows."""

    stacked: slice
    rows: slice
    first_tile: int
    n_tiles: int

    @property
    def index(self) -> tuple[slice, slice]:
        return self.stacked, self.rows


class Blocks:
    """The tiles of one shard: cuts it into pieces, and turns pieces into codes and back.

    spec: of the shard. Tensors of its local shape go in; scales have the shape of `tiles`.
    """

    def __init__(self, spec: ShardSpec, name: str = "") -> None:
        self.spec = spec
        self.tiles = tiles_of(spec, name)
        self._height, self._width = tile_shape(spec.shape)
        (self._first_row, _), (self._first_column, self._last_column) = ((0, 1), (0, 1), *spec.bounds)[-2:]
        self._rows, self._columns = (1, 1, *spec.local_shape)[-2:]
        self._stacked = math.prod(spec.local_shape[:-2])
        self._tile_rows, self._tile_columns = (1, 1, *self.tiles.local_shape)[-2:]
        self._left = self._first_column % self._width
        self._right = -(self._left + self._columns) % self._width

    @property
    def is_cut_through(self) -> bool:
        """Whether a tile of this shard continues in another one, which then has a say in its scale."""
        sides = (self._height, self._width)[2 - min(len(self.spec.shape), 2) :]
        edges = zip(self.spec.bounds[-2:], self.spec.shape[-2:], sides, strict=True)
        return self.spec.n_local > 0 and any(a % side or (b % side and b != size) for (a, b), size, side in edges)

    @property
    def geometry(self) -> tuple[int, int, int, int, int, int, int, int, int]:
        """Of the shard seen as (stacked, rows, columns): these; a tile's height and width; how much of the first tile
        lies above and to the left, elsewhere; rows and columns of tiles."""
        above = self._first_row % self._height
        size = (self._stacked, self._rows, self._columns)
        return (*size, self._height, self._width, above, self._left, self._tile_rows, self._tile_columns)

    def view(self, tensor: Tensor) -> Tensor:
        """A tensor of the shard's shape as (stacked, rows, columns), to be indexed by `Piece.index`."""
        return tensor.view(self._stacked, self._rows, self._columns)

    def pieces(self, most: int = PIECE) -> Iterator[Piece]:
        """All of the shard in order; each piece has at most `most` elements, or is one row of tiles."""
        if not self.spec.n_local:
            return
        together = max(1, most // (self._rows * self._columns))
        if self._rows * self._columns <= most or self._tile_rows == 1:
            for start in range(0, self._stacked, together):
                stacked = slice(start, min(start + together, self._stacked))
                yield Piece(stacked, slice(0, self._rows), 0, self._tile_rows)
            return
        step = max(1, most // (self._columns * self._height))
        above = self._first_row % self._height  # rows of the first tile that another shard holds
        for stack in range(self._stacked):
            for tile in range(0, self._tile_rows, step):
                last = min(tile + step, self._tile_rows)
                rows = slice(max(0, tile * self._height - above), min(last * self._height - above, self._rows))
                yield Piece(slice(stack, stack + 1), rows, tile, last - tile)

    def decode(self, piece: Piece, codes: Tensor, scales: Tensor, *, signed: bool, dtype: torch.dtype) -> Tensor:
        """The values of a piece, (stacked, rows, columns), of `dtype`; computed in float32."""
        part = self.view(codes)[piece.index]
        values = torch.index_select(code_tables(signed, codes.device).values, 0, part.reshape(-1).int())
        padded, (top, _) = self._padded(values.view(part.shape), piece)
        tiled = self._tiled(padded, piece)
        if padded.data_ptr() == values.data_ptr():
            tiled.mul_(self.scales(scales, piece)[:, :, None, :, None])
            return values.view(part.shape).to(dtype)
        whole = (tiled * self.scales(scales, piece)[:, :, None, :, None]).view(padded.shape)
        left = self._left
        return whole[:, top : top + part.shape[1], left : left + self._columns].contiguous().to(dtype)

    def largest(self, piece: Piece, values: Tensor) -> Tensor:
        """The largest magnitude in each tile of a piece, as far as this shard holds it: (stacked, tile rows, tile
        columns), float32. Infinity counts as the largest float32, so that the rest of a block survives it."""
        padded, _ = self._padded(values.float(), piece)
        tiled = self._tiled(padded, piece).abs()
        over_tile = tiled.amax((2, 4)) if self._height > 1 else tiled.squeeze(2).amax(-1)
        return over_tile.clamp_(max=_LARGEST)

    def encode(self, piece: Piece, values: Tensor, codes: Tensor, scales: Tensor, *, signed: bool) -> None:
        """Write a piece's codes, by the scales that are there."""
        padded, (top, _) = self._padded(values.float(), piece)
        scale = self.scales(scales, piece)
        inverse = torch.where(scale == 0, 1.0, 1.0 / scale).clamp_(max=_LARGEST)[:, :, None, :, None]
        found = nearest_codes((self._tiled(padded, piece) * inverse).clamp_(-1, 1), signed).view(padded.shape)
        rows = piece.rows.stop - piece.rows.start
        self.view(codes)[piece.index] = found[:, top : top + rows, self._left : self._left + self._columns]

    def scales(self, scales: Tensor, piece: Piece) -> Tensor:
        """A piece's part of the scales, (stacked, tile rows, tile columns)."""
        grid = scales.view(self._stacked, self._tile_rows, self._tile_columns)
        return grid[piece.stacked, piece.first_tile : piece.first_tile + piece.n_tiles]

    def keep(self, piece: Piece, largest: Tensor, scales: Tensor) -> None:
        """Write a piece's scales."""
        self.scales(scales, piece).copy_(largest)

    def _padded(self, values: Tensor, piece: Piece) -> tuple[Tensor, tuple[int, int]]:
        """The piece with zeros up to its tiles' edges, and how many rows of them are above and below."""
        top = (self._first_row + piece.rows.start) % self._height
        below = piece.n_tiles * self._height - top - values.shape[1]
        if top or below or self._left or self._right:
            values = functional.pad(values, (self._left, self._right, top, below))
        return values, (top, below)

    def _tiled(self, padded: Tensor, piece: Piece) -> Tensor:
        """(stacked, tile rows, height, tile columns, width)"""
        return padded.view(padded.shape[0], piece.n_tiles, self._height, self._tile_columns, self._width)


def quantize(values: Tensor, *, signed: bool, spec: ShardSpec | None = None) -> tuple[Tensor, Tensor]:
    """(codes uint8 of the same shape, scales float32 of the tiles' shape) of a tensor or, by its spec, of a shard whose
    tiles no other shard shares."""
    blocks = Blocks(spec or ShardSpec.whole("", tuple(values.shape)))
    codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    scales = torch.empty(blocks.tiles.local_shape, dtype=torch.float32, device=values.device)
    for piece in blocks.pieces():
        part = blocks.view(values.contiguous())[piece.index]
        blocks.keep(piece, blocks.largest(piece, part), scales)
        blocks.encode(piece, part, codes, scales, signed=signed)
    return codes, scales


def dequantize(codes: Tensor, scales: Tensor, *, signed: bool, spec: ShardSpec | None = None) -> Tensor:
    """float32 values of codes and scales."""
    blocks = Blocks(spec or ShardSpec.whole("", tuple(codes.shape)))
    values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    for piece in blocks.pieces():
        blocks.view(values)[piece.index] = blocks.decode(piece, codes, scales, signed=signed, dtype=torch.float32)
    return values


class SharedTiles:
    """Agreement on the scales of tiles that cuts go through: the largest over their holders.

    All ranks make it and call it in the same order. shapes: logical shapes of all tensors of the model that are kept in
    8 bits, the same on every rank. specs: of those that this rank holds. reduce: elementwise over all ranks.
    Where no cut goes through a tile, as with sizes that are multiples of 256 a rank, nothing is ever sent after that
    was found out.
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        specs: Mapping[str, ShardSpec],
        reduce: Callable[[Tensor, Literal["sum", "max"]], Tensor],
        device: torch.device | None = None,
    ) -> None:
        self._reduce, self._device = reduce, device
        self._tiles = {name: tiles_of(spec) for name, spec in specs.items()}
        cut = {name for name, spec in specs.items() if Blocks(spec).is_cut_through}
        flags = [float(name in cut) for name in shapes]
        anywhere = reduce(torch.tensor(flags, device=device), "max").tolist() if flags else []
        self._grids = {name: tile_grid(shapes[name]) for name, flag in zip(shapes, anywhere, strict=True) if flag}
        self._indices: dict[str, Tensor] = {}
        if self._grids:
            self._find_shared(specs)

    def __contains__(self, name: str) -> bool:
        """Whether some tile of this tensor is shared, anywhere."""
        return name in self._grids

    @property
    def any(self) -> bool:
        return bool(self._grids)

    def agree(self, scales: Sequence[Mapping[str, Tensor]]) -> None:
        """Make shared scales the largest over ranks, in place. One collective. scales: for each moment, by name, those
        that this rank holds; as many moments on every rank."""
        if not self._grids or not scales:
            return
        rows = []
        for moment in scales:
            parts = [self._whole(name, moment.get(name)).view(-1)[index] for name, index in self._indices.items()]
            rows.append(torch.cat(parts))
        agreed = self._reduce(torch.stack(rows), "max")
        for moment, row in zip(scales, agreed, strict=True):
            sizes = [index.numel() for index in self._indices.values()]
            for (name, index), values in zip(self._indices.items(), torch.split(row, sizes), strict=True):
                if name in moment and moment[name].numel():
                    whole = self._whole(name, moment[name])
                    whole.view(-1)[index] = values.to(whole.dtype)
                    moment[name].copy_(whole[self._tiles[name].slices])

    def _find_shared(self, specs: Mapping[str, ShardSpec]) -> None:
        marks = []
        for name in self._grids:
            mark = self._whole(name, None)
            if name in specs:
                _mark_incomplete(mark, specs[name], self._tiles[name])
            marks.append(mark.view(-1))
        found = torch.split(self._reduce(torch.cat(marks), "max"), [mark.numel() for mark in marks])
        self._indices = {name: mark.nonzero().view(-1) for name, mark in zip(self._grids, found, strict=True)}

    def _whole(self, name: str, held: Tensor | None) -> Tensor:
        whole = torch.zeros(self._grids[name], device=self._device)
        if held is not None and held.numel():
            whole[self._tiles[name].slices] = held
        return whole


def _mark_incomplete(mark: Tensor, spec: ShardSpec, tiles: ShardSpec) -> None:
    """Set 1 where this rank holds only part of a tile."""
    if not spec.n_local:
        return
    sides = tile_shape(spec.shape)[2 - min(len(spec.shape), 2) :]
    first = len(spec.shape) - len(sides)
    for place, side in enumerate(sides):
        dimension = first + place
        (start, stop), size = spec.bounds[dimension], spec.shape[dimension]
        for cut, tile in ((start % side, start // side), (stop % side if stop < size else 0, stop // side)):
            if cut:
                where = list(tiles.slices)
                where[dimension] = slice(tile, tile + 1)
                mark[tuple(where)] = 1.0


@dataclass(frozen=True)
class CodeTables:
    """values: the 256. limits: above which the next code is nearer; infinity after the last. lower: by a float's upper
    16 bits (plus 2^15), the code of the least float with these bits."""

    values: Tensor
    limits: Tensor
    lower: Tensor


@cache
def code_tables(signed: bool, device: torch.device) -> CodeTables:
    values = dynamic_map(signed)
    limits = torch.cat([((values[:-1].double() + values[1:].double()) / 2).float(), torch.tensor([math.inf])])
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    # Of a negative float the bits below make the magnitude larger: the least has them all set.
    least = torch.where(upper < 0, upper | 0xFFFF, upper).view(torch.float32).nan_to_num(nan=0.0)
    lower = torch.bucketize(least, limits[:-1]).to(torch.uint8)
    return CodeTables(values.to(device), limits.to(device), lower.to(device))
