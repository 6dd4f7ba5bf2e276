"""Llama (Touvron et al. 2023) and its near relatives Mistral, Qwen2 and Qwen3 to and from Hugging Face.

They share names and shapes. What differs: Mistral has a sliding window on every layer; Qwen2 has biases on q, k, v;
Qwen3 normalises each head's queries and keys and has a head size of its own. Mixtral and Qwen3-MoE are Mistral and
Qwen3 with experts; see `mixture.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelworks.config import ModelConfig, UserError
from modelworks.models.families import mixture
from modelworks.models.families.names import NameEntry
from modelworks.models.families.published import PublishedConfig, build, expect

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    **mixture.ARCHITECTURES,
}
_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu"}
# What a family computes when its config.json leaves a key out.
_DEFAULT_LENGTH = {
    "llama": 2048,
    "mistral": 131072,
    "mixtral": 131072,
    "qwen2": 32768,
    "qwen3": 32768,
    "qwen3_moe": 32768,
}
_DEFAULT_KV_HEADS = {"mistral": 8, "mixtral": 8, "qwen2": 32, "qwen3": 32, "qwen3_moe": 4}
_DEFAULT_THETA = {"mixtral": 1e6}
# Those whose `attention_bias` is an option, of q, k, v and o alike.
_OPTIONAL_BIAS = ("llama", "qwen3", "qwen3_moe")
_QK_NORM = ("qwen3", "qwen3_moe")
_FIELDS_OF_TYPE = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "truncate"),
}


def from_hugging_face(published: PublishedConfig, family: str) -> ModelConfig:
    n_layers = published.whole("num_hidden_layers")
    n_heads = published.whole("num_attention_heads")
    max_seq_len = published.whole("max_position_embeddings", default=_DEFAULT_LENGTH[family])
    theta, scaling = _read_rope(published, family, max_seq_len)
    if scaling is not None and scaling["type"] == "dynamic":
        # Their max_position_embeddings is the length before stretching; our max_seq_len is what may be reached.
        max_seq_len = int(max_seq_len * scaling["factor"])
    # Where a key is absent the family's class default holds; where it is null, the value is derived.
    kv_heads = n_heads if published.has("num_key_value_heads") else _DEFAULT_KV_HEADS.get(family, n_heads)
    if family in _OPTIONAL_BIAS:
        bias = output_bias = published.take("attention_bias", default=False)
    else:
        bias, output_bias = family == "qwen2", False
    activation = published.require("hidden_act", *_ACTIVATIONS, default="silu")
    d_ff = published.take("intermediate_size")
    experts = mixture.read(published, family, n_layers, d_ff) if family in mixture.ARCHITECTURES else {}
    return build(
        {
            "family": family,
            "n_layers": n_layers,
            "d_model": published.take("hidden_size"),
            "n_heads": n_heads,
            "n_kv_heads": published.take("num_key_value_heads", default=kv_heads),
            "head_dim": published.take("head_dim", default=128 if family == "qwen3" else None),
            "d_ff": d_ff,
            "vocab_size": published.take("vocab_size"),
            "max_seq_len": max_seq_len,
            "tie_embeddings": published.take("tie_word_embeddings", default=False),
            "feed_forward": _ACTIVATIONS[activation],
            "norm_eps": published.take("rms_norm_eps", default=1e-6),
            "rope_theta": theta,
            "rope_scaling": scaling,
            "attention_bias": bias,
            "attention_output_bias": output_bias,
            "feed_forward_bias": published.take("mlp_bias", default=False) if family == "llama" else False,
            "qk_norm": family in _QK_NORM,
            "sliding_window": _read_window(published, family, n_layers),
            "attention_dropout": published.take("attention_dropout", default=0.0),
            "dropout": published.take("dropout", default=0.0),
            "init_std": published.take("initializer_range", default=0.02),
            **experts,
        }
    )


def to_hugging_face(config: ModelConfig) -> dict[str, Any]:
    family = config.family
    expect(
        config,
        f"Hugging Face's {ARCHITECTURES[family]} cannot express this model",
        norm="rmsnorm",
        norm_position="pre",
        positions="rope",
        feed_forward=("swiglu", "geglu"),
        residual=True,
        qk_norm=family in _QK_NORM,
        attention_bias=(True, False) if family in _OPTIONAL_BIAS else family == "qwen2",
        attention_output_bias=config.attention_bias if family in _OPTIONAL_BIAS else False,
        feed_forward_bias=(True, False) if family == "llama" else False,
        sliding_window=None if family == "llama" else config.sliding_window,
        n_experts=config.n_experts if family in mixture.ARCHITECTURES else 0,
    )
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "num_hidden_layers": config.n_layers,
        "hidden_size": config.d_model,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.d_ff,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu" if config.feed_forward == "swiglu" else "gelu",
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "attention_dropout": config.attention_dropout,
        **_write_rope(config),
        **_write_window(config),
    }
    if family in mixture.ARCHITECTURES:
        values |= mixture.write(config)
    if family in _OPTIONAL_BIAS:
        values["attention_bias"] = config.attention_bias
    if family == "llama":
        values["mlp_bias"] = config.feed_forward_bias
    if config.dropout:
        values["dropout"] = config.dropout  # not a key of theirs: kept so that the model comes back as it was
    return values


def name_map(config: ModelConfig, *, stacked_experts: bool = False) -> list[NameEntry]:
    entries = [NameEntry("model.embed_tokens.weight", ("embedding.weight",))]
    for layer in range(config.n_layers):
        theirs, ours = f"model.layers.{layer}", f"blocks.{layer}"
        entries += _block(config, theirs, ours, dense=not config.has_experts(layer))
        if config.has_experts(layer):
            entries += mixture.entries(config, theirs, ours, stacked=stacked_experts)
    entries.append(NameEntry("model.norm.weight", ("final_norm.weight",)))
    if not config.tie_embeddings:
        entries.append(NameEntry("lm_head.weight", ("head.weight",)))
    return entries


def canonical_name(stored: str) -> str | None:
    """Files of the bare model lack the prefix; old files hold rotary frequencies, which the config implies."""
    name = stored if stored.startswith(("model.", "lm_head.")) else f"model.{stored}"
    return None if name.endswith(".rotary_emb.inv_freq") else name


def _block(config: ModelConfig, theirs: str, ours: str, *, dense: bool) -> list[NameEntry]:
    bias, output_bias, mlp_bias = config.attention_bias, config.attention_output_bias, config.feed_forward_bias
    pairs = [("input_layernorm.weight", "attention_norm.weight")]
    for part, has_bias in (("q", bias), ("k", bias), ("v", bias), ("o", output_bias)):
        pairs += _linear(f"self_attn.{part}_proj", f"attention.{part}", has_bias)
    if config.qk_norm:
        pairs += [(f"self_attn.{part}_norm.weight", f"attention.{part}_norm.weight") for part in "qk"]
    pairs.append(("post_attention_layernorm.weight", "feed_forward_norm.weight"))
    for part in ("gate", "up", "down") if dense else ():
        pairs += _linear(f"mlp.{part}_proj", f"feed_forward.{part}", mlp_bias)
    return [NameEntry(f"{theirs}.{their_name}", (f"{ours}.{our_name}",)) for their_name, our_name in pairs]


def _linear(theirs: str, ours: str, bias: bool) -> list[tuple[str, str]]:
    return [(f"{theirs}.{kind}", f"{ours}.{kind}") for kind in (("weight", "bias") if bias else ("weight",))]


def _read_window(published: PublishedConfig, family: str, n_layers: int) -> int | None:
    """The sliding window of all layers. A window on some layers only is refused."""
    types = set(published.take("layer_types", default=[]))
    if len(types) > 1:
        raise UserError(
            f"config.json: `layer_types` of {published.architecture} mixes {sorted(types)}; only one kind is supported"
        )
    absent = None if family in ("llama", "mixtral") or published.has("sliding_window") else 4096
    window = published.take("sliding_window", default=absent)
    if family == "qwen3_moe":  # `max_window_layers` plays no part in it
        return window if published.take("use_sliding_window", default=False) else None
    if family == "llama" and window is not None:
        raise UserError(f"config.json: `sliding_window: {window}` has no meaning for {published.architecture}")
    if family in ("qwen2", "qwen3"):
        used = published.take("use_sliding_window", default=False)
        first = published.whole("max_window_layers", default=28)
        if not used or types == {"full_attention"} or (not types and first >= n_layers):
            return None
        if not types and first > 0:
            raise UserError(
                f"config.json: `max_window_layers: {first}` gives {published.architecture} a sliding window on some of "
                f"its {n_layers} layers only; supported: 0 (all layers), or `use_sliding_window: false`"
            )
    return window  # type: ignore[no-any-return]


def _write_window(config: ModelConfig) -> dict[str, Any]:
    if config.family == "llama":
        return {}
    if config.family in ("mistral", "mixtral"):
        return {"sliding_window": config.sliding_window}
    if config.sliding_window is None:
        return {"use_sliding_window": False, "sliding_window": None}
    if config.family == "qwen3_moe":
        return {"use_sliding_window": True, "sliding_window": config.sliding_window}
    return {
        "use_sliding_window": True,
        "sliding_window": config.sliding_window,
        "max_window_layers": 0,
        "layer_types": ["sliding_attention"] * config.n_layers,
    }


def _read_rope(published: PublishedConfig, family: str, max_seq_len: int) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    theta = published.take("rope_theta", default=_DEFAULT_THETA.get(family, 10_000.0))
    published.require("partial_rotary_factor", 1.0, default=1.0)
    older: Mapping[str, Any] = published.take("rope_scaling", default={})
    newer: Mapping[str, Any] = published.take("rope_parameters", default={})
    values = {key: value for key, value in {**older, **newer}.items() if value is not None}
    theta = values.pop("rope_theta", theta)
    names = {values.pop("rope_type", None), values.pop("type", None)} - {None}
    kind = names.pop() if names else "default"
    if values.pop("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"config.json: a partial rotary factor ({published.architecture}) is not supported")
    if kind == "default" and not values:
        return theta, None
    if kind not in _FIELDS_OF_TYPE or names:
        raise UserError(
            f"config.json: rope scaling {kind!r} of {published.architecture} is not supported; "
            f"supported: {', '.join(_FIELDS_OF_TYPE)}"
        )
    original = values.pop("original_max_position_embeddings", max_seq_len)
    if kind == "dynamic":
        original = max_seq_len  # transformers reads no other
    if not isinstance(values.get("factor"), (int, float)) or values["factor"] < 1:
        raise UserError(
            f"config.json: rope scaling {kind!r} has factor {values.get('factor')!r}, expected a number >= 1"
        )
    unknown = set(values) - set(_FIELDS_OF_TYPE[kind])
    if unknown:
        raise UserError(f"config.json: rope scaling {kind!r} has unsupported keys: {', '.join(sorted(unknown))}")
    if kind != "linear":
        values["original_max_seq_len"] = original
    return theta, {"type": kind, **values}


def _write_rope(config: ModelConfig) -> dict[str, Any]:
    """Both layouts: `rope_parameters` for transformers 5, `rope_theta` and `rope_scaling` for older readers."""
    scaling = config.rope_scaling
    if scaling is None:
        parameters = {"rope_type": "default", "rope_theta": config.rope_theta}
        return {"rope_parameters": parameters, "rope_theta": config.rope_theta}
    parameters = {"rope_type": scaling.type, "rope_theta": config.rope_theta}
    for name in _FIELDS_OF_TYPE[scaling.type]:
        if getattr(scaling, name) is not None:
            parameters[name] = getattr(scaling, name)
    original = scaling.original_max_seq_len or config.max_seq_len
    lengths: dict[str, Any] = {}
    if scaling.type == "dynamic":
        if int(original * scaling.factor) != config.max_seq_len:
            raise UserError(
                f"model.max_seq_len: got {config.max_seq_len}; Hugging Face's dynamic scaling reaches exactly "
                f"original_max_seq_len x factor = {int(original * scaling.factor)}"
            )
        lengths["max_position_embeddings"] = original
    elif scaling.type != "linear":
        parameters["original_max_position_embeddings"] = original
    older = {key: value for key, value in parameters.items() if key != "rope_theta"}
    return {"rope_parameters": parameters, "rope_theta": config.rope_theta, "rope_scaling": older, **lengths}
