"""Proposals against published runs that they have not seen, against printed figures of the laws, and in bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelworks.config import ModelConfig, RunConfig, UserError, count_parameters
from modelworks.config.named_models import preset
from modelworks.plan.hyper import critical_batch, deepseek_batch, deepseek_rate, propose
from modelworks.plan.optimizer_bytes import OPTIMIZERS
from modelworks.plan.published_runs import Quantity, Run, power_law, published_runs

TINY = ModelConfig(n_layers=4, d_model=192, n_heads=4, vocab_size=8192, tie_embeddings=True)
Law = tuple[Quantity, Sequence[Quantity]]
BATCH: Law = ("batch_tokens", ("parameters", "tokens"))
RATE: Law = ("rate", ("parameters",))


def factors(target: Quantity, over: Sequence[Quantity], *, leave: str) -> np.ndarray:
    """How many times each run's value is missed, up or down, by the law without this run, or without its recipe."""
    runs = [run for run in published_runs() if all(name in run.values for name in (target, *over))]
    missed = []
    for run in runs:
        others = [other for other in runs if other is not run and (leave == "run" or other.recipe != run.recipe)]
        predicted = power_law(target, over, others)(**{name: run.values[name] for name in over})
        missed.append(math.exp(abs(math.log(predicted / run.values[target]))))
    return np.array(missed)


def test_batches_of_runs_left_out_are_met_within_a_factor_of_two_mostly() -> None:
    """Runs of one size and length differ by eight between recipes (Gopher's and Pythia's): no rule meets both."""
    one, recipe = (factors(*BATCH, leave=leave) for leave in ("run", "recipe"))
    assert np.median(one) < 1.6
    assert np.mean(one < 3.0) > 0.85
    assert np.median(recipe) < 1.6
    assert np.mean(recipe < 3.0) > 0.8


def test_four_of_five_runs_lie_in_the_range_that_is_given() -> None:
    for target, over in (BATCH, RATE):
        law = power_law(target, over)
        runs = [run for run in published_runs() if all(name in run.values for name in (target, *over))]
        ratios = np.array([run.values[target] / law(**{name: run.values[name] for name in over}) for run in runs])
        assert 0.7 < np.mean((law.spread[0] <= ratios) & (ratios <= law.spread[1])) < 0.95


def test_rates_of_runs_left_out_are_met_within_a_factor_of_two_mostly() -> None:
    one, recipe = (factors(*RATE, leave=leave) for leave in ("run", "recipe"))
    assert np.median(one) < 1.6
    assert np.mean(one < 2.5) > 0.93
    assert np.median(recipe) < 1.75
    assert np.mean(recipe < 2.5) > 0.9


@given(a=st.floats(-2.0, 2.0), b=st.floats(-2.0, 2.0), c=st.floats(-5.0, 5.0))
def test_a_planted_law_is_found_again(a: float, b: float, c: float) -> None:
    runs = [
        Run(f"recipe {index % 3}", "", "", {"parameters": n, "tokens": d, "rate": math.exp(c) * n**a * d**b}, "", False)
        for index, (n, d) in enumerate([(2.0, 3.0), (5.0, 7.0), (11.0, 2.0), (4.0, 19.0), (9.0, 9.0)])
    ]
    law = power_law("rate", ("parameters", "tokens"), runs)
    assert law(parameters=6.0, tokens=6.0) == pytest.approx(math.exp(c) * 6.0 ** (a + b), rel=1e-6)
    assert law.exponents == pytest.approx({"parameters": a, "tokens": b}, abs=1e-8)
    assert law.spread == pytest.approx((1.0, 1.0), abs=1e-6)
    assert law.outside(parameters=6.0, tokens=60.0) == ["tokens"]


