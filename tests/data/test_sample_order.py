"""Mixture and order: proportions, and every sample once a pass, whatever the weights and their changes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelworks.config import MixtureChange, UserError
from modelworks.data.mixture import Mixture
from modelworks.data.order import SampleOrder, Windows
from modelworks.data.permutation import permute

weight_lists = st.lists(st.sampled_from([0.1, 0.25, 0.3, 1.0, 2.0, 7.0, 0.123456, 100.0]), min_size=1, max_size=7)


@given(st.integers(1, 5000), st.text(max_size=5))
@settings(max_examples=60, deadline=None)
def test_permutation_is_a_bijection(n: int, key: str) -> None:
    assert np.array_equal(np.sort(permute(np.arange(n), n, key)), np.arange(n))


def test_permutation_is_the_same_for_any_part_and_differs_by_key() -> None:
    n = 10**12
    some = np.array([0, 1, 12345, n - 1])
    whole = permute(some, n, "k")
    assert [int(permute(some[i : i + 1], n, "k")[0]) for i in range(4)] == whole.tolist()
    assert not np.array_equal(permute(some, n, "l"), whole)
    assert ((whole >= 0) & (whole < n)).all()


def test_permutation_looks_shuffled() -> None:
    """Neighbours part, and each input's places over many keys are uniform (chi-square, 15 degrees of freedom)."""
    n = 16
    order = permute(np.arange(4096), 4096, "k")
    assert np.abs(np.corrcoef(np.arange(4096), order)[0, 1]) < 0.05
    places = np.array([permute(np.arange(n), n, str(key)) for key in range(3200)])
    for column in (0, 7, 15):
        observed = np.bincount(places[:, column], minlength=n)
        assert ((observed - 200) ** 2 / 200).sum() < 45  # p = 8e-5


@given(weight_lists, st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_every_prefix_is_near_its_ideal_share(weights: list[float], seed: int) -> None:
    mixture = Mixture({str(i): w for i, w in enumerate(weights)}, seed=seed)
    samples = np.arange(3000)
    counts = mixture.counts(samples)
    ideal = np.outer(np.array(weights) / sum(weights), samples)
    depth = math.ceil(math.log2(len(weights))) if len(weights) > 1 else 0
    assert np.abs(counts - ideal).max() <= depth + 1e-5
    assert (counts.sum(axis=0) == samples).all()
    assert np.isin(np.diff(counts, axis=1), (0, 1)).all()


def test_proportions_are_exact_far_from_the_beginning() -> None:
    mixture = Mixture({"a": 0.1, "b": 0.2, "c": 0.7})
    far = 10**13
    counts = mixture.counts(np.array([far]))[:, 0]
    assert np.abs(counts - np.array([far // 10, far // 5, 7 * far // 10])).max() <= 2
    sources, _ = mixture.draw(np.arange(far, far + 1000))
    assert np.bincount(sources).tolist() == pytest.approx([100, 200, 700], abs=3)


def test_many_digits_of_weight_stay_inside_int64() -> None:
    mixture = Mixture({"a": 0.123456789012345, "b": 0.876543210987655})
    counts = mixture.counts(np.array([2**40]))[:, 0]
    assert counts.sum() == 2**40
    assert counts[0] / 2**40 == pytest.approx(0.123456789012345, abs=2e-9)


@st.composite
def changing_mixtures(draw: st.DrawFn) -> tuple[dict[str, float], list[MixtureChange]]:
    n = draw(st.integers(1, 5))
    names = [f"s{i}" for i in range(n)]
    weight = st.sampled_from([0.0, 0.5, 1.0, 3.0])
    changes = []
    for at in sorted(draw(st.sets(st.integers(0, 900), max_size=4))):
        weights = {name: draw(weight) for name in names}
        weights[draw(st.sampled_from(names))] = 1.0
        changes.append(MixtureChange(at=at, weights=weights))
    return {name: draw(st.sampled_from([0.2, 1.0, 5.0])) for name in names}, changes


@given(changing_mixtures(), st.integers(0, 1000), st.lists(st.integers(1, 60), min_size=5, max_size=5))
@settings(max_examples=60, deadline=None)
def test_no_change_of_weights_loses_or_repeats_a_sample(
    mixture: tuple[dict[str, float], list[MixtureChange]], seed: int, window_counts: list[int]
) -> None:
    weights, changes = mixture
    windows = [Windows(8 * count + 1, 8) for count in window_counts[: len(weights)]]
    order = SampleOrder(Mixture(weights, changes, seed), windows, seed=seed, shuffle=True)
    sources, starts = order.places(np.arange(1000))
    for number, cut in enumerate(windows):
        taken = starts[sources == number] // 8
        for first in range(0, len(taken), cut.count):
            one_pass = taken[first : first + cut.count]
            assert len(set(one_pass.tolist())) == len(one_pass)  # nothing twice in a pass
            if len(one_pass) == cut.count:
                assert sorted(one_pass.tolist()) == list(range(cut.count))  # nothing missing from a whole pass


def test_weights_change_at_the_very_sample() -> None:
    mixture = Mixture({"a": 1, "b": 1}, [MixtureChange(at=101, weights={"a": 0, "b": 1})])
    sources, _ = mixture.draw(np.arange(300))
    assert set(sources[101:].tolist()) == {1}
    assert abs(int((sources[:101] == 0).sum()) - 50) <= 1


def test_any_step_alone_is_what_it_is_among_others() -> None:
    order = SampleOrder(Mixture({"a": 2, "b": 1}), [Windows(81, 8), Windows(41, 8)], seed=3, shuffle=True)
    together = order.places(np.arange(500))
    for index in (0, 1, 63, 499):
        alone = order.places(np.array([index]))
        assert (int(alone[0][0]), int(alone[1][0])) == (int(together[0][index]), int(together[1][index]))


def test_passes_are_shuffled_anew_and_differently_by_seed() -> None:
    def taken(seed: int, shuffle: bool = True) -> list[int]:
        order = SampleOrder(Mixture({"a": 1}), [Windows(401, 8)], seed=seed, shuffle=shuffle)
        starts: list[int] = order.places(np.arange(100))[1].tolist()
        return starts

    assert taken(0)[:50] != taken(0)[50:]
    assert taken(0) != taken(1)
    assert taken(0, shuffle=False) == [8 * i for i in range(50)] * 2


@pytest.mark.parametrize(("tokens", "count", "left_out"), [(17, 2, 0), (16, 1, 7), (24, 2, 7), (9, 1, 0), (8, 0, 8)])
def test_windows(tokens: int, count: int, left_out: int) -> None:
    assert (Windows(tokens, 8).count, Windows(tokens, 8).left_out) == (count, left_out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"at": 5, "weights": {"a": 1, "bb": 1}}, "did you mean `b`"),
        ({"at": 5, "weights": {"a": 1}}, "missing b"),
        ({"at": 5, "weights": {"a": 0, "b": 0}}, "above 0"),
    ],
)
def test_wrong_changes_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Mixture({"a": 1, "b": 1}, [MixtureChange.model_validate(change)])


def test_changes_out_of_order_are_refused() -> None:
    changes = [MixtureChange(at=at, weights={"a": 1}) for at in (7, 7)]
    with pytest.raises(UserError, match="must grow"):
        Mixture({"a": 1}, changes)


def test_a_source_too_short_for_one_sample_is_refused() -> None:
    with pytest.raises(UserError, match=r"source `a`: 8 training tokens do not fill one sample of 9"):
        SampleOrder(Mixture({"a": 1}), [Windows(8, 8)], seed=0, shuffle=True)
