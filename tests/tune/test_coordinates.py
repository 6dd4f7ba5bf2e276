"""The coordinate check tells µP from the standard parametrisation, and from µP with a part left out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from modelworks.config import RunConfig, UserError
from modelworks.config.mup import Growth
from modelworks.data import Batch
from modelworks.tune import at_width, check_coordinates
from modelworks.tune.coordinates import CoordinateCheck, exponent

WIDTHS = (32, 64, 128)
VOCABULARY, LENGTH, ROWS = 64, 32, 8


def run_of(optimizer: dict[str, Any], **model: Any) -> RunConfig:
    shape = {"n_layers": 2, "vocab_size": VOCABULARY, "d_model": 64, "n_heads": 8, "max_seq_len": LENGTH}
    return RunConfig.model_validate(
        {
            "model": {**shape, **model},
            "optimizer": optimizer,
            "train": {"global_batch": ROWS, "device": "cpu"},
            "data": {"tokenizer": "none", "seq_len": LENGTH},
        }
    )


def batch() -> Batch:
    """Tokens as frequent as 1 / rank, so that there is something to learn."""
    weights = 1.0 / torch.arange(1, VOCABULARY + 1)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.multinomial(weights, ROWS * (LENGTH + 1), replacement=True, generator=generator)
    tokens = tokens.view(ROWS, LENGTH + 1)
    ids, ones = torch.zeros(ROWS, LENGTH, dtype=torch.int32), torch.ones(ROWS, LENGTH)
    positions = torch.arange(LENGTH).repeat(ROWS, 1)
    return Batch(tokens[:, :-1].contiguous(), positions, tokens[:, 1:].contiguous(), ones, ids)


def check(optimizer: dict[str, Any], **model: Any) -> CoordinateCheck:
    return check_coordinates(run_of(optimizer, **model), [batch()] * 4, WIDTHS, seeds=2)


ADAMW = {"name": "adamw", "lr": 2e-3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "model"),
    [
        (ADAMW, {}),
        (ADAMW, {"family": "gpt2"}),  # tied, biases, learned positions
        (ADAMW, {"family": "mixtral", "n_experts": 4}),
        (ADAMW, {"family": "qwen3", "n_heads": 4, "mup_base_head_dim": 8}),  # heads that grow
        ({"name": "sgd", "lr": 0.2}, {}),
        ({"name": "muon", "lr": 2e-3}, {}),
    ],
    ids=["adamw", "gpt2", "experts", "large-heads", "sgd", "muon"],
)
def test_mup_passes(optimizer: dict[str, Any], model: dict[str, Any]) -> None:
    found = check(optimizer, mup_base_width=32, **model)
    assert not found.problems, found.trends
    assert [each.width for each in found.of("logits")] == list(WIDTHS)


@pytest.mark.parametrize("optimizer", [ADAMW, {"name": "sgd", "lr": 0.2}])
def test_the_standard_parametrisation_fails(optimizer: dict[str, Any]) -> None:
    worst = max(check(optimizer).problems, key=lambda trend: trend.size)
    assert worst.size > 0.6
    assert "grows as width^" in worst.problem


@pytest.mark.parametrize("fault", ["output", "rates", "initial"])
def test_a_part_left_out_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "output":
        monkeypatch.setattr("modelworks.models.transformer.width_growth", lambda config: 1.0)
    elif fault == "rates":
        monkeypatch.setattr("modelworks.optim.mup.mup_rate", lambda *_: 1.0)
    else:
        monkeypatch.setattr("modelworks.models.initialization.growth", lambda config, name: Growth())
    problems = {trend.name for trend in check(ADAMW, mup_base_width=32).problems}
    assert problems
    if fault == "output":
        assert "logits" in problems


def test_exponent_of_a_power() -> None:
    assert exponent([32, 64, 256], [2 * width**-0.7 for width in (32, 64, 256)]) == pytest.approx(-0.7)
    assert math.isnan(exponent([32, 64], [0.0, 1.0]))


def test_the_same_model_at_another_width() -> None:
    model = run_of(ADAMW, n_kv_heads=4, d_ff=96).model
    wide = at_width(model, 128)
    assert (wide.n_heads, wide.n_kv_heads, wide.head_dim, wide.d_ff) == (16, 8, 8, 192)
    heads = at_width(run_of(ADAMW, n_heads=4, mup_base_width=32, mup_base_head_dim=8).model, 128)
    assert (heads.n_heads, heads.head_dim) == (4, 32)
    shared = at_width(run_of(ADAMW, n_kv_heads=1, mup_base_width=32, mup_base_kv_heads=1).model, 128)
    assert (shared.n_heads, shared.n_kv_heads) == (16, 1)
    with pytest.raises(UserError, match=r"width 100: model.d_ff \(192\) would be|width 100: model.n_heads"):
        at_width(run_of(ADAMW).model, 100)
    with pytest.raises(UserError, match="width 16"):  # below the base
        at_width(run_of(ADAMW, mup_base_width=32).model, 16)


def test_one_width_is_no_trend() -> None:
    with pytest.raises(UserError, match="at least two"):
        check_coordinates(run_of(ADAMW), [batch()], [64, 64])


def test_training_that_breaks_down() -> None:
    with pytest.raises(UserError, match=r"width 32: step \d gave a loss .*lower optimizer.lr"):
        check_coordinates(run_of({"name": "sgd", "lr": 1e30}), [batch()] * 3, (32, 64), seeds=1)