def test_a_recipe_that_is_repeated_does_not_outvote_the_others() -> None:
    runs = list(published_runs())
    copies = [replace(run, model=f"copy {index}") for index in range(3) for run in runs if run.recipe == "Gopher"]
    law, more = power_law(*RATE, runs), power_law(*RATE, runs + copies)
    assert more.exponents["parameters"] == pytest.approx(law.exponents["parameters"], abs=0.02)


def test_deepseeks_laws_give_what_its_runs_used() -> None:
    """2401.02954 table 2: 7B with 2304 rows of 4,096 at 4.2e-4, 67B with 4608 at 3.2e-4, two trillion tokens each."""
    for parameters, rows, rate in ((6.9e9, 2304, 4.2e-4), (67e9, 4608, 3.2e-4)):
        flops = 6 * parameters * 2e12
        assert deepseek_batch(flops) == pytest.approx(rows * 4096, rel=0.05)
        assert deepseek_rate(flops) == pytest.approx(rate, rel=0.05)


def test_kaplans_critical_batch_doubles_as_the_loss_falls_by_13_percent() -> None:
    """2001.08361 section 5.1 says so; with endless data the loss falls as N^-0.076 (section 3.2)."""
    larger = 0.87 ** (-1 / 0.076)
    assert critical_batch(1e8 * larger, 1e18) / critical_batch(1e8, 1e18) == pytest.approx(2.0, rel=0.05)
    assert critical_batch(1e12, 1e9) == pytest.approx(critical_batch(1e13, 1e9), rel=0.2)  # bound by data


@pytest.mark.parametrize(
    ("name", "tokens", "batch", "rate"),
    [
        ("gpt3-175b", 300 * 10**9, 3.2e6, 0.6e-4),
        ("gpt3-6.7b", 300 * 10**9, 2e6, 1.2e-4),
        ("llama-2-7b", 2 * 10**12, 4e6, 3e-4),
        ("llama-3.1-405b", 15_600 * 10**9, 16e6, 0.8e-4),
        ("gpt2-small", 295 * 10**9, 0.49e6, 6e-4),
    ],
)
def test_known_models_get_what_they_had_within_a_factor_of_two(
    name: str, tokens: int, batch: float, rate: float
) -> None:
    found = propose(preset(name), tokens=tokens)
    for suggestion, used in ((found["batch"], batch), (found["learning_rate"], rate)):
        assert suggestion.value is not None
        assert used / 2 < suggestion.value < used * 2
    assert "extrapolated" not in found["learning_rate"].reason


def test_tiny_models_get_sane_values_and_are_told_that_they_are_extrapolated() -> None:
    found = propose(TINY, seq_len=256)
    parameters = count_parameters(TINY).total
    assert 2e6 < parameters < 5e6
    tokens, batch, rate, warmup = (found[key].value for key in ("tokens", "batch", "learning_rate", "warmup"))
    assert tokens == pytest.approx(20 * parameters, rel=0.01)
    assert batch is not None
    assert 8_192 <= batch <= 65_536
    assert batch % 256 == 0
    assert rate is not None
    assert 5e-4 < rate < 3e-3
    assert warmup is not None
    assert 40 <= warmup <= 0.1 * float(tokens or 0) / batch
    assert "extrapolated: the runs have parameters of 10.7M to 405B" in found["learning_rate"].reason
    smollm = propose(preset("smollm2-135m"), seq_len=2048)
    assert "extrapolated" not in smollm["batch"].reason + smollm["learning_rate"].reason


@pytest.mark.parametrize("tokens", [None, 1000, 10**13])
def test_the_overrides_are_keys_of_a_run_description(tokens: int | None) -> None:
    written = propose(TINY, tokens=tokens, seq_len=256).overrides
    nested: dict[str, dict[str, object]] = {"data": {"seq_len": 256}}
    for key, value in written.items():
        section, name = key.split(".")
        nested.setdefault(section, {})[name] = value
    config = RunConfig.model_validate({"model": TINY.model_dump(), **nested})
    assert config.train.global_batch == written["train.global_batch"]
    assert config.optimizer.lr == written["optimizer.lr"]
    assert str(config.train.duration) == written["train.duration"]


