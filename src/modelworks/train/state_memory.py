"""Bytes of optimiser state, predicted: those of the optimiser itself, made of tensors that have shapes and no data."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from modelworks.config import ModelConfig, OptimizerConfig, parameter_shapes
from modelworks.layout import ShardSpec, whole_tensors
from modelworks.optim import Split, build_optimizer

_STORED = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}  # by bytes of an element


def state_bytes(
    optimizer: OptimizerConfig,
    model: ModelConfig,
    specs: Mapping[str, ShardSpec] | None = None,
    *,
    itemsize: int,
    offloaded: bool,
) -> dict[str, int]:
    """By parameter, master copies included.

    specs: what is held of each; None for everything. itemsize: bytes of a stored parameter's element. offloaded: state
    lies elsewhere than the parameters, so that each has a master copy.
    """
    shapes = parameter_shapes(model)
    specs = whole_tensors(shapes) if specs is None else specs
    made = build_optimizer(
        [
            (name, _nothing(name, torch.Size(spec.local_shape), _STORED[itemsize]).requires_grad_())
            for name, spec in specs.items()
        ],
        optimizer,
        split=Split(specs, shapes),
        allocate=_nothing if offloaded else None,
    )
    found = dict.fromkeys(specs, 0)
    for full, tensor in made.named_state():
        found[full.rpartition("/")[0]] += tensor.nbytes
    return found


def _nothing(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
