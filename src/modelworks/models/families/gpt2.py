"""GPT-2 (Radford et al. 2019) to and from Hugging Face.

Its linear weights are Conv1D, stored (in, out), and q, k, v are one tensor: both are undone by the map.
"""

from __future__ import annotations

from typing import Any

from modelworks.config import ModelConfig
from modelworks.models.families.names import NameEntry
from modelworks.models.families.published import PublishedConfig, build, expect

ARCHITECTURE = "GPT2LMHeadModel"
_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}


def from_hugging_face(published: PublishedConfig) -> ModelConfig:
    published.require("scale_attn_weights", True, default=True)
    published.require("scale_attn_by_inverse_layer_idx", False, default=False)
    published.require("add_cross_attention", False, default=False)
    published.take("reorder_and_upcast_attn", default=False)  # the same function, in another order of rounding
    dropout = published.take("resid_pdrop", default=0.1)
    published.require("embd_pdrop", dropout, default=0.1)
    activation = published.require("activation_function", *_ACTIVATIONS, default="gelu_new")
    return build(
        {
            "family": "gpt2",
            "n_layers": published.take("n_layer", "num_hidden_layers", default=12),
            "d_model": published.take("n_embd", "hidden_size", default=768),
            "n_heads": published.take("n_head", "num_attention_heads", default=12),
            "d_ff": published.take("n_inner", default=None),
            "vocab_size": published.take("vocab_size", default=50257),
            "max_seq_len": published.take("n_positions", "max_position_embeddings", default=1024),
            "feed_forward": _ACTIVATIONS[activation],
            "norm_eps": published.take("layer_norm_epsilon", default=1e-5),
            "init_std": published.take("initializer_range", default=0.02),
            "tie_embeddings": published.take("tie_word_embeddings", default=True),
            "dropout": dropout,
            "attention_dropout": published.take("attn_pdrop", default=0.1),
        }
    )


def to_hugging_face(config: ModelConfig) -> dict[str, Any]:
    expect(
        config,
        "Hugging Face's GPT-2 cannot express this model",
        norm="layernorm",
        norm_position="pre",
        positions="learned",
        feed_forward=("gelu_tanh", "gelu", "relu"),
        attention_bias=True,
        attention_output_bias=True,
        feed_forward_bias=True,
        qk_norm=False,
        sliding_window=None,
        residual=True,
        n_kv_heads=config.n_heads,
        head_dim=config.d_model // config.n_heads,
        n_experts=0,
    )
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "gpt2",
        "n_layer": config.n_layers,
        "n_embd": config.d_model,
        "n_head": config.n_heads,
        "n_inner": config.d_ff,
        "n_positions": config.max_seq_len,
        "vocab_size": config.vocab_size,
        "activation_function": {"gelu_tanh": "gelu_new"}.get(config.feed_forward, config.feed_forward),
        "layer_norm_epsilon": config.norm_eps,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
    }


def name_map(config: ModelConfig) -> list[NameEntry]:
    entries = [
        NameEntry("transformer.wte.weight", ("embedding.weight",)),
        NameEntry("transformer.wpe.weight", ("position_embedding.weight",)),
    ]
    for layer in range(config.n_layers):
        entries += _block(f"transformer.h.{layer}", f"blocks.{layer}")
    entries += [NameEntry(f"transformer.ln_f.{kind}", (f"final_norm.{kind}",)) for kind in ("weight", "bias")]
    if not config.tie_embeddings:
        entries.append(NameEntry("lm_head.weight", ("head.weight",)))
    return entries


def canonical_name(stored: str) -> str | None:
    """Files of the bare GPT2Model lack the prefix; old files hold causal masks as `attn.bias`, which are no weights."""
    name = stored if stored.startswith(("transformer.", "lm_head.")) else f"transformer.{stored}"
    return None if name.endswith((".attn.bias", ".attn.masked_bias")) else name


def _block(theirs: str, ours: str) -> list[NameEntry]:
    entries = []
    for kind in ("weight", "bias"):
        matrix = kind == "weight"
        qkv = tuple(f"{ours}.attention.{part}.{kind}" for part in "qkv")
        entries += [
            NameEntry(f"{theirs}.ln_1.{kind}", (f"{ours}.attention_norm.{kind}",)),
            NameEntry(f"{theirs}.attn.c_attn.{kind}", qkv, transposed=matrix),
            NameEntry(f"{theirs}.attn.c_proj.{kind}", (f"{ours}.attention.o.{kind}",), transposed=matrix),
            NameEntry(f"{theirs}.ln_2.{kind}", (f"{ours}.feed_forward_norm.{kind}",)),
            NameEntry(f"{theirs}.mlp.c_fc.{kind}", (f"{ours}.feed_forward.up.{kind}",), transposed=matrix),
            NameEntry(f"{theirs}.mlp.c_proj.{kind}", (f"{ours}.feed_forward.down.{kind}",), transposed=matrix),
        ]
    return entries
