"""How the rate follows the batch: the rules as published, what is said of them, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelworks.config import USUAL_RULES, ConfigError, dump_yaml, parse_run_config, scale_factor, scale_rate
from modelworks.config.optimizers import HABITS

BATCHES = st.integers(1, 2**20)
SCALED = "model: llama-tiny\ntrain: {global_batch: 256}\noptimizer: {lr: 1e-3, lr_scaling: sqrt, base_batch: 64}\n"


def test_published_pairs() -> None:
    """Goyal et al. 2017: 0.1 at 256 images, 3.2 at 8,192. You et al. 2019, table 4: LAMB at 512 and at 32,768."""
    assert scale_rate("sgd", 0.1, "linear", 8192, 256).lr == pytest.approx(3.2)
    assert scale_rate("lamb", 5 / (2**3 * 1e3), "sqrt", 32_768, 512).lr == pytest.approx(5 / 1e3)


@given(BATCHES, BATCHES, BATCHES)
def test_scaling_twice_is_scaling_once(first: int, second: int, third: int) -> None:
    for rule in ("none", "sqrt", "linear"):
        twice = scale_factor(rule, second, first) * scale_factor(rule, third, second)
        assert twice == pytest.approx(scale_factor(rule, third, first))


def test_what_supports_a_rule_is_said() -> None:
    assert "1706.02677" in scale_rate("sgd", 0.1, "linear", 512, 256).reason
    assert "for adamw sqrt is usual" in scale_rate("adamw", 1e-3, "linear", 512, 256).reason
    assert "far" not in scale_rate("adamw", 1e-3, "sqrt", 512, 256).reason
    assert "64x is far" in scale_rate("adamw", 1e-3, "sqrt", 64, 1).reason
    assert USUAL_RULES.keys() == HABITS.keys()
    for batch, base in ((0, 1), (1, 0), (float("inf"), 1)):
        with pytest.raises(ValueError, match="above 0"):
            scale_factor("sqrt", batch, base)


def test_in_a_run() -> None:
    config = parse_run_config(SCALED, "run.yaml")
    assert config.peak_rate.lr == pytest.approx(2e-3)
    assert parse_run_config(dump_yaml(config), "again") == config
    assert parse_run_config("model: llama-tiny", "plain").peak_rate.lr == 3e-4
    # ranks share the batch: how many there are changes nothing
    assert parse_run_config(SCALED, "run.yaml", ["parallel.dp_replicate=4"]).peak_rate == config.peak_rate


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.base_batch=null"], "optimizer.base_batch: got null, expected the global batch, in sequences"),
        (["optimizer.base_batch=0"], "optimizer.base_batch: got 0, expected a whole number above 0"),
        (["optimizer.lr_scaling=none"], "optimizer.base_batch: got 64, expected nothing here"),
        (["optimizer.lr_scaling=square"], r"optimizer.lr_scaling: got 'square', expected one of none, sqrt, linear"),
        (["train.global_batch=0"], "train.global_batch: got 0, expected a whole number above 0"),
    ],
)
def test_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_run_config(SCALED, "run.yaml", overrides)


def test_a_warmup_from_the_base_needs_a_base() -> None:
    with pytest.raises(ConfigError, match=r"schedule.warmup_from: got 'base', expected nothing here"):
        parse_run_config("model: llama-tiny\nschedule: {warmup_from: base}", "run.yaml")
    with pytest.raises(ConfigError, match=r"schedule.warmup_from: got 'base', expected zero"):
        parse_run_config(SCALED, "run.yaml", ["schedule.warmup_from=base", "train.global_batch=32"])
