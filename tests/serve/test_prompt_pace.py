"""The bound on long prompts' chunks follows what steps take, also where it changes."""

from __future__ import annotations

import pytest

from modelworks.serve.pace import Pace
from modelworks.serve.prefix import PrefixKeys
from modelworks.serve.scheduler import Step, Work
from modelworks.serve.sequence import Sequence


def step(n_decoded: int, n_chunked: int) -> Step:
    sequence = Sequence("one", [1], 1, 2, PrefixKeys(b"", 4))
    works = [Work(sequence, 0, 1)] * n_decoded + [Work(sequence, 0, n_chunked)] * (n_chunked > 0)
    return Step(works)


def test_without_measurements_or_without_a_bound_the_budget_is_whole() -> None:
    pace = Pace(2.0, 512)
    pace.measured(step(8, 0), 0.02)
    assert pace.long_budget(1) == 512
    pace.measured(step(0, 512), 0.512)
    assert pace.long_budget(1) == 20
    pace = Pace(None, 512)
    pace.measured(step(8, 0), 0.02)
    pace.measured(step(0, 512), 0.512)
    assert pace.long_budget(1) == 512


@pytest.mark.parametrize(("decode", "token"), [(0.02, 0.001), (0.04, 0.0005), (0.02, 0.002), (0.1, 0.001)])
def test_steps_of_both_kinds_find_the_bound(decode: float, token: float) -> None:
    """What was known is wrong by up to a factor of five; there are no steps of one kind any more."""
    pace = Pace(2.0, 512)
    pace.measured(step(8, 0), 0.02)
    pace.measured(step(0, 512), 0.512)
    for _ in range(300):
        n_chunked = pace.long_budget(1)
        seconds = decode + n_chunked * token
        pace.measured(step(8, n_chunked), seconds)
    assert seconds <= 2.3 * decode or n_chunked == 4
    for _ in range(20):  # decoding alone tells
        pace.measured(step(8, 0), decode)
        n_chunked = pace.long_budget(1)
        seconds = decode + n_chunked * token
        pace.measured(step(8, n_chunked), seconds)
    assert 1.7 <= seconds / decode <= 2.1 or n_chunked == 4


def test_each_prompt_that_waits_is_worth_a_delay() -> None:
    pace = Pace(2.0, 512)
    pace.measured(step(8, 0), 0.02)
    pace.measured(step(0, 512), 0.512)
    assert [pace.long_budget(n) for n in (0, 1, 3, 1000)] == [20, 20, 60, 512]
