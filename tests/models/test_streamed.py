"""Logits with one weight in memory at a time, against the whole model."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from modelworks.config import ModelConfig
from modelworks.models import CausalContext, Transformer, initialize, load_routing_state, routing_state, streamed_logits
from modelworks.models import streamed as module

SMALL: dict[str, Any] = {"n_layers": 3, "d_model": 16, "n_heads": 4, "vocab_size": 50, "max_seq_len": 32}
SMALL |= {"init_std": 0.3}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "n_kv_heads": 2},
    "tied": {"family": "llama", "tie_embeddings": True},
    "gpt2": {"family": "gpt2"},
    "qwen3": {"family": "qwen3", "head_dim": 8, "attention_bias": True},
    "post-norm": {"family": "llama", "norm_position": "post"},
    "yarn": {"family": "llama", "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_seq_len": 8}},
    "experts": {"family": "mixtral", "n_experts": 4, "d_ff": 24, "router_bias": True},
    "some-dense": {"family": "qwen3_moe", "n_experts": 4, "experts_per_token": 2, "dense_layers": [1], "d_expert": 12},
}


def model_of(name: str) -> Transformer:
    model = Transformer(ModelConfig(**SMALL, **SHAPES[name]))
    initialize(model, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for full, parameter in model.named_parameters():
            if "norm" in full or full.endswith("bias"):
                parameter.normal_(0.8, 0.2, generator=generator)
        biases = {full: torch.randn(bias.shape, generator=generator) for full, bias in routing_state(model).items()}
        load_routing_state(model, biases)
    return model.eval()


@pytest.mark.parametrize("slice_bytes", [64 << 20, 200], ids=["whole", "sliced"])
@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_whole_model(name: str, slice_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLICE_BYTES", slice_bytes)
    model = model_of(name)
    tokens = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        whole = model.logits(model(tokens, torch.arange(12).expand_as(tokens), CausalContext()))
    weights = dict(model.named_parameters())
    found = streamed_logits(model.config, lambda full: weights[full].detach(), tokens, routing_state(model))
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "experts"])
def test_one_weight_at_a_time(name: str) -> None:
    """The weights alive together are the norms and router of one layer, and one large one."""
    model = model_of(name)
    weights = {full: tensor.detach().to(torch.bfloat16) for full, tensor in model.named_parameters()}
    alive, peak = 0, 0

    def load(full: str) -> torch.Tensor:
        nonlocal alive, peak
        tensor = weights[full].clone()
        alive += tensor.nbytes
        peak = max(peak, alive)
        weakref.finalize(tensor, freed, tensor.nbytes)
        return tensor

    def freed(size: int) -> None:
        nonlocal alive
        alive -= size

    tokens = torch.arange(12)[None]
    streamed_logits(model.config, load, tokens, routing_state(model))
    assert alive == 0
    assert peak <= max(tensor.nbytes for tensor in weights.values()) + 1024
