"""What transformers makes of an emitted model: `python transformers_sees.py DIRECTORY WORLD ...`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from telling import tell_each
from transformers import AutoConfig, AutoModelForCausalLM


def model_seen(directory: str) -> dict[str, Any]:
    """Our keys of the model, as transformers' own class for it has them. Built without memory."""
    config = AutoConfig.from_pretrained(Path(directory) / "model")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    seen = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "model.n_layers": config.num_hidden_layers,
        "model.d_model": config.hidden_size,
        "model.n_heads": config.num_attention_heads,
        "model.vocab_size": config.vocab_size,
        "model.max_seq_len": config.max_position_embeddings,
        "model.tie_embeddings": config.tie_word_embeddings,
        "model.init_std": config.initializer_range,
    }
    if config.model_type == "gpt2":
        return seen | {"model.norm_eps": config.layer_norm_epsilon, "model.dropout": config.resid_pdrop}
    rope = config.rope_parameters
    seen |= {
        "model.n_kv_heads": config.num_key_value_heads,
        "model.norm_eps": config.rms_norm_eps,
        "model.rope_theta": rope["rope_theta"],
        "model.attention_dropout": config.attention_dropout,
    }
    if hasattr(config, "num_local_experts"):
        seen |= {"model.n_experts": config.num_local_experts, "model.experts_per_token": config.num_experts_per_tok}
    else:
        seen["model.d_ff"] = config.intermediate_size
    return seen


if __name__ == "__main__":
    tell_each(lambda directory, _: model_seen(directory))