def test_a_budget_that_is_given_is_kept_and_judged() -> None:
    found = propose(preset("gpt3-175b"), tokens=300 * 10**9)
    assert found["tokens"].value == 300e9
    assert "1.72 for each of 175B parameters" in found["tokens"].reason
    assert "a smaller model would reach a lower loss" in found["tokens"].reason
    assert "a smaller model" not in propose(preset("llama-3-8b"), tokens=15 * 10**12)["tokens"].reason
    assert found.overrides["train.duration"] == "300000000000 tokens"


def test_experts_are_counted_as_what_a_token_uses() -> None:
    model = preset("qwen3-30b-a3b")
    found = propose(model)
    assert found["tokens"].value == pytest.approx(20 * count_parameters(model).active, rel=0.01)
    assert "a law for experts is not settled" in found["tokens"].reason


def test_other_optimisers_have_rates_of_their_own_or_none() -> None:
    model = preset("smollm2-135m")
    rates = {name: propose(model, optimizer=name)["learning_rate"] for name in OPTIMIZERS}
    adamw = rates["adamw"].value
    assert adamw is not None
    assert {rates[name].value for name in ("adam", "adam8bit", "adamw8bit")} == {adamw}
    for name in ("lion", "lion8bit"):  # 2302.06675: three to ten times smaller, with as much more decay
        value = rates[name].value
        assert value is not None
        assert adamw / 10 < value < adamw / 3
        assert value * float(propose(model, optimizer=name)["weight_decay"].value or 0) == pytest.approx(
            adamw * 0.1, rel=0.05
        )
    for name in ("sgd", "momentum", "lars"):
        assert rates[name].value is None
        assert "optimizer.lr" not in propose(model, optimizer=name).overrides
    # 1904.00962 table 4: 5e-3 for 32,768 rows of 128 tokens
    assert "1904.00962" in rates["lamb"].source
    with pytest.raises(UserError, match="did you mean adamw"):
        propose(model, optimizer="adamww")


@given(
    tokens=st.integers(1, 10**16),
    seq_len=st.integers(1, 10**6),
    optimizer=st.sampled_from(OPTIMIZERS),
    model=st.sampled_from([TINY, preset("llama-3.1-405b")]),
)
def test_every_proposal_is_in_bounds(tokens: int, seq_len: int, optimizer: str, model: ModelConfig) -> None:
    found = propose(model, optimizer=optimizer, tokens=tokens, seq_len=seq_len)
    batch, warmup = found["batch"].value, found["warmup"].value
    assert batch is not None
    assert warmup is not None
    assert batch == found.overrides["train.global_batch"] * seq_len  # type: ignore[operator]
    assert batch >= seq_len
    assert batch == seq_len or batch < 1.5 * max(tokens / 1000, seq_len)
    steps = max(1, math.ceil(tokens / batch))
    assert 1 <= warmup <= max(1, steps / 2)
    for suggestion in found.suggestions:
        assert suggestion.reason
        assert suggestion.source
        if suggestion.range is not None:
            assert suggestion.range[0] <= suggestion.range[1]
    assert "starting points" in found.caution


@pytest.mark.parametrize("key", ["tokens", "seq_len"])
def test_no_tokens_are_refused(key: str) -> None:
    with pytest.raises(UserError, match=f"{key}: got 0, expected at least 1"):
        propose(TINY, **{key: 0})


def test_every_run_of_the_table_says_where_it_is_from() -> None:
    runs = published_runs()
    assert len(runs) > 50
    assert len({(run.family, run.model) for run in runs}) == len(runs)
    for run in runs:
        assert run.source
        assert 1e-6 < run.values["rate"] < 1e-1
        assert 1e6 < run.values["parameters"] < 1e12
