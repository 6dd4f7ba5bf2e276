"""How many sequences each step has: against walking through the run, against Megatron's rule, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelworks.config import BatchSizes, ConfigError, RunConfig, UserError, dump_yaml, parse_run_config
from modelworks.config import resume_differences as resume

LENGTH = 16


def run(train: str, *overrides: str) -> RunConfig:
    return parse_run_config(f"model: llama-tiny\ndata: {{seq_len: {LENGTH}}}\ntrain: {{{train}}}", "run", overrides)


@st.composite
def stages(draw: Any) -> list[dict[str, Any]]:
    """Of a ramp to 64 sequences; ends in one unit, as those of two units may pass each other."""
    batches = sorted(draw(st.sets(st.integers(1, 63), min_size=1, max_size=5)))
    unit = draw(st.sampled_from(["steps", "tokens"]))
    ends = sorted(draw(st.sets(st.integers(1, 20_000 if unit == "tokens" else 50), min_size=5, max_size=5)))
    return [{"batch": batch, "until": f"{end} {unit}"} for batch, end in zip(batches, ends, strict=False)]


@given(stages())
def test_as_a_run_would_walk_through_it(ramp: list[dict[str, Any]]) -> None:
    """A step belongs to the first stage whose end is not reached; nothing but what was done so far enters."""
    written = ", ".join(f"{{batch: {stage['batch']}, until: {stage['until']}}}" for stage in ramp)
    batches = run(f"global_batch: 64, batch_ramp: [{written}]").batches
    samples = 0
    for step in range(120):
        done = {"steps": step, "tokens": samples * LENGTH}
        ends = [(stage["batch"], *stage["until"].split()) for stage in ramp]
        rows = next((batch for batch, end, unit in ends if done[unit] < int(end)), 64)
        assert (batches.first_sample(step), batches.rows(step)) == (samples, rows)
        assert batches.steps_for(samples) == step
        assert batches.steps_for(samples + 1) == step + 1
        samples += rows


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.integers(1, 4000))
def test_even_increments_are_megatrons(start: int, increment: int, count: int, samples: int) -> None:
    """megatron/core/num_microbatches_calculator.py, RampupBatchsizeNumMicroBatchesCalculator: the size is start +
    increment * int(consumed / (ramp / count)), and the full batch beyond the ramp."""
    full = start + increment * count
    ramp = f"{{start: {start}, increment: {increment}, over: {samples * LENGTH} tokens}}"
    batches = run(f"global_batch: {full}, batch_ramp: {ramp}").batches
    consumed = 0
    for step in range(60):
        theirs = full if consumed > samples else start + increment * (consumed * count // samples)
        assert batches.rows(step) == theirs
        consumed += theirs


def test_in_a_run() -> None:
    config = run("global_batch: 8, batch_ramp: {start: 2, increment: 2, over: 9 steps}")
    assert [config.batches.rows(step) for step in range(11)] == [2, 2, 2, 4, 4, 4, 6, 6, 6, 8, 8]
    assert config.batches.ramps
    assert not run("global_batch: 8").batches.ramps
    assert parse_run_config(dump_yaml(config), "again") == config
    assert config.with_batch(4).batches == BatchSizes.constant(4)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("batch_ramp: {start: 64, increment: 1, over: 9 steps}", r"batch_ramp.start: got 64, expected less than train"),
        (
            "batch_ramp: {start: 4, increment: 7, over: 9 steps}",
            r"batch_ramp.increment: got 7, expected a divisor of 60",
        ),
        (
            "batch_ramp: {start: 0, increment: 7, over: 9 steps}",
            r"batch_ramp.start: got 0, expected a whole number abov",
        ),
        ("batch_ramp: {start: 4, increment: 4, over: 2%}", r"batch_ramp.over: got '2%', expected steps or tokens"),
        ("batch_ramp: {start: 4, increment: 4}", r"batch_ramp.over: got nothing"),
        ("batch_ramp: {start: 4, incremnt: 4, over: 2 steps}", r"did you mean `train.batch_ramp.increment`"),
        (
            "batch_ramp: [{batch: 64, until: 9 steps}]",
            r"batch_ramp.0.batch: got 64, expected more than 0 and less than",
        ),
        (
            "batch_ramp: [{batch: 9, until: 9 steps}, {batch: 8, until: 10 steps}]",
            r"1.batch: got 8, expected more than 9",
        ),
        (
            "batch_ramp: [{batch: 8, until: 9 steps}, {batch: 9, until: 9 steps}]",
            r"1.until: got '9 steps', expected more",
        ),
        ("batch_ramp: [{batch: 8, until: 1 epoch}]", r"batch_ramp.0.until: got '1 epoch', expected steps or tokens"),
        ("batch_ramp: []", r"train.batch_ramp: got \[\]"),
        ("batch_ramp: 8", r"train.batch_ramp: got 8, expected a mapping or a list"),
    ],
)
def test_refused(train: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(train)


def test_a_ramp_is_its_own_warmup_of_the_rate() -> None:
    ramp = "global_batch: 8, batch_ramp: {start: 2, increment: 2, over: 9 steps}"
    scaled = ["optimizer.lr_scaling=sqrt", "optimizer.base_batch=2"]
    with pytest.raises(ConfigError, match=r"warmup_from: got 'base', expected zero: with train.batch_ramp"):
        run(ramp, *scaled, "schedule.warmup_from=base")


def test_a_resumed_run_may_have_other_batches_from_here_on() -> None:
    """Eight rows became sixteen at step 100: the ramp that keeps the first hundred steps says so."""
    small = run("global_batch: 8")
    larger = run("global_batch: 16, batch_ramp: [{batch: 8, until: 100 steps}]")
    allowed = resume(small, larger, step=100)
    assert allowed[0].key == "train.global_batch"
    for config, step in ((larger, 101), (run("global_batch: 16"), 1)):
        with pytest.raises(UserError, match="steps already made had other sizes"):
            resume(small, config, step=step)
