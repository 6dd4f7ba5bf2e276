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
    how many are here.
    """

    def __init__(self, spec: ShardSpec, limit: int, *, offset: int = 0, device: torch.device | str = "cpu") -> None:
        size = math.prod(spec.shape)
        step = _step(size, limit, spec.shape[-1] if spec.shape else 1)
        first = offset % step
        self.weight = size / len(range(first, size, step)) if size else 1.0
        self._index = tuple(each.to(device) for each in _places(spec, step, first))
        self.n_local = len(self._index[0]) if self._index else 1

    @property
    def n_bytes(self) -> int:
        return sum(each.nbytes for each in self._index)

    def of(self, tensor: Tensor) -> Tensor:
        """A copy in float64, (n_local,). tensor: this rank's part, of the spec's local shape."""
        return tensor[tuple(each.to(tensor.device) for each in self._index)].double().reshape(-1)


def row_numbers(spec: ShardSpec) -> Tensor:
    """Of each row that is here, its number in the whole tensor. spec: of a tensor with at least one dimension."""
    rows = torch.zeros(1, dtype=torch.int64)
    for size, (low, high) in zip(spec.shape, spec.bounds[:-1], strict=False):
        rows = (rows[:, None] * size + torch.arange(low, high)).reshape(-1)
    return rows


def _step(size: int, limit: int, row: int) -> int:
    step = max(1, -(-size // limit))
    while step > 1 and math.gcd(step, row) > 1:
        step += 1
    return step


def _places(spec: ShardSpec, step: int, first: int) -> list[Tensor]:
    """By dimension, where the elements here are that stand at first, first + step, … in the whole tensor."""
    if not spec.shape:
        return []
    *leading, (start, stop) = spec.bounds
    rows = row_numbers(spec)
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
