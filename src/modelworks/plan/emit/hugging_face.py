"""A model as Hugging Face's `config.json`, for the targets that train transformers' own classes.

The same map, with the weights' names, is `modelworks.models.families`; this one needs no torch, and a test holds the
two to each other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from modelworks.config import RopeScaling
from modelworks.plan.emit.settings import Wanted

FILE = "model/config.json"
_COMMON = {
    "num_hidden_layers": "n_layers",
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_seq_len",
    "tie_word_embeddings": "tie_embeddings",
    "rms_norm_eps": "norm_eps",
    "initializer_range": "init_std",
    "attention_dropout": "attention_dropout",
}
_GPT2 = {
    "n_layer": "n_layers",
    "n_embd": "d_model",
    "n_head": "n_heads",
    "n_inner": "d_ff",
    "n_positions": "max_seq_len",
    "vocab_size": "vocab_size",
    "layer_norm_epsilon": "norm_eps",
    "initializer_range": "init_std",
    "tie_word_embeddings": "tie_embeddings",
    "resid_pdrop": "dropout",
    "attn_pdrop": "attention_dropout",
}
_ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}
_EXPERTS = {"num_experts_per_tok": "experts_per_token", "router_aux_loss_coef": "router_aux_loss"}
_BIASES = ("attention_bias", "attention_output_bias", "feed_forward_bias")


def model_refusals(wanted: Wanted) -> list[str]:
    """Why no class of transformers is this model; empty where one is."""
    if wanted["model.positions"] == "learned":
        return _gpt2_refusals(wanted)
    expected = {"norm": "rmsnorm", "positions": "rope", "norm_position": "pre", "residual": True, "dropout": 0.0}
    expected |= {"attention_output_bias": False, "feed_forward_bias": False}
    reasons = _differences(wanted, expected)
    if wanted["model.feed_forward"] not in ("swiglu", "geglu"):
        reasons.append("model.feed_forward: its decoders with rotary positions have swiglu or geglu")
    if family(wanted) is None:
        reasons.append(
            "model: no class of transformers has this mixture of qk_norm, attention_bias, sliding_window and experts"
        )
    if wanted["model.n_experts"]:
        reasons += _differences(
            wanted, {"router_bias": False, "router_z_loss": 0.0, "expert_capacity": None}, "of its experts"
        )
    scaling = wanted.get("model.rope_scaling")
    if scaling and scaling["type"] not in ("linear", "llama3"):
        reasons.append(f"model.rope_scaling: linear and llama3 are written, got {scaling['type']}")
    return reasons


def family(wanted: Wanted) -> str | None:
    """The family of transformers whose class is this model; by its shape, whatever its config calls it."""
    norms, bias, window = wanted["model.qk_norm"], wanted["model.attention_bias"], wanted["model.sliding_window"]
    if wanted["model.n_experts"]:
        if norms:
            return None if bias or window else "qwen3_moe"
        plain = wanted["model.router_normalize"] and not wanted["model.dense_layers"]
        return "mixtral" if plain and not bias else None
    if norms:
        return None if bias or window else "qwen3"
    if bias:
        return None if window else "qwen2"
    return "mistral" if window else "llama"


def model_json(wanted: Wanted) -> str:
    return json.dumps(model_config(wanted), indent=2) + "\n"


def model_config(wanted: Wanted) -> dict[str, Any]:
    """The keys of `config.json`."""
    if wanted["model.positions"] == "learned":
        values = {theirs: wanted[f"model.{ours}"] for theirs, ours in _GPT2.items()}
        activation = _ACTIVATIONS[wanted["model.feed_forward"]]
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            **values,
            "embd_pdrop": wanted["model.dropout"],
            "activation_function": activation,
        }
    kind = family(wanted) or ""
    values = {theirs: wanted[f"model.{ours}"] for theirs, ours in _COMMON.items()}
    values |= {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "hidden_act": "silu" if wanted["model.feed_forward"] == "swiglu" else "gelu",
        "intermediate_size": wanted.get("model.d_ff", wanted.get("model.d_expert")),
        "rope_parameters": _rope(wanted),
    }
    if kind in ("mistral", "mixtral"):
        values["sliding_window"] = wanted["model.sliding_window"]
    if wanted["model.n_experts"]:
        values |= {theirs: wanted[f"model.{ours}"] for theirs, ours in _EXPERTS.items()}
        values["num_local_experts"] = wanted["model.n_experts"]
        values["output_router_logits"] = bool(wanted["model.router_aux_loss"])
    if kind == "qwen3_moe":
        values |= {
            "num_experts": wanted["model.n_experts"],
            "moe_intermediate_size": wanted["model.d_expert"],
            "norm_topk_prob": wanted["model.router_normalize"],
            "decoder_sparse_step": 1,
            "mlp_only_layers": wanted["model.dense_layers"],
        }
    return values


def read_model(directory: Path) -> dict[str, Any]:
    """Our keys of the model that `config.json` describes, one that `model_json` wrote."""
    found = json.loads((directory / FILE).read_text(encoding="utf-8"))
    if found["model_type"] == "gpt2":
        values = {f"model.{ours}": found[theirs] for theirs, ours in _GPT2.items()}
        kind = {theirs: ours for ours, theirs in _ACTIVATIONS.items()}[found["activation_function"]]
        heads, width = found["n_head"], found["n_embd"]
        values |= {"model.norm": "layernorm", "model.positions": "learned", "model.feed_forward": kind}
        values |= {"model.n_kv_heads": heads, "model.head_dim": width // heads}
        return values | {f"model.{key}": True for key in _BIASES}
    kind = found["model_type"]
    values = {f"model.{ours}": found[theirs] for theirs, ours in _COMMON.items()}
    rope = found["rope_parameters"]
    values |= {
        "model.norm": "rmsnorm",
        "model.positions": "rope",
        "model.feed_forward": "swiglu" if found["hidden_act"] == "silu" else "geglu",
        "model.d_ff": found["intermediate_size"],
        "model.attention_bias": kind == "qwen2",
        "model.qk_norm": kind in ("qwen3", "qwen3_moe"),
        "model.sliding_window": found.get("sliding_window"),
        "model.rope_theta": rope["rope_theta"],
        "model.rope_scaling": _read_scaling(rope),
    }
    if "num_local_experts" in found:
        values |= {f"model.{ours}": found[theirs] for theirs, ours in _EXPERTS.items()}
        values["model.n_experts"] = found["num_local_experts"]
        values["model.d_expert"] = found.get("moe_intermediate_size", found["intermediate_size"])
        values["model.router_normalize"] = found.get("norm_topk_prob", True)
        values["model.dense_layers"] = found.get("mlp_only_layers", [])
    return values


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def _gpt2_refusals(wanted: Wanted) -> list[str]:
    expected = {"norm": "layernorm", "norm_position": "pre", "residual": True, "qk_norm": False, "sliding_window": None}
    expected |= {"n_experts": 0, "n_kv_heads": wanted["model.n_heads"], **dict.fromkeys(_BIASES, True)}
    expected["head_dim"] = wanted["model.d_model"] // wanted["model.n_heads"]
    reasons = _differences(wanted, expected, "with learned positions")
    if wanted["model.feed_forward"] not in _ACTIVATIONS:
        reasons.append(f"model.feed_forward: with learned positions it has {', '.join(_ACTIVATIONS)}")
    return reasons


def _differences(wanted: Wanted, expected: dict[str, Any], where: str = "with rotary positions") -> list[str]:
    return [
        f"model.{key}: transformers has {value} only {where}, got {wanted[f'model.{key}']}"
        for key, value in expected.items()
        if wanted[f"model.{key}"] != value
    ]


def _rope(wanted: Wanted) -> dict[str, Any]:
    scaling = wanted["model.rope_scaling"]
    if scaling is None:
        return {"rope_type": "default", "rope_theta": wanted["model.rope_theta"]}
    values = {"rope_type": scaling["type"], "rope_theta": wanted["model.rope_theta"], "factor": scaling["factor"]}
    if scaling["type"] == "llama3":
        values |= {key: scaling[key] for key in ("low_freq_factor", "high_freq_factor")}
    if scaling["original_max_seq_len"] is not None:
        values["original_max_position_embeddings"] = scaling["original_max_seq_len"]
    return values


def _read_scaling(rope: dict[str, Any]) -> dict[str, Any] | None:
    if rope["rope_type"] == "default":
        return None
    values: dict[str, Any] = {
        key: rope[key] for key in ("factor", "low_freq_factor", "high_freq_factor") if key in rope
    }
    values["original_max_seq_len"] = rope.get("original_max_position_embeddings")
    return RopeScaling(type=rope["rope_type"], **values).model_dump(mode="json")
