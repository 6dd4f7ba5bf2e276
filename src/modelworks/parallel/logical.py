"""Whole tensors from shards: what one rank writes to a file, compares or samples from.

Every rank knows from the layout alone who holds which slice, so nothing is negotiated: the rank that counts a slice
sends it, and rank 0 puts it in its place. One tensor at a time: rank 0 never holds more than the largest one beyond
what the caller keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from modelworks.layout import ShardSpec
from modelworks.parallel.mesh import Mesh

Specs = Mapping[str, ShardSpec]


class Assembler:
    """specs_of: rank -> what it stores, by name (`ParameterPlan.stored`). All ranks call the methods in one order."""

    def __init__(self, mesh: Mesh, specs_of: Callable[[int], Specs]) -> None:
        self.mesh = mesh
        self._specs_of = cache(specs_of)

    def whole(self, name: str, local: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """The whole tensor on rank 0 (on the CPU), None elsewhere. local: this rank's slice; None where it has none."""
        world = self.mesh.group("world")
        if world.size == 1:
            assert local is not None
            return local.detach().to("cpu", copy=True)
        own = self._specs_of(self.mesh.rank).get(name)
        sends = own is not None and own.counted and own.n_local > 0
        if self.mesh.rank != 0:
            if sends:
                assert local is not None
                world.send(local.detach().to(self.mesh.device, dtype).contiguous(), 0).wait()
            return None
        shape = next(specs[name].shape for specs in map(self._specs_of, range(world.size)) if name in specs)
        result = torch.empty(shape, dtype=dtype)
        for rank in range(world.size):
            spec = self._specs_of(rank).get(name)
            if spec is None or not spec.counted or not spec.n_local:
                continue
            if rank == 0:
                assert local is not None
                result[spec.slices] = local.detach().to("cpu", dtype)
            else:
                piece = torch.empty(spec.local_shape, dtype=dtype, device=self.mesh.device)
                world.receive(piece, rank).wait()
                result[spec.slices] = piece.cpu()
        return result

    def all(self, local: Mapping[str, Tensor], names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) on rank 0, nothing elsewhere; every rank must go through the iterator.

        local: this rank's slices; names: all parameters of the model, the same on every rank.
        """
        dtype = next(iter(local.values())).dtype if local else torch.float32
        for name in names:
            tensor = self.whole(name, local.get(name), dtype)
            if tensor is not None:
                yield name, tensor
