"""Reading a checkpoint on many ranks at once, none of which may leave in the middle.

A rank that found damaged bytes and raised would leave the others waiting in a collective for it. So damage is noted,
zeros stand in for what could not be read, and at `settle` all ranks learn of it together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from modelworks.checkpoint import Checkpoint, CorruptedCheckpoint
from modelworks.layout import ShardSpec
from modelworks.layout.shards import Bounds
from modelworks.parallel import Mesh


class CarefulReader:
    """Slices of a checkpoint's tensors, checked as they are read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._damage: str | None = None

    def fill(self, spec: ShardSpec, out: Tensor) -> None:
        """Set a slice of a parameter."""
        out.copy_(self.slice("model", spec.name, spec.bounds))

    def slice(self, section: str, name: str, bounds: Sequence[Bounds]) -> Tensor:
        """The slice, or zeros of its shape once damage was found."""
        if self._damage is None:
            try:
                return self.checkpoint.slice(section, name, bounds)
            except CorruptedCheckpoint as error:
                self._damage = str(error)
            except OSError as error:
                self._damage = f"{self.checkpoint.label}: {section}/{name} cannot be read: {error.strerror or error}"
        dtype, _ = self.checkpoint.tensor_types(section)[name]
        return torch.zeros([stop - start for start, stop in bounds], dtype=dtype)

    def whole(self, section: str, name: str) -> Tensor:
        return self.slice(section, name, [(0, size) for size in self.checkpoint.shapes(section)[name]])

    def settle(self, mesh: Mesh) -> None:
        """All ranks call it: raises `CorruptedCheckpoint` on all where one found damage, in the first one's words."""
        found = mesh.group("world").gather_objects(self._damage)
        told = next(
            (f"{text} (rank {rank})" if len(found) > 1 else text for rank, text in enumerate(found) if text), None
        )
        if told is not None:
            raise CorruptedCheckpoint(told)
