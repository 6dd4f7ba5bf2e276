"""`ShardSpec`: which part of a logical tensor this rank holds, and whether it counts those elements.

It alone tells clipping, optimisers, checkpoints and verification how a tensor is split. Invariant: over all ranks,
the slices that are `counted` cover each element of the logical tensor exactly once, however many ranks hold copies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

Bounds = tuple[int, int]  # start (included) and stop (not), along one dimension


@dataclass(frozen=True)
class ShardSpec:
    """One logical tensor as one rank sees it.

    name: the full parameter name. shape: of the whole tensor. bounds: what this rank holds, along each dimension.
    counted: whether this rank is the one that counts these elements in sums over ranks (norms, checkpoints);
    of several ranks with the same slice, exactly one does.
    """

    name: str
    shape: tuple[int, ...]
    bounds: tuple[Bounds, ...]
    counted: bool = True

    def __post_init__(self) -> None:
        inside = all(0 <= start <= stop <= size for (start, stop), size in zip(self.bounds, self.shape, strict=True))
        if not inside:
            raise ValueError(f"{self.name}: {self.bounds} is not inside a tensor of shape {self.shape}")

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...], *, counted: bool = True) -> ShardSpec:
        """All of the tensor on this rank."""
        return cls(name, shape, tuple((0, size) for size in shape), counted)

    def cut(self, dimension: int, parts: int, index: int) -> ShardSpec:
        """Part `index` of `parts` of what this spec holds, along `dimension`. Cuts compose."""
        start, stop = self.bounds[dimension]
        first, last = split_evenly(stop - start, parts, index)
        bounds = list(self.bounds)
        bounds[dimension] = (start + first, start + last)
        return replace(self, bounds=tuple(bounds))

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.bounds)

    @property
    def n_local(self) -> int:
        """Elements held here."""
        return math.prod(self.local_shape)

    @property
    def is_whole(self) -> bool:
        return self.local_shape == self.shape

    @property
    def slices(self) -> tuple[slice, ...]:
        """Indexes the whole tensor to give this rank's part."""
        return tuple(slice(start, stop) for start, stop in self.bounds)


def split_evenly(size: int, parts: int, index: int) -> Bounds:
    """Part `index` when `size` is cut into consecutive `parts` that differ by at most one, longer ones first."""
    if not 0 <= index < parts:
        raise IndexError(f"part {index} of {parts}")
    length, longer = divmod(size, parts)
    start = index * length + min(index, longer)
    return start, start + length + (index < longer)


def split_in_chunks(spec: ShardSpec, dimension: int, parts: int, index: int) -> ShardSpec:
    """Part `index` of `parts` by the rule of `torch.chunk`, which FSDP2 shards by: all parts but the last ones have
    ceil(size / parts) rows, and parts beyond the end are empty."""
    start, stop = spec.bounds[dimension]
    length = -(-(stop - start) // parts)
    bounds = list(spec.bounds)
    bounds[dimension] = (min(start + index * length, stop), min(start + (index + 1) * length, stop))
    return replace(spec, bounds=tuple(bounds))


def whole_tensors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, ShardSpec]:
    """The specs of a single process, which holds and counts everything."""
    return {name: ShardSpec.whole(name, shape) for name, shape in shapes.items()}
