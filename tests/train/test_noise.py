"""The gradient noise scale: known distributions, a model's own gradients of single sequences, all layouts."""

from __future__ import annotations

import json
import math

import pytest
import torch

from modelworks.train.health.noise import MEASUREMENTS, NoiseEstimate, NoiseScale, Squares, estimate_noise


def squares_of(parts: torch.Tensor, shares: torch.Tensor) -> Squares:
    """parts: the mean gradients of the parts (parts, elements)."""
    scaled = parts * shares[:, None]
    return Squares(float(scaled.sum(0).square().sum()), float(scaled.square().sum()), float(shares.square().sum()))


@pytest.mark.parametrize("rows", [[4, 4, 4, 4], [8, 4, 2, 1, 1]])
def test_known_noise_is_found(rows: list[int]) -> None:
    """g_i = G + N(0, Sigma), Sigma diagonal and far from isotropic, in batches of 16 sequences of 10 tokens."""
    draw = torch.Generator().manual_seed(0)
    size, steps = 64, 3000
    mean = torch.randn(size, generator=draw, dtype=torch.float64) / math.sqrt(size)
    deviation = 0.3 + 2 * torch.rand(size, generator=draw, dtype=torch.float64)
    trace, square = float(deviation.square().sum()), float(mean.square().sum())
    scale, estimates = NoiseScale(), []
    for _ in range(steps):
        gradients = mean + deviation * torch.randn(16, size, generator=draw, dtype=torch.float64)
        parts = torch.stack([part.mean(0) for part in gradients.split(rows)])
        shares = torch.tensor(rows, dtype=torch.float64) / 16
        # Two groups of parameters, as where experts are spread: what is added is what is found of all together.
        half = [squares_of(parts[:, some], shares) for some in (slice(0, 20), slice(20, size))]
        found = estimate_noise(half, sequences=16, targets=160.0)
        whole = estimate_noise([squares_of(parts, shares)], sequences=16, targets=160.0)
        assert found is not None
        assert whole is not None
        assert found.trace == pytest.approx(whole.trace)
        assert found.square == pytest.approx(whole.square, abs=1e-9)
        estimates.append(found)
        scale.add(found)
    assert sum(one.trace for one in estimates) / steps == pytest.approx(trace, rel=0.02)
    assert sum(one.square for one in estimates) / steps == pytest.approx(square, rel=0.05)
    ratio = sum(one.trace for one in estimates) / sum(one.square for one in estimates)
    assert ratio == pytest.approx(trace / square, rel=0.05)
    assert scale.sequences == pytest.approx(trace / square, rel=0.4)  # of the last 50 alone
    assert scale.tokens == pytest.approx(10 * float(scale.sequences or 0))


def test_the_average_is_unbiased_from_the_first_measurement() -> None:
    scale = NoiseScale()
    assert scale.average is None
    assert scale.sequences is None
    for count in (1, 2, 3 * MEASUREMENTS):
        while scale.measurements < count:
            scale.add(NoiseEstimate(6.0, 2.0, 5.0))
        average = scale.average
        assert average is not None
        assert average.trace == pytest.approx(6.0)
        assert scale.sequences == pytest.approx(3.0)
        assert scale.tokens == pytest.approx(15.0)


def test_no_scale_where_there_is_none() -> None:
    assert estimate_noise([Squares(1.0, 1.0, 1.0)], sequences=8, targets=8.0) is None  # one part
    assert estimate_noise([Squares(math.nan, 1.0, 0.5)], sequences=8, targets=8.0) is None
    both = estimate_noise([Squares(1.0, 1.0, 1.0), Squares(3.0, 2.0, 0.5)], sequences=8, targets=8.0)
    assert both == NoiseEstimate(8.0, 2.0, 1.0)  # of the parameters that have parts
    scale = NoiseScale()
    scale.add(NoiseEstimate(1.0, -0.5, 1.0))  # as one step may well find
    assert scale.sequences is None
    assert scale.tokens is None


def test_state_goes_on_exactly() -> None:
    whole, first, second = NoiseScale(), NoiseScale(), NoiseScale()
    for place in range(20):
        found = NoiseEstimate(1.0 + place, 0.1 * place, 7.0)
        whole.add(found)
        if place == 9:
            second.load_state(json.loads(json.dumps(first.state())))
        (first if place < 9 else second).add(found)
    assert second.state() == whole.state()
    wrong = [{"measurements": -1}, {"trace": "1"}, {"square": math.nan}]
    for bad in [{}, *({**whole.state(), **one} for one in wrong)]:
        with pytest.raises((KeyError, TypeError, ValueError)):
            NoiseScale().load_state(bad)
