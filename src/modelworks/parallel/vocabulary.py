"""Which entries of a vocabulary one rank has, and where in them a token id is.

Ranks hold consecutive rows of the embedding and of the head (Shoeybi et al. 2019, 1909.08053); their numbers differ by
one where the vocabulary does not divide. Invariant: every valid id is here on exactly one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from modelworks.layout import ShardSpec


@dataclass(frozen=True)
class VocabularyRows:
    """The rows [first, end) of the `total` of the vocabulary."""

    first: int
    end: int
    total: int

    @classmethod
    def of(cls, spec: ShardSpec) -> VocabularyRows:
        """Of an embedding's or head's weight (vocab_size, d_model)."""
        return cls(*spec.bounds[0], spec.shape[0])

    @property
    def all_here(self) -> bool:
        return (self.first, self.end) == (0, self.total)

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Each id's row in the local slice, and whether it is here; row 0 where it is on another rank.

        An id that no rank has gets a row beyond the end, so that looking it up fails here as it does in one process.
        """
        here = (ids >= self.first) & (ids < self.end)
        valid = (ids >= 0) & (ids < self.total)
        return torch.where(here, ids - self.first, ~valid * (self.end - self.first)), here
