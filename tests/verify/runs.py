"""Runs to verify: a small model of a family and a layout, and what a worker of the pool does with them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from modelworks.config import RunConfig, dump_yaml, parse_run_config
from modelworks.parallel import Mesh
from modelworks.verify import shrink, verify_on

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"n_heads": 8, "n_kv_heads": 4, "n_layers": 8},
    "tied": {"n_heads": 8, "n_kv_heads": 2, "n_layers": 7, "tie_embeddings": True},
    "gpt2": {"family": "gpt2", "n_heads": 8, "n_layers": 8, "dropout": 0.1},
    "qwen3": {"family": "qwen3", "n_heads": 8, "n_kv_heads": 4, "n_layers": 8, "tie_embeddings": True},
    "mixtral": {
        "family": "mixtral",
        "n_heads": 8,
        "n_kv_heads": 4,
        "n_layers": 8,
        "n_experts": 8,
        "experts_per_token": 2,
        "router_aux_loss": 0.01,
        "router_z_loss": 0.001,
    },
}


def run_of(
    model: str,
    parallel: dict[str, Any],
    *,
    changes: dict[str, Any] | None = None,
    optimizer: str = "adamw",
    **train: Any,
) -> RunConfig:
    """The run that a user would verify, made small. changes: of the model."""
    shape = {"d_model": 512, "vocab_size": 1001, "max_seq_len": 512, "d_ff": 1024} | MODELS[model] | (changes or {})
    shape.setdefault("head_dim", 64)
    return shrink(
        RunConfig.model_validate(
            {
                "model": shape,
                "data": {"seq_len": 256, "tokenizer": "tokenizer.json"},
                "train": {"global_batch": 64, "grad_clip": 0.5, **train},
                "optimizer": {"name": optimizer, "lr": 1e-2},
                "parallel": parallel,
            }
        )
    )


def verified(mesh: Mesh, config: str, steps: int = 2, precision: str = "float64") -> dict[str, Any] | None:
    """On a worker: the comparison of one run, on rank 0."""
    found, _ = verify_on(mesh, parse_run_config(config, "test"), steps=steps, precision=precision)  # type: ignore[arg-type]
    return None if found is None else asdict(found)


def as_text(config: RunConfig) -> str:
    return dump_yaml(config)
