"""Counts from the configuration alone equal those of the built module and of torch's own FLOP counter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from modelworks.config import ModelConfig, count_parameters, parameter_shapes, preset, training_flops_per_token
from modelworks.config.counts import mean_attended
from modelworks.models import CausalContext, Transformer

FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")


def small(family: str, **changes: Any) -> ModelConfig:
    shape: dict[str, Any] = {"n_layers": 2, "d_model": 32, "n_heads": 4, "vocab_size": 96, "max_seq_len": 64}
    if family != "gpt2":
        shape["n_kv_heads"] = 2
    if family in ("mixtral", "qwen3_moe"):
        shape |= {"n_experts": 6, "experts_per_token": 3, "d_expert": 20}
    if family == "qwen3_moe":
        shape |= {"dense_layers": [1], "d_ff": 44}
    return ModelConfig.model_validate({"family": family, **shape, **changes})


def built(config: ModelConfig) -> Transformer:
    with torch.device("meta"):
        return Transformer(config)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_are_those_of_the_built_module(family: str, tied: bool) -> None:
    config = small(family, tie_embeddings=tied)
    module = {name: tuple(parameter.shape) for name, parameter in built(config).named_parameters()}
    assert list(parameter_shapes(config).items()) == list(module.items())


@settings(max_examples=30, deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "norm": st.sampled_from(["layernorm", "rmsnorm"]),
            "positions": st.sampled_from(["rope", "learned", "none"]),
            "feed_forward": st.sampled_from(["swiglu", "geglu", "gelu", "relu"]),
            "attention_bias": st.booleans(),
            "attention_output_bias": st.booleans(),
            "feed_forward_bias": st.booleans(),
            "qk_norm": st.booleans(),
            "head_dim": st.sampled_from([4, 8, 16]),
            "tie_embeddings": st.booleans(),
            "d_ff": st.integers(1, 70),
            "n_layers": st.integers(1, 3),
        }
    ),
    st.none() | st.sets(st.integers(0, 2)),
)
def test_shapes_hold_for_every_combination_of_keys(changes: dict[str, Any], dense_layers: set[int] | None) -> None:
    dense = sorted(layer for layer in dense_layers or () if layer < changes["n_layers"] - 1)
    if dense_layers is not None and not changes["feed_forward_bias"]:
        changes |= {"n_experts": 5, "experts_per_token": 2, "dense_layers": dense}
        changes |= {"d_expert": 9} if dense else {}
    config = small("llama", **changes)
    module = {name: tuple(parameter.shape) for name, parameter in built(config).named_parameters()}
    assert parameter_shapes(config) == module
    count = count_parameters(config)
    assert count.total == sum(parameter.numel() for parameter in built(config).parameters())
    assert count.total == sum(count.by_component.values()) == count.embedding + count.head + count.non_embedding


@pytest.mark.parametrize("family", FAMILIES)
def test_active_parameters_leave_out_the_experts_that_a_token_does_not_use(family: str) -> None:
    config = small(family)
    per_expert = sum(math.prod(s[1:]) for name, s in parameter_shapes(config).items() if len(s) == 3)
    idle = max(0, config.n_experts - config.experts_per_token)
    count = count_parameters(config)
    assert count.active == count.total - idle * per_expert
    assert (count.active < count.total) == (config.n_experts > 0)


@pytest.mark.parametrize("name", ["gpt2-small", "llama-3-8b", "qwen3-0.6b", "qwen2.5-7b", "mistral-7b", "mixtral-8x7b"])
def test_whole_presets_on_the_meta_device(name: str) -> None:
    assert count_parameters(preset(name)).total == sum(p.numel() for p in built(preset(name)).parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_equal_torchs_counter(family: str) -> None:
    config, rows, length = small(family), 3, 16
    model = built(config)
    tokens = torch.zeros(rows, length, dtype=torch.long, device="meta")
    positions = torch.arange(length, device="meta").expand(rows, length)
    with FlopCounterMode(display=False) as counter:
        hidden = model(tokens, positions, CausalContext())
        logits = model.logits(hidden)
        forward = counter.get_total_flops()
        logits.sum().backward()
        backward = counter.get_total_flops() - forward
    count = training_flops_per_token(config, length)
    assert forward == rows * length * count.forward_full_attention  # the counter takes every query-key pair
    assert forward + backward == rows * length * count.training_full_attention


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_agree_with_the_usual_formula(family: str) -> None:
    config, length = small(family, n_layers=3), 32
    count = training_flops_per_token(config, length)
    weights = sum(
        math.prod(shape[-2:]) * (config.experts_per_token if len(shape) == 3 else 1)
        for name, shape in parameter_shapes(config).items()
        if len(shape) > 1 and name.startswith("blocks.")
    )
    head = config.vocab_size * config.d_model
    attention = 12 * config.n_layers * config.d_attention * length
    assert count.training_full_attention == 6 * (weights + head) + attention
    assert count.training == 3 * count.forward
    assert count.forward == sum(count.by_component.values())


@given(st.integers(1, 40), st.none() | st.integers(1, 50))
def test_mean_attended_counts_the_pairs_of_the_mask(length: int, window: int | None) -> None:
    pairs = sum(1 for q in range(length) for k in range(q + 1) if window is None or q - k < window)
    assert mean_attended(length, window) == pytest.approx(pairs / length)
