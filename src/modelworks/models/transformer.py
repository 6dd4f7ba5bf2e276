"""The decoder-only transformer that every family is a setting of (Vaswani et al. 2017; Radford et al. 2019).

    tokens -> embedding (+ learned positions) -> blocks -> final norm -> hidden -> head -> logits
    block:   pre   x + attention(norm(x));  x + feed_forward(norm(x))
             post  norm(x + attention(x));  norm(x + feed_forward(x))

One module serves training and generation: what differs is the attention context passed in. It is single-device and
never communicates. Weights are left unset on construction; `initialize` or a checkpoint fills them.

A `Part` is some of the layers, with the embedding if it is the first part and the final norm and head if it is the
last. Names do not depend on the part: layer 5 is `blocks.5` wherever it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modelworks.config import ModelConfig
from modelworks.config.mup import width_growth
from modelworks.models.context import AttentionContext
from modelworks.models.dropout import EMBEDDING_LAYER, dropout
from modelworks.models.layers.attention import Attention, Rotation
from modelworks.models.layers.embedding import Embedding
from modelworks.models.layers.experts import MixtureOfExperts
from modelworks.models.layers.feed_forward import FeedForward
from modelworks.models.layers.norms import build_norm
from modelworks.models.layers.packed import Linear, pack_storage
from modelworks.models.layers.rotary import RotaryPositions
from modelworks.models.recompute import Recompute, run_block
from modelworks.models.weights import Product


@dataclass(frozen=True)
class Part:
    """The layers that a part of a model holds, and whether it holds the model's ends."""

    layers: tuple[int, ...]
    first: bool
    last: bool

    @classmethod
    def whole(cls, config: ModelConfig) -> Part:
        return cls(tuple(range(config.n_layers)), first=True, last=True)


