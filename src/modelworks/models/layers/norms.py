"""LayerNorm (Ba et al. 2016) and RMSNorm (Zhang, Sennrich 2019) over the last dimension.

Statistics are taken in float32 (float64 for float64 inputs): a bfloat16 mean of squares is too coarse. The result has
the dtype of x also where weights are wider (autocast).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modelworks.config import ModelConfig


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, with weight (size,)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias, both (size,)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


def build_norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    """The norm over d_model that the config names."""
    kind = RMSNorm if config.norm == "rmsnorm" else LayerNorm
    return kind(config.d_model, config.norm_eps)
