"""The bound on long prompts' chunks follows what steps take, also where it changes."""

from __future__ import annotations

import random

import pytest

from modelworks.serve.pace import Pace
from modelworks.serve.prefix import PrefixKeys
from modelworks.serve.scheduler import Step, Work
from modelworks.serve.sequence import Sequence


def step(n_decoded: int, n_chunked: int) -> Step:
    sequence = Sequence("one", [1], 1, 2, PrefixKeys(b"", 4))
    works = [Work(sequence, 0, 1)] * n_decoded + [Work(sequence, 0, n_chunked)] * (n_chunked > 0)
    return Step(works)


def learned(stall: float | None = 2.0, *, base: float = 0.01, each: float = 0.001, token: float = 0.001) -> Pace:
    """One that has seen prompts alone, and 1 to 8 sequences decode."""
    pace = Pace(stall, 512)
    pace.measured(step(0, 512), base + 512 * token)
    for k in range(200):
        pace.measured(step(1 + k % 8, 0), base + (1 + k % 8) * each)
    return pace


def test_without_measurements_or_without_a_bound_the_budget_is_whole() -> None:
    pace = Pace(2.0, 512)
    assert pace.long_budget(1, 8) == 512
    pace.measured(step(8, 0), 0.0)  # a clock too coarse
    assert pace.long_budget(1, 8) == 512
    assert learned(None).long_budget(1, 8) == 512


@pytest.mark.parametrize("n_decoding", [1, 8, 32])
def test_a_step_takes_as_long_as_it_may_also_for_more_sequences_than_ever_decoded_alone(n_decoding: int) -> None:
    n_chunked = learned().long_budget(1, n_decoding)
    assert n_chunked * 0.001 == pytest.approx(0.01 + n_decoding * 0.001, rel=0.1)


@pytest.mark.parametrize(("slower", "token"), [(1.0, 0.001), (2.0, 0.0005), (1.0, 0.002), (5.0, 0.001), (0.5, 0.0005)])
def test_what_steps_take_changes(slower: float, token: float) -> None:
    """There are no steps of one kind while it does; then decoding alone tells, too."""
    pace, ratios = learned(), []
    for k in range(200):
        n_chunked = pace.long_budget(1, 8)
        seconds = slower * 0.018 + n_chunked * token
        pace.measured(step(8, n_chunked), seconds)
        if k >= 170:
            ratios.append(seconds / (slower * 0.018))
        if k >= 100 and k % 3 == 0:
            pace.measured(step(8, 0), slower * 0.018)
    assert min(ratios) >= 1.85
    assert max(ratios) <= 2.15


def test_noise_and_single_slow_steps_change_little() -> None:
    pace, draws = learned(), random.Random(0)
    budgets = []
    for _ in range(500):
        budgets.append(pace.long_budget(1, 8))
        seconds = (0.018 + budgets[-1] * 0.001) * draws.uniform(0.95, 1.05)
        pace.measured(step(8, budgets[-1]), seconds * (10 if draws.random() < 0.02 else 1))
    assert min(budgets) >= 9
    assert max(budgets) <= 27


def test_several_long_prompts_take_no_longer_than_one_alone_where_that_can_be() -> None:
    pace = learned(1.5)
    decode, token = 0.018, 0.001
    one, two = pace.long_budget(1, 8), pace.long_budget(2, 8)
    alone, together = ((decode + n * token) * tokens / n for n, tokens in ((one, 1000), (two, 2000)))
    assert together == pytest.approx(alone, rel=0.1)
    assert pace.long_budget(0, 8) == one
    assert pace.long_budget(3, 8) == 512, "as no number of tokens would do"
