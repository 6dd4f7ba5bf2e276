"""A table of vectors looked up by integer: tokens or learned positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Embedding(nn.Module):
    """int64 (...) -> (..., width). weight: (count, width)."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width))

    def forward(self, index: Tensor) -> Tensor:
        return F.embedding(index, self.weight)
