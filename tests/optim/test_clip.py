"""Clipping by the global norm against brute force and torch, and over shards."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from modelworks.optim import clip_gradients


def make_gradients(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (3, 5), "b": (7,), "c": (), "empty": (0, 4)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in shapes.items()
    }


def flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradient.double().flatten() for gradient in gradients.values()])


@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e6, None])
def test_norm_and_scaling_equal_brute_force(p: float, max_norm: float | None) -> None:
    gradients = make_gradients()
    before = flat(gradients)
    expected = before.abs().max() if math.isinf(p) else before.abs().pow(p).sum() ** (1 / p)
    norm = clip_gradients(gradients, max_norm, p)
    assert norm == pytest.approx(float(expected), rel=1e-12)
    scale = 1.0 if max_norm is None else min(1.0, max_norm / norm)
    torch.testing.assert_close(flat(gradients), before * scale, rtol=1e-12, atol=0)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_equals_torch(p: float) -> None:
    gradients = make_gradients(torch.float32)
    del gradients["empty"]  # torch has no infinity norm for it
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients.values()]
    for parameter, gradient in zip(parameters, gradients.values(), strict=True):
        parameter.grad = gradient.clone()
    reference = torch.nn.utils.clip_grad_norm_(parameters, 0.7, p)
    assert clip_gradients(gradients, 0.7, p) == pytest.approx(float(reference), rel=1e-6)
    for parameter, gradient in zip(parameters, gradients.values(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=5e-6, atol=1e-7)


@given(cut=st.integers(0, 23), p=st.sampled_from([1.0, 2.0, 3.5, math.inf]))
def test_shards_with_a_reduction_equal_the_whole(cut: int, p: float) -> None:
    """Two holders of parts of every tensor; what comes back from a reduction is the sum or maximum over both."""
    whole = make_gradients()
    vector = flat(whole)
    expected = clip_gradients(whole, 0.5, p)
    shards = [vector[:cut].clone(), vector[cut:].clone()]
    shares: list[Tensor] = []

    def note(value: Tensor, how: str) -> Tensor:
        if how == "max":
            return vector.abs().max()
        shares.append(value)
        return value

    for shard in shards:  # first pass: what each contributes
        clip_gradients({"shard": shard}, None, p, note)

    def reduce(value: Tensor, how: str) -> Tensor:
        return vector.abs().max() if how == "max" else torch.stack(shares).sum()

    for shard in shards:
        assert clip_gradients({"shard": shard}, 0.5, p, reduce) == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(torch.cat(shards), flat(whole), rtol=1e-12, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("p", [2.0, math.inf])
def test_a_norm_that_is_not_finite_is_returned_and_nothing_is_scaled(bad: float, p: float) -> None:
    gradients = make_gradients()
    gradients["b"][3] = bad
    before = flat(gradients).clone()
    assert not math.isfinite(clip_gradients(gradients, 1e-3, p))
    assert torch.equal(flat(gradients).nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("p", [2.0, 3.0, math.inf])
def test_a_nan_is_not_lost_among_other_ranks(p: float) -> None:
    """Gloo takes the maximum over ranks by a comparison, which NaN fails: the other number is kept."""

    def with_another_rank(value: Tensor, how: str) -> Tensor:
        other = torch.ones((), dtype=value.dtype)
        return other + value if how == "sum" else torch.where(value > other, value, other)

    gradients = make_gradients()
    gradients["b"][3] = math.nan
    assert not math.isfinite(clip_gradients(gradients, 1e-3, p, reduce=with_another_rank))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_finite_gradients_are_not_taken_for_infinite(dtype: torch.dtype) -> None:
    gradients = {"a": torch.full((4,), 1e30, dtype=dtype)}
    assert clip_gradients(gradients, 1.0) == pytest.approx(2e30, rel=1e-2)
    torch.testing.assert_close(gradients["a"].float(), torch.full((4,), 0.5), rtol=1e-2, atol=0)


@pytest.mark.parametrize(("p", "size"), [(8.0, 1e-6), (100.0, 1e-3), (100.0, 1e4), (0.5, 1e-12)])
def test_powers_beyond_a_floats_range_do_not_lose_the_norm(p: float, size: float) -> None:
    gradients = {"a": torch.full((4,), size)}
    assert clip_gradients(gradients, None, p) == pytest.approx(size * 4 ** (1 / p), rel=1e-6)


def test_half_precision_sums_in_float32() -> None:
    """4096 squares of one: a bf16 sum would stop growing at 256."""
    assert clip_gradients({"a": torch.ones(4096, dtype=torch.bfloat16)}, None) == pytest.approx(64.0)


def test_no_gradients_have_norm_zero() -> None:
    assert clip_gradients({}, 1.0) == 0.0


@given(
    owners=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=3, max_size=3),
    p=st.sampled_from([1.0, 2.0, 3.5, math.inf]),
)
def test_copies_are_counted_once_and_all_are_scaled(owners: list[list[bool]], p: float) -> None:
    """Three ranks hold every tensor or a copy of it; the first that owns a tensor counts it, the others only scale."""
    whole = make_gradients()
    names = list(whole)
    counted: list[set[str]] = [set(), set(), set()]
    for tensor, claims in enumerate(owners):
        counted[claims.index(True) if any(claims) else 2].add(names[tensor])
    expected = clip_gradients(make_gradients(), None, p)
    norms = [clip_gradients(make_gradients(), None, p, counted=own) for own in counted]

    def reduce(value: Tensor, how: str) -> Tensor:
        largest = max(float(gradient.abs().max()) for gradient in make_gradients().values() if gradient.numel())
        if how == "max":
            return torch.tensor(largest, dtype=torch.float64)
        unit = largest if p == 3.5 else 1.0  # orders but 1 and 2 sum powers of what is left after the largest
        return torch.tensor(sum((norm / unit) ** p for norm in norms), dtype=torch.float64)

    for own in counted:
        held = make_gradients()
        assert clip_gradients(held, expected / 4, p, reduce, own) == pytest.approx(expected, rel=1e-12)
        torch.testing.assert_close(flat(held), flat(whole) / 4, rtol=1e-12, atol=0)
