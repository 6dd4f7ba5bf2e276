"""Schedules against their closed forms, and for continuity."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelworks.config import ScheduleConfig
from modelworks.optim import build_schedule

NAMES = ["constant", "cosine", "linear", "wsd", "inverse-sqrt"]
SHAPES = ["linear", "one-minus-sqrt", "cosine"]


def make(name: str, *, total: int = 100, warmup: int = 10, decay: int = 20, floor: float = 0.1, shape: str = "linear"):
    config = ScheduleConfig(name=name, floor=floor, decay_shape=shape)
    return build_schedule(config, peak=2.0, total_steps=total, warmup_steps=warmup, decay_steps=decay)


@pytest.mark.parametrize("name", NAMES)
def test_warmup_is_linear_from_the_first_update_to_the_peak(name: str) -> None:
    rate = make(name)
    assert [rate(step) for step in range(10)] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert rate(10) == pytest.approx(2.0)


def test_closed_forms() -> None:
    for step in range(10, 101):
        x = (step - 10) / 90
        assert make("cosine")(step) == pytest.approx(2 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * x))))
        assert make("linear")(step) == pytest.approx(2 * (1 - 0.9 * x))
        assert make("constant")(step) == 2.0
        assert make("inverse-sqrt")(step) == pytest.approx(2 * math.sqrt(10 / step))
        last = max(0.0, (step - 80) / 20)
        assert make("wsd", shape="linear")(step) == pytest.approx(2 * (1 - 0.9 * last))
        assert make("wsd", shape="one-minus-sqrt")(step) == pytest.approx(2 * (0.1 + 0.9 * (1 - math.sqrt(last))))
        assert make("wsd", shape="cosine")(step) == pytest.approx(
            2 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * last)))
        )


def test_cosine_equals_the_published_implementation() -> None:
    """transformers' cosine without warmup, whose convention for the decay is the same."""
    import torch
    from transformers import get_cosine_schedule_with_warmup

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    reference = get_cosine_schedule_with_warmup(optimizer, 0, 50)
    ours = make("cosine", total=50, warmup=0, floor=0.0)
    for step in range(50):
        assert ours(step) == pytest.approx(reference.get_last_lr()[0])
        optimizer.step()
        reference.step()


@given(
    name=st.sampled_from(NAMES),
    shape=st.sampled_from(SHAPES),
    total=st.integers(1, 3000),
    warmup_share=st.floats(0, 1),
    decay_share=st.floats(0, 1),
    floor=st.floats(0, 1),
)
def test_bounded_never_rising_after_warmup_and_without_jumps(
    name: str, shape: str, total: int, warmup_share: float, decay_share: float, floor: float
) -> None:
    warmup, decay = round(total * warmup_share), round(total * decay_share)
    rate = make(name, total=total, warmup=warmup, decay=decay, floor=floor, shape=shape)
    values = [rate(step) for step in range(total + 5)]
    assert all(0 <= value <= 2.0 + 1e-12 for value in values)
    after = values[warmup:]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(after))
    if warmup and len(after) > 1:  # the peak is reached by the warmup and kept at the seam
        assert values[warmup - 1] == pytest.approx(2.0)
    if name in ("cosine", "linear") and total > warmup:
        assert values[total] == pytest.approx(2 * floor)
        # the steepest slope of these shapes is pi / 2 of the mean slope
        steepest = max(abs(b - a) for a, b in itertools.pairwise(after))
        assert steepest <= 2.0 * (1 - floor) * math.pi / 2 / (total - warmup) + 1e-12
    assert values[total] == values[total + 4] or name == "inverse-sqrt"


def test_a_floor_of_zero_wastes_no_update() -> None:
    for name in ("cosine", "linear", "wsd"):
        rate = make(name, floor=0.0)
        assert min(rate(step) for step in range(100)) > 0
        assert rate(100) == pytest.approx(0.0, abs=1e-12)


def test_rates_do_not_depend_on_what_was_asked_before() -> None:
    rate = make("wsd", shape="one-minus-sqrt")
    forward = [rate(step) for step in range(100)]
    assert [rate(step) for step in reversed(range(100))] == forward[::-1]


def test_warmup_from_the_rate_of_a_base_batch() -> None:
    """Goyal et al. 2017: equal steps from the base rate to the scaled one, which the last warmup update has."""
    config = ScheduleConfig(name="constant")
    rate = build_schedule(config, peak=3.2, total_steps=20, warmup_steps=5, start=0.1)
    assert [rate(step) for step in range(6)] == pytest.approx([0.72, 1.34, 1.96, 2.58, 3.2, 3.2])


@pytest.mark.parametrize("name", NAMES)
def test_by_samples_as_by_steps_where_steps_are_of_one_size(name: str) -> None:
    config = ScheduleConfig(name=name)
    by_step = build_schedule(config, peak=2.0, total_steps=90, warmup_steps=7, decay_steps=20)
    by_sample = build_schedule(
        config, peak=2.0, total_steps=540, warmup_steps=42, decay_steps=120, done=lambda step: 6 * step
    )
    assert [by_sample(step) for step in range(100)] == pytest.approx([by_step(step) for step in range(100)], rel=1e-14)
