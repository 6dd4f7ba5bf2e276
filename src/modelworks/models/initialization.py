"""Initial values of parameters, each element a function of (seed, parameter's full name, element index).

The rule (GPT-2, Radford et al. 2019): weights are normal with `init_std`; those whose output is added to the
residual stream (`attention.o`, `feed_forward.down`) are scaled by 1/sqrt(2 n_layers), so that the stream's variance
does not grow with depth; norm weights are 1, biases 0. Under µP a model wider than its base has smaller ones
(`modelworks.config.mup`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from modelworks.config import ModelConfig
from modelworks.config.mup import growth
from modelworks.layout import ShardSpec
from modelworks.models.random import CHUNK, Key, normal

# Elements made at a time: never a whole float64 copy of a large matrix.
_PIECE = 16 * CHUNK


def initialize(model: nn.Module, seed: int) -> None:
    """Set every parameter of a `Transformer` in place. The model must be materialised (not on the meta device)."""
    for name, parameter in model.named_parameters():
        initialize_slice(parameter, model.config, ShardSpec.whole(name, tuple(parameter.shape)), seed)  # type: ignore[arg-type]


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
    std = config.init_std * growth(config, name).init
    if name.endswith((".attention.o.weight", ".feed_forward.down.weight", ".feed_forward.experts.down.weight")):
        std /= math.sqrt(2 * config.n_layers)
    return (normal(Key.of(seed, "initialize", name), start, start + size, device=device) * std).to(dtype)


def initialize_slice(parameter: Tensor, config: ModelConfig, spec: ShardSpec, seed: int) -> None:
    """Set `parameter`, which holds the slice `spec` of a logical one, on its own device and piece by piece.

    The values are those that `initialize` gives the same elements of a whole model, bit for bit. No whole tensor is
    made; the columns of a matrix are taken from a few rows at a time.
    """
    if tuple(parameter.shape) != spec.local_shape:
        raise ValueError(f"{spec.name}: a tensor of shape {tuple(parameter.shape)} cannot hold {spec.local_shape}")

    def values(start: int, stop: int) -> Tensor:
        piece = slice(start, stop)
        return initial_values(
            config, spec.name, spec.shape, seed, piece, dtype=parameter.dtype, device=parameter.device
        )

    with torch.no_grad():
        _fill_slice(parameter, spec.shape, spec.bounds, 0, values)


def _fill_slice(
    out: Tensor,
    shape: tuple[int, ...],
    bounds: tuple[tuple[int, int], ...],
    offset: int,
    values: Callable[[int, int], Tensor],
) -> None:
    """out: the slice `bounds` of a tensor of `shape` whose first element has flat index `offset`.

    values: (start, stop) -> those elements, by flat index.
    """
    row = math.prod(shape[1:])
    start, stop = bounds[0]
    if all(bound == (0, size) for bound, size in zip(bounds[1:], shape[1:], strict=True)):
        flat, first = out.view(-1), offset + start * row
        for begin in range(0, flat.numel(), _PIECE):
            end = min(begin + _PIECE, flat.numel())
            flat[begin:end] = values(first + begin, first + end)
    elif len(shape) > 2:
        for index in range(start, stop):
            _fill_slice(out[index - start], shape[1:], bounds[1:], offset + index * row, values)
    else:
        columns, rows = slice(*bounds[1]), max(1, _PIECE // row)
        for begin in range(start, stop, rows):
            end = min(begin + rows, stop)
            whole = values(offset + begin * row, offset + end * row).view(end - begin, row)
            out[begin - start : end - start] = whole[:, columns]
