"""A model of µP as one that computes the same without it, for formats that have no place for its multipliers.

Three multipliers act in the forward pass (`modelworks.config.mup`), and each follows a linear map whose weights can
take it: the logits' is the final norm's (so that a head tied to the embedding needs no other), that of the queries is
their projection's, or their norm's where they have one, and that of the router's scores is the router's. The others say
how a model is trained, and a trained model has no more use for them.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from modelworks.checkpoint.errors import CheckpointError
from modelworks.checkpoint.formats.source import ModelSource
from modelworks.checkpoint.lazy_tensor import LazyTensor
from modelworks.config import ModelConfig
from modelworks.config.mup import query_multiplier, width_growth


def without_mup(source: ModelSource) -> ModelSource:
    """The same function in the standard parametrisation; `source` itself where it is in that.

    Raises CheckpointError where weights narrower than float32 would be rounded by it.
    """
    config = source.config
    if config.mup_base_width is None:
        return source
    tensors = {
        name: _times(tensor, factor, source.origin, name) if (factor := _multiplier(config, name)) != 1.0 else tensor
        for name, tensor in source.tensors.items()
    }
    plain = {"mup_base_width": None, "mup_base_head_dim": None, "mup_base_kv_heads": None}
    return replace(source, config=config.model_copy(update=plain), tensors=tensors)


def _multiplier(config: ModelConfig, name: str) -> float:
    """By what the weights `name` are multiplied."""
    if name.startswith("final_norm.") or name.endswith(".router.weight"):
        return 1.0 / width_growth(config)
    scaled = (".q_norm.weight",) if config.qk_norm else (".attention.q.weight", ".attention.q.bias")
    return query_multiplier(config) if name.endswith(scaled) else 1.0


def _times(tensor: LazyTensor, factor: float, origin: str, name: str) -> LazyTensor:
    exact = math.frexp(factor)[0] == 0.5  # a power of two
    if not exact and tensor.dtype not in (torch.float32, torch.float64):
        raise CheckpointError(
            f"{origin}: {name} takes µP's factor {factor:.6g}, which {tensor.dtype} would round; export with "
            "--dtype fp32, or to modelworks, which keeps µP"
        )
    return LazyTensor(tensor.dtype, tensor.shape, lambda: tensor.load() * factor)
