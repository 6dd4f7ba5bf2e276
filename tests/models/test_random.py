"""The generator against published vectors and by its statistics; values do not depend on how they are asked for."""

from __future__ import annotations

import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelworks.models import random
from modelworks.models.random import Key, normal, philox, uniform

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, expected):
    result = philox([torch.tensor([word]) for word in words(counter)], Key(*words(key)))
    assert [int(word) for word in result] == words(expected)


@settings(max_examples=30, deadline=None)
@given(start=st.integers(0, 5000), size=st.integers(0, 3000), chunk=st.sampled_from([64, 1000, 1 << 18]))
def test_a_slice_equals_the_whole_bit_for_bit(start, size, chunk):
    key = Key.of(7, "slices")
    whole = normal(key, 0, 8000)
    before, random.CHUNK = random.CHUNK, chunk
    try:
        assert torch.equal(normal(key, start, start + size), whole[start : start + size])
    finally:
        random.CHUNK = before
    assert torch.equal(uniform(key, start, start + size), uniform(key, 0, 8000)[start : start + size])


def test_far_elements_are_distinct():
    key = Key.of(0, "far")
    far = 2**40 + 4
    assert not torch.equal(uniform(key, 0, 8), uniform(key, far, far + 8))
    assert torch.equal(uniform(key, far, far + 8)[2:5], uniform(key, far + 2, far + 5))


def test_normal_values_are_normal():
    count = 300_000
    x = normal(Key.of(0, "statistics"), 0, count)
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0), (6, 15.0)):
        variance = math.prod(range(1, 2 * power, 2)) - moment**2  # of x^power
        assert abs(float((x**power).mean()) - moment) < 5 * math.sqrt(variance / count)
    ordered = x.sort().values
    expected = torch.special.ndtr(ordered)
    distance = (expected - torch.arange(1, count + 1) / count).abs().max()
    assert distance < 1.95 / math.sqrt(count)  # Kolmogorov-Smirnov, one in a thousand
    for lag in (1, 2, 3, 4):
        assert abs(float((x[lag:] * x[:-lag]).mean())) < 5 / math.sqrt(count)


def test_streams_of_different_keys_are_unrelated():
    keys = [Key.of(seed, name) for seed in (0, 1, 2) for name in ("a.weight", "b.weight")]
    assert len(set(keys)) == len(keys)
    streams = torch.stack([normal(key, 0, 100_000) for key in keys])
    correlation = torch.corrcoef(streams) - torch.eye(len(keys))
    assert correlation.abs().max() < 5 / math.sqrt(100_000)


def test_series_agree_with_the_library():
    u = uniform(Key.of(0, "series"), 0, 100_000)
    assert torch.allclose(random._log(u), u.log(), rtol=1e-14, atol=1e-15)
    cosine, sine = random._cosine_and_sine_of_turns(u)
    assert torch.allclose(cosine, (2 * math.pi * u).cos(), rtol=0, atol=1e-14)
    assert torch.allclose(sine, (2 * math.pi * u).sin(), rtol=0, atol=1e-14)


def test_fast_enough():
    start = time.process_time()
    normal(Key.of(0, "speed"), 0, 1 << 20)
    # Alone on one core: 0.04 s. A whole-tensor or per-element version would take many times this generous bound.
    assert time.process_time() - start < 5
