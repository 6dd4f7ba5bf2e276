"""Reading a checkpoint on many ranks at once, none of which may leave in the middle.

A rank that found damaged bytes, or state that does not fit its part of the model, and raised would leave the others
waiting in a collective for it. So problems are noted, zeros stand in for what could not be read, and at `settle` all
ranks learn of them together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from modelworks.checkpoint import Checkpoint, CorruptedCheckpoint
from modelworks.config import UserError
from modelworks.layout import ShardSpec
from modelworks.layout.shards import Bounds
from modelworks.parallel import Mesh


class CarefulReader:
    """Slices of a checkpoint's tensors, checked as they are read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._damage: str | None = None  # the bytes are not those that were written
        self._misfit: str | None = None  # they are, and cannot be used here

    def fill(self, spec: ShardSpec, out: Tensor) -> None:
        """Set a slice of a parameter."""
        out.copy_(self.slice("model", spec.name, spec.bounds))

    def slice(self, section: str, name: str, bounds: Sequence[Bounds]) -> Tensor:
        """The slice, or zeros of its shape once damage was found."""
        if self._damage is None:
            with self.noting(f"{section}/{name}"):
                return self.checkpoint.slice(section, name, bounds)
        dtype, _ = self.checkpoint.tensor_types(section)[name]
        return torch.zeros([stop - start for start, stop in bounds], dtype=dtype)

    def whole(self, section: str, name: str) -> Tensor:
        return self.slice(section, name, [(0, size) for size in self.checkpoint.shapes(section)[name]])

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """Note what goes wrong in the block with `what`, instead of raising it; the first of each kind counts."""
        label = self.checkpoint.label
        try:
            yield
        except CorruptedCheckpoint as error:
            self._damage = self._damage or str(error)
        except OSError as error:
            self._damage = self._damage or f"{label}: {what} cannot be read: {error.strerror or error}"
        except (UserError, KeyError, TypeError, ValueError, ArithmeticError) as error:
            self._misfit = self._misfit or f"{label}: {what} cannot be used here: {error}"

    def settle(self, mesh: Mesh) -> None:
        """All ranks call it. Raises on all, in the words of the first rank that has a problem: `CorruptedCheckpoint`
        where one found damage, else `UserError` where something does not fit."""
        found = mesh.group("world").gather_objects((self._damage, self._misfit))
        for kind, texts in zip((CorruptedCheckpoint, UserError), zip(*found, strict=True), strict=True):
            for rank, text in enumerate(texts):
                if text is not None:
                    raise kind(f"{text} (rank {rank})" if len(found) > 1 else text)
