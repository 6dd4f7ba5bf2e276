"""Initial values of parameters, each element a function of (seed, parameter's full name, element index).

The rule (GPT-2, Radford et al. 2019): weights are normal with `init_std`; those whose output is added to the
residual stream (`attention.o`, `feed_forward.down`) are scaled by 1/sqrt(2 n_layers), so that the stream's variance
does not grow with depth; norm weights are 1, biases 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from modelworks.config import ModelConfig
from modelworks.models.random import CHUNK, Key, normal


def initialize(model: nn.Module, seed: int) -> None:
    """Set every parameter of a `Transformer` in place. The model must be materialised (not on the meta device)."""
    config: ModelConfig = model.config  # type: ignore[assignment]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            flat = parameter.view(-1)
            # Generated on the parameter's device piece by piece: never a whole float64 copy of a large matrix.
            for start in range(0, flat.numel(), 16 * CHUNK):
                piece = slice(start, min(start + 16 * CHUNK, flat.numel()))
                flat[piece] = initial_values(
                    config, name, tuple(parameter.shape), seed, piece, dtype=flat.dtype, device=flat.device
                )


def initial_values(
    config: ModelConfig,
    name: str,
    shape: tuple[int, ...],
    seed: int,
    flat_slice: slice | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Elements `flat_slice` (default: all) of the flattened parameter `name`, whose full shape is `shape`.

    Returns a 1-D tensor. Values are made in float64 and cast last, so a dtype changes nothing but the rounding.
    """
    start, stop, step = (flat_slice or slice(None)).indices(math.prod(shape))
    if step != 1:
        raise ValueError("initial values are made for contiguous slices")
    size = max(stop - start, 0)
    if name.endswith("norm.weight"):
        return torch.ones(size, dtype=dtype, device=device)
    if name.endswith(".bias"):
        return torch.zeros(size, dtype=dtype, device=device)
    std = config.init_std
    if name.endswith((".attention.o.weight", ".feed_forward.down.weight")):
        std /= math.sqrt(2 * config.n_layers)
    return (normal(Key.of(seed, "initialize", name), start, start + size, device=device) * std).to(dtype)
