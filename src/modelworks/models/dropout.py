"""Counter-based dropout: whether an element survives depends on where it is, not on when or where it is computed.

Each element's random word is Philox at (channel, global token index, step) under a key made of (seed, layer, site).
Splitting a batch into micro-batches, recomputing a block or spreading rows, columns or heads over devices changes no
mask.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from modelworks.models.random import Key, philox

EMBEDDING_LAYER = -1  # the `layer` of the site before the first block


@dataclass(frozen=True, eq=False)
class DropoutKey:
    """seed: of the run. step: optimiser steps done. first_row: index in the global batch of the context's first row.

    row_length: tokens in a row of the global batch; with it a token's global index is row * row_length + column.

    Where tokens or channels are split over devices, a key says which of them are here:
    columns: int64 (length,), the column in its row of each token; None where they are 0, 1, 2, …
    first_channel: place in the whole tensor of the first local entry of dimension 2 (of attention weights: a head).
    """

    seed: int
    step: int
    row_length: int
    first_row: int = 0
    columns: Tensor | None = None
    first_channel: int = 0

    def keep(self, shape: tuple[int, ...], probability: float, layer: int, site: str, device: torch.device) -> Tensor:
        """Mask (rows, length, *channels): True where the element survives, which has chance 1 - `probability`."""
        rows, length, *channels = shape
        row = torch.arange(self.first_row, self.first_row + rows, dtype=torch.int64, device=device)
        token = (row[:, None] * self.row_length + self._columns(length, device))[..., None]
        n_channels = math.prod(channels)
        first = self.first_channel * math.prod(channels[1:])
        first_block, end_block = first // 4, -(-(first + n_channels) // 4)
        block = torch.arange(first_block, end_block, dtype=torch.int64, device=device)
        counter = (block, token & 0xFFFFFFFF, token >> 32, self.step)
        words = torch.stack(philox(counter, Key.of(self.seed, "dropout", layer, site)), dim=-1)
        skipped = first - 4 * first_block
        words = words.flatten(-2)[..., skipped : skipped + n_channels]
        return (words >= round(probability * 2**32)).view(shape)

    def _columns(self, length: int, device: torch.device) -> Tensor:
        if self.columns is None:
            return torch.arange(length, device=device)
        if len(self.columns) != length:
            raise ValueError(f"a DropoutKey of {len(self.columns)} columns was used for {length} tokens a row")
        return self.columns.to(device)


def dropout(x: Tensor, probability: float, key: DropoutKey | None, layer: int, site: str) -> Tensor:
    """Zero each element of x (rows, length, ...) with `probability`, and scale the rest by 1 / (1 - probability)."""
    if probability == 0.0:
        return x
    if key is None:
        raise ValueError("training with dropout needs a context that carries a DropoutKey")
    keep = key.keep(tuple(x.shape), probability, layer, site, x.device)
    return torch.where(keep, x * (1.0 / (1.0 - probability)), torch.zeros((), dtype=x.dtype, device=x.device))
