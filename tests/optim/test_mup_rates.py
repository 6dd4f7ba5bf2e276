"""Rates of µP against the published tables, and what a run at the base must not notice."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from modelworks.config import ModelConfig, OptimizerConfig, ParameterGroup, parameter_shapes
from modelworks.models import CausalContext, Transformer, default_dtype, initialize
from modelworks.optim import Optimizer, build_optimizer, mup_groups

WIDE: dict[str, Any] = {"n_layers": 1, "vocab_size": 32, "d_model": 64, "n_heads": 8, "d_ff": 128}
LAYER = "blocks.0.attention.q.weight"


def options(optimizer: dict[str, Any], **model: Any) -> Any:
    config = ModelConfig.model_validate({**WIDE, "mup_base_width": 16, **model})
    parameters = {name: torch.zeros(shape, requires_grad=True) for name, shape in parameter_shapes(config).items()}
    return build_optimizer(parameters.items(), OptimizerConfig.model_validate(optimizer), model=config).options


ADAM_LIKE = ({"name": "adamw"}, {"name": "lion"}, {"name": "adamw8bit"}, {"name": "lion8bit"}, {"name": "adam"})


@pytest.mark.parametrize("optimizer", ADAM_LIKE, ids=lambda o: o["name"])
@pytest.mark.parametrize("tied", [True, False])
def test_adam_like(optimizer: dict[str, Any], tied: bool) -> None:
    """Yang et al. 2022, table 8: input 1, output 1, hidden 1 / fan_in."""
    found = options(optimizer, tie_embeddings=tied, family="gpt2")
    for name, own in found.items():
        hidden = name.startswith("blocks.") and name.endswith(".weight") and "norm" not in name
        assert own.lr_multiplier == (0.25 if hidden else 1.0), name


def test_sgd() -> None:
    """Table 8: input fan_out, output fan_in, hidden 1."""
    found = options({"name": "sgd"}, tie_embeddings=False, family="gpt2")
    for name, own in found.items():
        hidden = name.startswith("blocks.") and name.endswith(".weight") and "norm" not in name
        assert own.lr_multiplier == (1.0 if hidden else 4.0), name


def test_muon() -> None:
    """An orthogonal update has a spectral norm of 1 whatever its size; AdamW's size puts in sqrt(width), which goes."""
    assert options({"name": "muon", "update_scale": "original"})[LAYER].lr_multiplier == 1.0
    found = options({"name": "muon"})
    assert found[LAYER].lr_multiplier == pytest.approx(0.5)
    assert found["embedding.weight"].lr_multiplier == found["head.weight"].lr_multiplier == 1.0  # AdamW's


@pytest.mark.parametrize("kind", ["original", "match_rms_adamw"])
def test_muon_of_matrices_that_grow_unequally(kind: str) -> None:
    """Key heads that stay as many: the update's spectral norm must fall as sqrt(fan_out / fan_in)."""
    shape = {"n_kv_heads": 2, "mup_base_kv_heads": 2}  # (16, 64), and (16, 16) at the base
    rate = options({"name": "muon", "update_scale": kind}, **shape)["blocks.0.attention.k.weight"].lr_multiplier
    scale = 1.0 if kind == "original" else math.sqrt(64 / 16)  # of the update, against the base's
    assert rate * scale == pytest.approx(math.sqrt(1 / 4))


@pytest.mark.parametrize("optimizer", [*ADAM_LIKE, {"name": "sgd"}, {"name": "muon"}], ids=lambda o: o["name"])
def test_rate_times_decay_does_not_depend_on_the_width(optimizer: dict[str, Any]) -> None:
    decay = {} if optimizer["name"] == "adam" else {"weight_decay": 0.3}
    wide, base = (options({**optimizer, **decay}, mup_base_width=width) for width in (16, 64))
    for name, own in wide.items():
        expected = base[name].lr_multiplier * base[name].weight_decay
        assert own.lr_multiplier * own.weight_decay == pytest.approx(expected)


def test_groups_of_the_user_multiply() -> None:
    groups = [ParameterGroup(pattern="*.attention.q.weight", lr_multiplier=0.5, weight_decay=0.2)]
    own = options({"name": "adamw", "groups": groups})[LAYER]
    assert own.lr_multiplier == 0.5 * 0.25
    assert own.weight_decay == pytest.approx(0.2 / 0.25)


def test_groups_for_people() -> None:
    config = ModelConfig.model_validate({**WIDE, "mup_base_width": 16, "family": "qwen3"})
    groups = mup_groups(OptimizerConfig(), config)
    assert sum(group.parameters for group in groups) == sum(math.prod(s) for s in parameter_shapes(config).values())
    by_rate = {group.rate: group.kinds for group in groups}
    assert by_rate[0.25] == ("q", "k", "v", "o", "gate", "up", "down")


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", "lion"])
@pytest.mark.parametrize("family", ["gpt2", "qwen3", "mixtral"])
def test_the_base_is_the_standard_parametrisation_bit_for_bit(name: str, family: str) -> None:
    shape = {**WIDE, "family": family, "n_experts": 4 if family == "mixtral" else 0}
    standard, base = (
        trained(ModelConfig.model_validate({**shape, **mup}), name) for mup in ({}, {"mup_base_width": 64})
    )
    assert standard.keys() == base.keys()
    assert all(torch.equal(standard[key], base[key]) for key in standard)


def trained(config: ModelConfig, name: str) -> dict[str, Tensor]:
    """Parameters and logits after two updates."""
    with default_dtype(torch.float32):
        model = Transformer(config)
    initialize(model, seed=3)
    optimizer: Optimizer = build_optimizer(
        model.named_parameters(), OptimizerConfig.model_validate({"name": name, "lr": 0.01}), model=config
    )
    tokens = torch.arange(24).view(2, 12)
    positions = torch.arange(12).expand(2, 12)
    for _ in range(2):
        logits = model.logits(model(tokens, positions, CausalContext()))
        model.zero_grad()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step(
            {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in model.named_parameters()}, 0.01
        )
    return {**{n: p.detach() for n, p in model.named_parameters()}, "logits": logits.detach()}
