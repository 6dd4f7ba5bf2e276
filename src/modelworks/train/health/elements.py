"""A sample of the elements of a logical tensor, of which this rank has some: the same elements in every layout.

Elements are taken at equal distances along the tensor written out row by row. The distance has no factor in common
with the length of a row, so that the sample moves over all columns instead of standing in a few, and every row that is
longer than the distance has its share: gradients of an embedding are large in few rows, others in few columns.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from modelworks.layout import ShardSpec


class Elements:
    """About `limit` elements of the tensor, all of one that has no more. offset: another one gives other elements.

    weight: elements of the tensor for each in the sample, so that weighted sums estimate those of the whole. n_local:
    how many are here. held: whether places that have to be listed are kept for the next time.
    """

    def __init__(
        self,
        spec: ShardSpec,
        limit: int,
        *,
        offset: int = 0,
        device: torch.device | str = "cpu",
        held: bool = True,
    ) -> None:
        size = math.prod(spec.shape)
        step = _step(size, limit, spec.shape[-1] if spec.shape else 1)
        first = offset % step
        self.weight = size / len(range(first, size, step)) if size else 1.0
        self._spec, self._step, self._first = spec, step, first
        self._slice = _slice(spec, step, first)
        self._index = self._places(device) if held or self._slice is None else None
        self.n_local = len(range(*self._slice)) if self._slice else len(self._index[0]) if self._index else 1
        if not held:
            self._index = None

    @property
    def n_bytes(self) -> int:
        return sum(each.nbytes for each in self._index or ())

    def of(self, tensor: Tensor) -> Tensor:
        """A copy in float64, (n_local,). tensor: this rank's part, of the spec's local shape."""
        if self._slice and tensor.is_contiguous():
            start, stop, step = self._slice
            return tensor.view(-1)[start:stop:step].to(torch.float64, copy=True)
        index = self._places(tensor.device) if self._index is None else self._index
        return tensor[tuple(each.to(tensor.device) for each in index)].double().reshape(-1)

    def _places(self, device: torch.device | str) -> tuple[Tensor, ...]:
        return tuple(each.to(device) for each in _places(self._spec, self._step, self._first))


def _step(size: int, limit: int, row: int) -> int:
    step = max(1, -(-size // limit))
    while step > 1 and math.gcd(step, row) > 1:
        step += 1
    return step


def _slice(spec: ShardSpec, step: int, first: int) -> tuple[int, int, int] | None:
    """Of this rank's part written out: start, stop and step; None where that is no unbroken part of the whole."""
    if not spec.shape or any(
        bounds != (0, size) for bounds, size in list(zip(spec.bounds, spec.shape, strict=True))[1:]
    ):
        return None
    row = math.prod(spec.shape[1:])
    low, high = (row * bound for bound in spec.bounds[0])
    return (first - low) % step, high - low, step


def _places(spec: ShardSpec, step: int, first: int) -> list[Tensor]:
    """By dimension, where the elements here are that stand at first, first + step, … in the whole tensor."""
    if not spec.shape:
        return []
    *leading, (start, stop) = spec.bounds
    rows = torch.zeros(1, dtype=torch.int64)  # of each row here, its number in the whole tensor
    for size, (low, high) in zip(spec.shape, leading, strict=False):
        rows = (rows[:, None] * size + torch.arange(low, high)).reshape(-1)
    width = stop - start
    # In each row the first column here whose place is one of those wanted, and the ones that follow.
    column = (first - rows * spec.shape[-1] - start) % step
    columns = column[:, None] + step * torch.arange(-(-width // step))
    row, place = (columns < width).nonzero(as_tuple=True)
    index = [columns[row, place]]
    for low, high in reversed(leading):
        index.insert(0, row % (high - low))
        row = row // (high - low)
    return index
