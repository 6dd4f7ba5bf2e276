"""The map between our parameter names and those of Megatron-Core's GPT model, as data used in both directions.

    grouped    linear_qkv: for each group of queries, its query heads, then its key head, then its value head
    stacked    linear_fc1 of a gated feed-forward: gate above up
    padded     the vocabulary, with rows beyond the last token that no one uses

Names are those of its distributed checkpoints, the same for its local and its Transformer Engine layers: the norm
before a linear map belongs to that map.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from modelworks.config import ModelConfig, UserError

LAYERS = "decoder.layers."
Arrangement = Literal["whole", "grouped", "stacked", "padded"]


@dataclass(frozen=True)
class MegatronEntry:
    """One of their tensors and the one or several of ours that it holds.

    theirs: their name; of a layer, the name within it. ours: our names, likewise. layer: None outside of the layers.
    """

    theirs: str
    ours: tuple[str, ...]
    arrangement: Arrangement = "whole"
    layer: int | None = None

    @property
    def full_names(self) -> tuple[str, ...]:
        """Our names, the layer's included."""
        return self.ours if self.layer is None else tuple(f"blocks.{self.layer}.{name}" for name in self.ours)

    def their_shape(self, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The shape of their tensor, the padding of the vocabulary aside. shapes: of our parameters."""
        first, *rest = (shapes[name] for name in self.full_names)
        return (first[0] + sum(shape[0] for shape in rest), *first[1:])

    def to_ours(self, tensor: Tensor, config: ModelConfig) -> dict[str, Tensor]:
        """Their tensor -> ours by full name."""
        if self.arrangement == "grouped":
            parts = _ungrouped(tensor, config)
        elif self.arrangement == "stacked":
            parts = list(tensor.chunk(2))
        elif self.arrangement == "padded":
            parts = [tensor[: config.vocab_size]]
        else:
            parts = [tensor]
        return dict(zip(self.full_names, parts, strict=True))

    def to_theirs(self, tensors: Mapping[str, Tensor], config: ModelConfig, padded_vocabulary: int) -> Tensor:
        """Our tensors by full name -> theirs; the vocabulary's padding is zeros."""
        parts = [tensors[name] for name in self.full_names]
        if self.arrangement == "grouped":
            return _grouped(parts, config)
        if self.arrangement == "padded":
            rows = padded_vocabulary - config.vocab_size
            parts.append(parts[0].new_zeros(rows, *parts[0].shape[1:]))
        return torch.cat(parts)


def megatron_map(config: ModelConfig) -> list[MegatronEntry]:
    """Every parameter of the model exactly once. Raises UserError for what their GPT model has in another form."""
    _check_expressible(config)
    entries = [MegatronEntry("embedding.word_embeddings.weight", ("embedding.weight",), "padded")]
    if config.positions == "learned":
        entries.append(MegatronEntry("embedding.position_embeddings.weight", ("position_embedding.weight",)))
    for layer in range(config.n_layers):
        entries += _layer(config, layer)
    entries += [
        MegatronEntry(f"decoder.final_layernorm.{kind}", (f"final_norm.{kind}",)) for kind in _norm_kinds(config)
    ]
    if not config.tie_embeddings:
        entries.append(MegatronEntry("output_layer.weight", ("head.weight",), "padded"))
    return entries


def _layer(config: ModelConfig, layer: int) -> list[MegatronEntry]:
    entries = []
    for kind in _norm_kinds(config):
        entries += [
            MegatronEntry(f"self_attention.linear_qkv.layer_norm_{kind}", (f"attention_norm.{kind}",), "whole", layer),
            MegatronEntry(f"mlp.linear_fc1.layer_norm_{kind}", (f"feed_forward_norm.{kind}",), "whole", layer),
        ]
    if config.qk_norm:
        entries += [
            MegatronEntry(f"self_attention.{part}_layernorm.weight", (f"attention.{part}_norm.weight",), "whole", layer)
            for part in "qk"
        ]
    up = ("gate", "up") if config.gated else ("up",)
    for theirs, ours, arrangement, bias in (
        ("self_attention.linear_qkv", ("attention.q", "attention.k", "attention.v"), "grouped", config.attention_bias),
        ("self_attention.linear_proj", ("attention.o",), "whole", config.attention_output_bias),
        ("mlp.linear_fc1", up, "stacked" if config.gated else "whole", config.feed_forward_bias),
        ("mlp.linear_fc2", ("down",), "whole", config.feed_forward_bias),
    ):
        for kind in ("weight", "bias") if bias else ("weight",):
            place = "feed_forward." if theirs.startswith("mlp") else ""
            names = tuple(f"{place}{name}.{kind}" for name in ours)
            entries.append(MegatronEntry(f"{theirs}.{kind}", names, arrangement, layer))  # type: ignore[arg-type]
    return entries


def _norm_kinds(config: ModelConfig) -> tuple[str, ...]:
    return ("weight", "bias") if config.norm == "layernorm" else ("weight",)


def _ungrouped(tensor: Tensor, config: ModelConfig) -> list[Tensor]:
    """(groups · (queries + 2) · head_dim, ...) -> q, k, v."""
    groups, queries = config.n_kv_heads, config.n_heads // config.n_kv_heads
    rest = tensor.shape[1:]
    parts = torch.split(tensor.view(groups, queries + 2, config.head_dim, *rest), [queries, 1, 1], dim=1)
    return [part.reshape(-1, *rest) for part in parts]


def _grouped(parts: list[Tensor], config: ModelConfig) -> Tensor:
    """q, k, v -> the inverse of `_ungrouped`."""
    groups, rest = config.n_kv_heads, parts[0].shape[1:]
    heads = [part.view(groups, -1, config.head_dim, *rest) for part in parts]
    return torch.cat(heads, dim=1).reshape(-1, *rest)


def _check_expressible(config: ModelConfig) -> None:
    for key, wanted in {"n_experts": 0, "norm_position": "pre", "residual": True}.items():
        if getattr(config, key) != wanted:
            raise UserError(
                f"model.{key}: got {getattr(config, key)!r}; from Megatron-Core's GPT model only {wanted!r} is read"
            )
