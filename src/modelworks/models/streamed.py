"""The logits of a model that is never whole in memory: each weight is loaded when it is used, then let go.

It is the ordinary model, one layer at a time, whose linear maps hold a name in place of a weight. The invariant: one
weight is held at a time, as it is stored, and a slice of it (`_SLICE_BYTES`) in float32, in which products are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modelworks.config import ModelConfig
from modelworks.models.balancing import load_routing_state
from modelworks.models.context import CausalContext
from modelworks.models.layers.embedding import Embedding
from modelworks.models.layers.experts import Stacked
from modelworks.models.layers.packed import Linear
from modelworks.models.transformer import Part, Transformer

Load = Callable[[str], Tensor]  # full parameter name -> its value on the CPU, of any floating-point dtype

_SLICE_BYTES = 64 << 20


@torch.inference_mode()
def streamed_logits(config: ModelConfig, load: Load, tokens: Tensor, biases: Mapping[str, Tensor]) -> Tensor:
    """Logits of `tokens`, float32 (rows, length, vocab_size).

    tokens: int64 (rows, length). biases: of the routers of experts, by full name; empty where the model has none.
    """
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    x = F.embedding(tokens, load("embedding.weight")).float()
    if config.positions == "learned":
        x = x + F.embedding(positions, load("position_embedding.weight")).float()
    for layer in range(config.n_layers):
        part = _part(config, Part((layer,), first=False, last=False), load)
        load_routing_state(part, biases)
        x = part(x, positions, CausalContext())
    x = _part(config, Part((), first=False, last=True), load)(x, positions, CausalContext())
    return _product(x, load("embedding.weight" if config.tie_embeddings else "head.weight"))


class StreamedLinear(Linear):
    """A linear map that loads its weight when it is called."""

    apart = True

    def __init__(self, linear: Linear, name: str, load: Load) -> None:
        super().__init__(linear.weight.shape[1], linear.weight.shape[0], linear.bias is not None)
        self.name, self.load = name, load

    def forward(self, x: Tensor) -> Tensor:
        y = _product(x, self.load(f"{self.name}.weight"))
        return y if self.bias is None else y + self.load(f"{self.name}.bias").to(x.dtype)


class StreamedStacked(nn.Module):
    """The linear maps of a layer's experts, loaded when they are called."""

    def __init__(self, name: str, load: Load) -> None:
        super().__init__()
        self.name, self.load = name, load

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        weight_Eoi = self.load(f"{self.name}.weight")
        out = rows.new_zeros(rows.shape[0], weight_Eoi.shape[1])
        start = 0
        for expert, count in enumerate(counts.tolist()):
            if count:
                out[start : start + count] = _product(rows[start : start + count], weight_Eoi[expert])
            start += count
        return out


def _part(config: ModelConfig, part: Part, load: Load) -> Transformer:
    """The part, whose small weights (norms, routers) are there and whose large ones come when they are used."""
    with torch.device("meta"):
        model = Transformer(config, part)
        for name, module in list(model.named_modules()):
            parent, _, child = name.rpartition(".")
            if isinstance(module, Linear):
                setattr(model.get_submodule(parent), child, StreamedLinear(module, name, load))
            elif isinstance(module, Stacked):
                setattr(model.get_submodule(parent), child, StreamedStacked(name, load))
    for name, module in model.named_modules():
        if not isinstance(module, StreamedLinear | Embedding):  # an embedding is here only as a tied head
            for own, _ in list(module.named_parameters(recurse=False)):
                setattr(module, own, nn.Parameter(load(f"{name}.{own}").float(), requires_grad=False))
    return model.eval()


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T. x: (..., d_in) float32. weight: (d_out, d_in) of any dtype."""
    rows = max(1, _SLICE_BYTES // (x.element_size() * weight.shape[1]))
    return torch.cat([F.linear(x, part.to(x.dtype)) for part in torch.split(weight, rows)], dim=-1)
