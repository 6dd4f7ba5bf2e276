"""Sums over logical tensors, of which each rank may hold a slice: norms, means of rows and columns.

Invariant: every element is counted once, however many ranks hold it (`ShardSpec.counted`), so that a trust ratio or a
mean is the same number on every rank and in every layout. All tensors' numbers travel in one vector, each at its own
place in it, whichever of them a rank holds: one collective for the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modelworks.layout import ShardSpec
from modelworks.optim.clip import Reduce
from modelworks.optim.orthogonal import WholeMatrices

Length = Callable[[ShardSpec], int]


@dataclass(frozen=True)
class Split:
    """How the parameters of a model are split over ranks.

    specs: what this rank holds, by name. shapes: of all trained parameters of the model, the same on every rank.
    reduce: over all ranks; None where this process holds everything. matrices: computes of whole matrices that are
    split over ranks; None likewise.
    """

    specs: Mapping[str, ShardSpec]
    shapes: Mapping[str, tuple[int, ...]]
    reduce: Reduce | None = None
    matrices: WholeMatrices | None = None


@dataclass(frozen=True)
class Sums:
    """What a rule asks of the other ranks. split: None where this process holds everything."""

    split: Split | None = None
    _lengths: dict[Length, dict[str, int]] = field(default_factory=dict)

    @property
    def all_here(self) -> bool:
        """Whether this process alone holds every tensor, and asks nobody."""
        return self.split is None or self.split.reduce is None

    def total(self, own: Mapping[str, Tensor], length: Length) -> dict[str, Tensor]:
        """The sums over ranks of one vector for each logical tensor. All ranks call it.

        own: by name, this rank's contribution: a vector of `length(spec)` elements, spec being of the whole tensor.
        length: the same function on every rank and in every step; 0 for a tensor that has no part in it.
        """
        if self.split is None or self.split.reduce is None:
            return dict(own)
        lengths = self._lengths.get(length)
        if lengths is None:
            shapes = self.split.shapes.items()
            lengths = {name: length(ShardSpec.whole(name, shape)) for name, shape in shapes}
            self._lengths[length] = lengths
        some = next(iter(own.values()), None)
        device = torch.device("cpu") if some is None else some.device
        parts = [
            own[name]
            if name in own and self.split.specs[name].counted
            else torch.zeros(length, dtype=torch.float64, device=device)
            for name, length in lengths.items()
        ]
        result = self.split.reduce(torch.cat(parts).double(), "sum").to(device)
        summed = dict(zip(lengths, torch.split(result, list(lengths.values())), strict=True))
        return {name: summed[name].to(vector.dtype) for name, vector in own.items()}
