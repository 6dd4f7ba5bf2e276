"""What Mixtral (Jiang et al. 2024, 2401.04088) and Qwen3-MoE (2505.09388) add to Llama's and Qwen3's shape.

Files hold each expert's matrices as tensors of their own (`stacked` false), which is what we write and what every
reader knows. transformers computes with one tensor for all experts, gate above up, and can be told to write that:

    ours   experts.gate (E, width, d)   experts.up (E, width, d)   experts.down (E, d, width)
    file   E x gate, E x up, E x down                or   gate_up (E, 2 width, d) and down (E, d, width)
"""

from __future__ import annotations

from typing import Any

from modelworks.config import ModelConfig, UserError
from modelworks.models.families.names import NameEntry
from modelworks.models.families.published import PublishedConfig, expect

ARCHITECTURES = {"mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
# Where a family keeps its router and experts in a file, and what it calls an expert's matrices.
_FILE = {"mixtral": "block_sparse_moe", "qwen3_moe": "mlp"}
_MATRICES = {
    "mixtral": {"gate": "w1", "up": "w3", "down": "w2"},
    "qwen3_moe": {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
}
# Of training alone and no keys of theirs: kept, so that a model comes back as it was.
_OURS_ALONE = {"expert_capacity": None, "router_z_loss": 0.0}


def read(published: PublishedConfig, family: str, n_layers: int, d_ff: int) -> dict[str, Any]:
    """Our keys of the experts. d_ff: `intermediate_size`, which is Mixtral's experts' width."""
    values = {key: published.take(key, default=default) for key, default in _OURS_ALONE.items()}
    values["router_aux_loss"] = published.take("router_aux_loss_coef", default=0.001)
    if family == "mixtral":
        published.require("router_jitter_noise", 0.0, default=0.0)
        return values | {
            "n_experts": published.whole("num_local_experts", "num_experts", default=8),
            "experts_per_token": published.whole("num_experts_per_tok", default=2),
            "d_expert": d_ff,
        }
    dense_layers = _read_dense_layers(published, n_layers)
    d_expert = published.take("moe_intermediate_size", default=768)
    return values | {
        "n_experts": published.whole("num_experts", "num_local_experts", default=128),
        "experts_per_token": published.whole("num_experts_per_tok", default=8),
        "router_normalize": published.take("norm_topk_prob", default=False),
        "dense_layers": dense_layers,
        "d_expert": d_expert,
        "d_ff": d_ff if dense_layers else d_expert,  # theirs is then not used
    }


def write(config: ModelConfig) -> dict[str, Any]:
    """Their keys of the experts. Raises ConfigError for what their architecture cannot express."""
    mixtral = config.family == "mixtral"
    expect(
        config,
        f"Hugging Face's {ARCHITECTURES[config.family]} cannot express this model",
        router_bias=False,
        router_normalize=True if mixtral else (True, False),
        dense_layers=[] if mixtral else config.dense_layers,
        n_experts=config.n_experts or "a number above 0",
    )
    values: dict[str, Any] = {
        "num_experts_per_tok": config.experts_per_token,
        "router_aux_loss_coef": config.router_aux_loss,
        "num_local_experts": config.n_experts,
    }
    if not mixtral:
        values |= {
            "num_experts": config.n_experts,
            "moe_intermediate_size": config.d_expert,
            "norm_topk_prob": config.router_normalize,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(config.dense_layers),
        }
    return values | {
        key: getattr(config, key) for key, default in _OURS_ALONE.items() if getattr(config, key) != default
    }


def entries(config: ModelConfig, theirs: str, ours: str, *, stacked: bool) -> list[NameEntry]:
    """The feed-forward of one layer with experts. theirs, ours: the names of the layer."""
    ours = f"{ours}.feed_forward"
    of = {kind: f"{ours}.experts.{kind}.weight" for kind in ("gate", "up", "down")}
    if stacked:
        return [
            NameEntry(f"{theirs}.mlp.gate.weight", (f"{ours}.router.weight",)),
            NameEntry(f"{theirs}.mlp.experts.gate_up_proj", (of["gate"], of["up"]), dimension=1),
            NameEntry(f"{theirs}.mlp.experts.down_proj", (of["down"],)),
        ]
    place = f"{theirs}.{_FILE[config.family]}"
    found = [NameEntry(f"{place}.gate.weight", (f"{ours}.router.weight",))]
    for kind, matrix in _MATRICES[config.family].items():
        found += [
            NameEntry(f"{place}.experts.{expert}.{matrix}.weight", (of[kind],), expert=expert)
            for expert in range(config.n_experts)
        ]
    return found


def _read_dense_layers(published: PublishedConfig, n_layers: int) -> list[int]:
    """Layers with one feed-forward: those listed, and all but every `decoder_sparse_step`-th."""
    step = published.whole("decoder_sparse_step", default=1)
    listed = published.take("mlp_only_layers", default=[])
    if step < 1 or not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise UserError(
            f"config.json: `decoder_sparse_step: {step}` and `mlp_only_layers: {listed!r}`, expected a number above 0 "
            "and a list of layer numbers"
        )
    layers = range(min(n_layers, 4096))
    return [layer for layer in layers if layer in listed or (layer + 1) % step]
