"""Under µP: the three multipliers of the forward pass, and initial values, against plain formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from modelworks.config import ModelConfig
from modelworks.models import (
    CachedContext,
    CausalContext,
    Transformer,
    default_dtype,
    initial_values,
    initialize,
    streamed_logits,
)

SHAPE: dict[str, Any] = {"n_layers": 2, "vocab_size": 48, "d_model": 64, "n_heads": 4, "d_ff": 96, "max_seq_len": 32}
BASE: dict[str, Any] = {"mup_base_width": 16, "mup_base_head_dim": 4}  # heads of 16 channels, of 4 at the base
FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")


def build(family: str, **changes: Any) -> Transformer:
    few = {"n_experts": 4, "experts_per_token": 2} if family in ("mixtral", "qwen3_moe") else {}
    config = ModelConfig.model_validate({**SHAPE, "family": family, **few, **changes})
    with default_dtype(torch.float64):
        model = Transformer(config)
    initialize(model, seed=5)
    return model.eval()


def logits_of(model: Transformer, tokens: Tensor) -> Tensor:
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        return model.logits(model(tokens, positions, CausalContext()))


TOKENS = torch.randint(0, 48, (2, 20), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_multipliers_of_the_forward_pass(family: str, tied: bool) -> None:
    """A standard model whose weights were scaled by hand computes the same: logits / 4, scores * 1/2, router / 4."""
    model = build(family, tie_embeddings=tied, **BASE)
    plain = build(family, tie_embeddings=tied)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(model.get_parameter(name))
            if ".attention.q." in name and not plain.config.qk_norm:
                parameter.mul_(0.5)  # sqrt(4) / 16 in place of 1 / sqrt(16)
            if name.endswith("q_norm.weight"):
                parameter.mul_(0.5)
            if name.endswith("router.weight"):
                parameter.div_(4)
    torch.testing.assert_close(logits_of(model, TOKENS), logits_of(plain, TOKENS) / 4, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("family", ["gpt2", "qwen3_moe"])
def test_generation_and_streaming_compute_the_same(family: str) -> None:
    model = build(family, **BASE)
    expected, context = logits_of(model, TOKENS), CachedContext(2)
    with torch.no_grad():
        parts = []
        for part in (slice(0, 7), slice(7, 19), slice(19, 20)):
            positions = torch.arange(20)[part].expand(2, -1)
            parts.append(model.logits(model(TOKENS[:, part], positions, context)))
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-10, atol=1e-12)
    streamed = streamed_logits(model.config, lambda name: model.get_parameter(name).detach(), TOKENS, {})
    torch.testing.assert_close(streamed.double(), expected, rtol=1e-4, atol=1e-6)


def test_initial_values_shrink_with_the_fan_in() -> None:
    """The same random numbers, times 1 / sqrt(fan-in's growth); those of the base where nothing summed grows."""
    wide = ModelConfig.model_validate({**SHAPE, **BASE, "tie_embeddings": False})
    plain = ModelConfig.model_validate({**SHAPE, "tie_embeddings": False})
    for name, factor in {
        "blocks.1.feed_forward.down.weight": 0.5,
        "blocks.0.attention.v.weight": 0.5,
        "embedding.weight": 1.0,
        "head.weight": 1.0,
        "final_norm.weight": 1.0,
    }.items():
        shape = (64, 64)
        ours, theirs = (initial_values(config, name, shape, 1, dtype=torch.float64) for config in (wide, plain))
        torch.testing.assert_close(ours, theirs * factor, rtol=1e-15, atol=0)
    std = float(initial_values(wide, "blocks.1.attention.q.weight", (256, 256), 1).std())
    assert std == pytest.approx(0.02 / math.sqrt(4), rel=0.02)
