"""`ModelSource`: a model wherever it lies, as a shape, tensors under our names, and a tokeniser.

The idea: each format only has to say what it holds in our terms; loading, converting and starting a run from a model
are then one piece of code each. The tensors are lazy: a source of any size costs one tensor of memory at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modelworks.checkpoint.lazy_tensor import LazyTensor
from modelworks.checkpoint.read import check_shapes
from modelworks.config import ModelConfig
from modelworks.data import Tokenizer
from modelworks.layout import ShardSpec


@dataclass(frozen=True)
class ModelSource:
    """tensors: full parameter name -> value, exactly the parameters of `config`. origin: for people, what it is.

    biases: of the routers of experts, `router_bias_shapes(config)`, which are no parameters.
    optimizer: `<parameter>/<state>` -> state that was kept beside the weights, after `updates` updates of them.
    step: optimiser steps done, where the format says so. remarks: what a user should know about what was read.
    """

    config: ModelConfig
    tensors: Mapping[str, LazyTensor]
    tokenizer: Tokenizer | None
    origin: str
    biases: Mapping[str, LazyTensor] = field(default_factory=dict)
    optimizer: Mapping[str, LazyTensor] = field(default_factory=dict)
    updates: int = 0
    step: int = 0
    remarks: tuple[str, ...] = ()

    def load_into(self, targets: Mapping[str, Tensor], shares: Mapping[str, ShardSpec] | None = None) -> None:
        """Copy into a model's parameters, strictly: raises CheckpointError naming tensors that do not match.

        shares: of each parameter, which part of it the target is; without them targets are whole.
        """
        found = {name: tensor.shape for name, tensor in self.tensors.items()}
        expected = {name: tuple(tensor.shape) for name, tensor in targets.items()}
        check_shapes(self.origin, found, expected if shares is None else {name: shares[name].shape for name in targets})
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                whole = tensor.load()
                targets[name].copy_(whole if shares is None else whole[shares[name].slices])
