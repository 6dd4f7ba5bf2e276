"""µP's table of growth, against Yang et al. 2022, table 8, and what a base must be."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from modelworks.config import (
    ConfigError,
    ModelConfig,
    RunConfig,
    dump_yaml,
    load_run_config,
    parameter_shapes,
    parse_run_config,
)
from modelworks.config.mup import Growth, growth, query_multiplier, width_growth

SHAPE: dict[str, Any] = {"n_layers": 2, "vocab_size": 64, "d_model": 128, "n_heads": 8, "mup_base_width": 32}
FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")


def model(family: str = "llama", **changes: Any) -> ModelConfig:
    return ModelConfig.model_validate({**SHAPE, "family": family, **changes})


@pytest.mark.parametrize("family", FAMILIES)
def test_kinds_of_parameters(family: str) -> None:
    """Everything is one of table 8's columns: input and vectors, output, hidden."""
    config = model(family, tie_embeddings=False)
    assert width_growth(config) == 4.0
    for name in parameter_shapes(config):
        grown = growth(config, name)
        if name.endswith((".bias", "norm.weight", "embedding.weight")):
            head = name.endswith(("q_norm.weight", "k_norm.weight"))
            assert grown == Growth(fan_out=1.0 if head else 4.0)
        elif name.endswith(("head.weight", "router.weight")):
            assert grown == Growth(fan_in=4.0, divisor=4.0)
            assert grown.init == 1.0  # with the divisor: table 8's variance that does not shrink
        else:
            assert grown == Growth(4.0, 4.0)
            assert grown.init == pytest.approx(1 / math.sqrt(4))  # variance 1 / fan_in


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_at_the_base(family: str) -> None:
    config = model(family, mup_base_width=128)
    assert all(growth(config, name) == Growth() for name in parameter_shapes(config))
    assert all(growth(config, name).init == 1.0 for name in parameter_shapes(config))
    assert width_growth(config) == query_multiplier(config) == 1.0


def test_heads_that_grow_are_scaled_by_one_over_their_size() -> None:
    config = model(n_heads=4, mup_base_head_dim=8)  # 4 heads of 32 channels, of 8 at the base
    assert query_multiplier(config) / math.sqrt(32) == pytest.approx(math.sqrt(8) / 32)
    assert query_multiplier(model()) == 1.0  # more heads of the same size


def test_key_heads_that_do_not_grow_are_few_outputs_of_a_wide_input() -> None:
    config = model(n_kv_heads=2, mup_base_kv_heads=2)
    assert growth(config, "blocks.0.attention.k.weight") == Growth(1.0, 4.0)
    assert growth(config, "blocks.0.attention.k.weight").init == 0.25  # Yang, Simon, Bernstein 2023
    assert growth(config, "blocks.0.attention.q.weight").init == 0.5


@pytest.mark.parametrize(
    ("changes", "key", "says"),
    [
        ({"mup_base_width": 0}, "model.mup_base_width", "above 0"),
        ({"mup_base_width": 256}, "model.mup_base_width", "at most d_model (128): the base is the narrow model"),
        ({"mup_base_width": 40}, "model.mup_base_width", "whole heads"),
        ({"mup_base_head_dim": 12}, "model.mup_base_width", "would have 2.667"),
        ({"n_kv_heads": 2}, "model.mup_base_kv_heads", "a divisor of 2"),
        ({"mup_base_kv_heads": 3}, "model.mup_base_kv_heads", "a divisor of 2"),
        ({"mup_base_width": None, "mup_base_kv_heads": 2}, "model.mup_base_kv_heads", "mup_base_width, its width, is"),
        ({"mup_base_width": None, "mup_base_head_dim": 4}, "model.mup_base_head_dim", "mup_base_width, its width, is"),
    ],
)
def test_a_base_that_cannot_be(changes: dict[str, Any], key: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        write_and_load(tmp_path, changes, {})
    assert f"{key}: " in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("optimizer", "key", "says"),
    [
        ({"name": "lamb"}, "optimizer.name", "trust ratio"),
        ({"name": "lars"}, "optimizer.name", "trust ratio"),
        ({"name": "adafactor"}, "optimizer.scale_parameter", "the update's size is no longer its rate's"),
        ({"name": "adam", "weight_decay": 0.1}, "optimizer.weight_decay", "adamw decays the weights themselves"),
        ({"name": "adam8bit", "weight_decay": 0.1}, "optimizer.weight_decay", "adamw8bit decays"),
    ],
)
def test_optimizers_without_rules(optimizer: dict[str, Any], key: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        write_and_load(tmp_path, {}, optimizer)
    assert f"{key}: " in str(caught.value)
    assert says in str(caught.value)


def test_optimizers_with_rules(tmp_path: Path) -> None:
    for optimizer in (
        *({"name": name} for name in ("sgd", "adam", "adamw", "lion", "adamw8bit", "lion8bit", "muon")),
        {"name": "adafactor", "relative_step": False, "scale_parameter": False},
    ):
        write_and_load(tmp_path, {}, optimizer)


def write_and_load(directory: Path, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
    path = directory / "run.yaml"
    run = {"model": {**SHAPE, **model}, "data": {"tokenizer": "tokenizer.json"}, "optimizer": optimizer}
    path.write_text(json.dumps(run), encoding="utf-8")
    load_run_config(path)


def test_the_resolved_file_keeps_the_base() -> None:
    run = RunConfig.model_validate({"model": SHAPE, "data": {"tokenizer": "t.json"}})
    assert parse_run_config(dump_yaml(run), "again").model.mup_base_width == 32