class Transformer(nn.Module):
    """A language model of the shape `config`, or one part of it. Built under any default dtype and device, `meta`
    included. With tied embeddings the last part holds the embedding's weight too: it is its head."""

    def __init__(self, config: ModelConfig, part: Part | None = None) -> None:
        super().__init__()
        part = part or Part.whole(config)
        self.config, self.part = config, part
        self.recompute: Recompute = "none"
        self.offload_activations = False
        # Here and not in the head, which may be the embedding: whoever makes logits of hidden states gets it right.
        self.output_multiplier = 1.0 / width_growth(config)
        # Shown each layer's output, outside what is compiled and recomputed.
        self.after_block: Callable[[int, Tensor], None] | None = None
        tied_head = part.last and config.tie_embeddings
        self.embedding = Embedding(config.vocab_size, config.d_model) if part.first or tied_head else None
        learned = part.first and config.positions == "learned"
        self.position_embedding = Embedding(config.max_seq_len, config.d_model) if learned else None
        self.rotary = RotaryPositions(config) if config.positions == "rope" else None
        self.blocks = nn.ModuleDict({str(layer): Block(config, layer) for layer in part.layers})
        self.final_norm = build_norm(config) if part.last else None
        untied_head = part.last and not config.tie_embeddings
        self.head = Linear(config.d_model, config.vocab_size, bias=False) if untied_head else None
        self.head_product: Product | None = None  # of a `prepared` model

    def forward(self, tokens: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Hidden states after the final norm, (rows, length, d_model); under µP divided by the growth of the width.

        tokens, positions: int64 (rows, length); a position counts from the start of the token's own document.
        context: which tokens see which; see `modelworks.models.context`.
        A part that is not the first takes the hidden states of the part before it in place of `tokens`; one that is
        not the last returns the residual stream, before the final norm.
        """
        x = self._embed(tokens, positions, context) if self.part.first else tokens
        dtype = _product_dtype(x)
        rotation = self.rotary(positions, dtype) if self.rotary is not None else None
        context.prepare(positions.shape[1], self.config.sliding_window, dtype, x.device)
        for layer, block in self.blocks.items():
            x = run_block(block, self.recompute, self.offload_activations, x, rotation, context)
            if self.after_block is not None:
                self.after_block(int(layer), x)
        if self.final_norm is not None:
            x = self.final_norm(x)
            x = x if self.output_multiplier == 1.0 else x * self.output_multiplier
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., d_model) -> (..., vocab_size), in the dtype of `hidden`."""
        if self.head_product is not None:
            return self.head_product(hidden)
        return F.linear(hidden, self.head_weight())

    def head_weight(self) -> Tensor:
        """The output projection (vocab_size, d_model): the embedding's own weight where they are tied."""
        owner = self.embedding if self.head is None else self.head
        if not self.part.last or owner is None:
            raise ValueError(f"layers {self.part.layers} are not the last part of the model and hold no head")
        return owner.weight

    def set_recompute(self, recompute: Recompute, *, offload_activations: bool = False) -> None:
        """What blocks keep for the backward pass: everything, products only (`selective`), or their input (`full`).

        offload_activations: it waits in host memory. Not for `selective`.
        """
        if offload_activations and recompute == "selective":
            raise ValueError("selective recomputation keeps results of products on the device")
        self.recompute, self.offload_activations = recompute, offload_activations

    def pack_storage(self) -> None:
        """Lay fused weights back to back, so that inference never copies them. Do it after moving or casting."""
        for layers in self.linear_groups():
            if len(layers) > 1:
                pack_storage(layers)

    def linear_groups(self) -> Iterator[tuple[Linear, ...]]:
        """The blocks' linear maps, those of the same input together; of experts none."""
        for block in self.blocks.values():
            attention, feed_forward = block.attention, block.feed_forward
            yield attention.q, attention.k, attention.v  # type: ignore[union-attr, misc]
            yield (attention.o,)  # type: ignore[union-attr, misc]
            if isinstance(feed_forward, FeedForward):
                gated = feed_forward.gate is not None
                yield (feed_forward.gate, feed_forward.up) if gated else (feed_forward.up,)  # type: ignore[misc]
                yield (feed_forward.down,)

    def _embed(self, tokens: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        assert self.embedding is not None
        x = self.embedding(tokens)
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions)
        if self.training:
            x = dropout(x, self.config.dropout, context.dropout, EMBEDDING_LAYER, "embedding")
        return x  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then feed-forward (one, or a mixture of experts), each with its norm and (unless switched off) its
    residual connection."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.pre_norm = config.norm_position == "pre"
        self.residual = config.residual
        self.dropout = config.dropout
        self.attention_norm = build_norm(config)
        self.attention = Attention(config, layer)
        self.feed_forward_norm = build_norm(config)
        self.has_experts = config.has_experts(layer)
        self.feed_forward = MixtureOfExperts(config, layer) if self.has_experts else FeedForward(config)

    def forward(self, x: Tensor, rotation: Rotation | None, context: AttentionContext) -> Tensor:
        inner = self.attention_norm(x) if self.pre_norm else x
        x = self._join(x, self.attention(inner, rotation, context), context, "attention")
        x = x if self.pre_norm else self.attention_norm(x)
        inner = self.feed_forward_norm(x) if self.pre_norm else x
        change = self.feed_forward(inner, context) if self.has_experts else self.feed_forward(inner)
        x = self._join(x, change, context, "feed_forward")
        return x if self.pre_norm else self.feed_forward_norm(x)

    def _join(self, x: Tensor, change: Tensor, context: AttentionContext, site: str) -> Tensor:
        if self.training:
            change = dropout(change, self.dropout, context.dropout, self.layer, site)
        return x + change if self.residual else change


def _product_dtype(x: Tensor) -> torch.dtype:
    """The dtype that matrix products of `x` come out in, which autocast may lower."""
    device = x.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)  # meta has none
    return torch.get_autocast_dtype(device) if autocast else x.dtype
