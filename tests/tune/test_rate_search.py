"""The search for a rate on made-up curves: what it finds, what noise does to it, and that a kill changes nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelworks.tune import Outcome, Search, Trial, TrialsFailed, TrialStore, find_rate, propose
from modelworks.tune.evidence import Evidence
from modelworks.tune.plot import text_rows

World = Callable[[Trial], Outcome]
CURVATURE = 0.3  # nats at a decade from the best


def curve(rate: float, best: float) -> float:
    return 3.0 + CURVATURE * math.log10(rate / best) ** 2


def world(best: float, cliff: float, *, noise: float = 0.0, salt: int = 0) -> World:
    """A parabola in the logarithm of the rate, up to a cliff; seeds shift it as a whole, trials jump around it."""

    def make(trial: Trial) -> Outcome:
        if trial.rate > cliff:
            return Outcome(trial, "diverged", None, None, 5, 1.0, "the loss rose")
        shift = random.Random(f"{trial.seed} {salt}").gauss(0.0, 3 * noise)
        jump = random.Random(f"{trial} {salt}").gauss(0.0, noise)
        return Outcome(trial, "finished", curve(trial.rate, best) + shift + jump, 3.0, 50, 1.0)

    return make


def run(search: Search, make: World) -> dict[Trial, Outcome]:
    outcomes: dict[Trial, Outcome] = {}
    while wanted := search.next(outcomes):
        assert not outcomes.keys() & set(wanted), "a trial is never asked for twice"
        outcomes |= {trial: make(trial) for trial in wanted}
        assert len(outcomes) < 60
    return outcomes


decades = st.floats(-2.0, 2.0)
centres = st.floats(-5.0, 0.0).map(lambda power: 10.0**power)


@settings(max_examples=80, deadline=None)
@given(centres, decades, st.floats(0.3, 3.0), st.integers(1, 3))
def test_without_noise_the_grid_point_nearest_to_the_best_is_found(
    centre: float, away: float, room: float, seeds: int
) -> None:
    best = centre * 10**away
    cliff = best * 10**room
    found = propose(search := Search(centre, tuple(range(seeds))), run(search, world(best, cliff)), 0.02)
    assert found.best is not None
    assert found.largest_stable is not None
    assert abs(math.log10(found.best.rate / best)) <= 0.13  # half a quarter-decade, and three digits
    assert len(found.best.losses) == seeds
    assert found.largest_stable <= cliff
    if found.diverges is None:
        assert found.largest_stable >= 99 * found.best.rate  # looked for up to two decades above
    else:
        assert cliff < found.diverges <= 1.8 * found.largest_stable


@settings(max_examples=60, deadline=None)
@given(centres, decades, st.floats(0.002, 0.05), st.integers(0, 10**6))
def test_with_noise_little_is_lost(centre: float, away: float, noise: float, salt: int) -> None:
    """What the found rate loses against the best one, without noise, is what the noise can hide."""
    best = centre * 10**away
    search = Search(centre, (0, 1, 2))
    found = propose(search, run(search, world(best, best * 50, noise=noise, salt=salt)), 0.02)
    assert found.best is not None
    assert curve(found.best.rate, best) - 3.0 <= CURVATURE * 0.13**2 + 4 * noise
    assert found.noise is not None
    assert noise / 5 < found.noise < 3 * noise


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_kill_at_any_point_changes_nothing(data: st.DataObject) -> None:
    """Trials end in any order, and the search is thrown away after any of them: it goes on from the outcomes alone."""
    best = 10 ** data.draw(st.floats(-4, -1))
    make = world(best, best * 10 ** data.draw(st.floats(0.3, 2.5)), noise=0.02, salt=data.draw(st.integers(0, 99)))
    search = Search(1e-3, (0, 1))
    whole = run(search, make)
    outcomes: dict[Trial, Outcome] = {}
    while wanted := Search(1e-3, (0, 1)).next(outcomes):
        ended = data.draw(st.permutations(wanted))[: data.draw(st.integers(1, len(wanted)))]
        outcomes |= {trial: make(trial) for trial in ended}
    assert outcomes == whole
    assert propose(search, outcomes, 0.02) == propose(search, whole, 0.02)


def test_more_seeds_use_what_is_there() -> None:
    make = world(2e-3, 5e-2, noise=0.01)
    two = run(Search(1e-3, (0, 1)), make)
    first = Search(1e-3, (0, 1, 2)).next(two)
    assert first
    assert {trial.seed for trial in first} == {2}


def test_where_everything_diverges_the_search_ends() -> None:
    search = Search(1.0, (0,))
    outcomes = run(search, lambda trial: Outcome(trial, "diverged", None, None, 1, 1.0, "nan"))
    found = propose(search, outcomes, 0.02)
    assert found.best is None
    assert found.largest_stable is None
    assert min(outcomes).rate == pytest.approx(1e-5)
    assert "something else than the rate" in found.remarks[0]


def test_a_seed_that_diverges_moves_the_cliff() -> None:
    """The best by the first seed diverges with the second: it is not stable, and the best is below it."""

    def make(trial: Trial) -> Outcome:
        outcome = world(1e-2, 2e-2)(trial)
        if trial.seed == 1 and trial.rate > 5e-3:
            return replace(outcome, status="diverged", loss=None, reason="the loss rose", steps=7)
        return outcome

    search = Search(1e-2, (0, 1))
    found = propose(search, run(search, make), 0.02)
    assert found.best is not None
    assert found.best.rate == found.largest_stable == pytest.approx(3.16e-3, rel=0.01)
    assert found.diverges == pytest.approx(5.62e-3, rel=0.01)
    assert any("largest stable one" in remark for remark in found.remarks)


def test_given_rates_are_tried_with_every_seed_and_no_others() -> None:
    search = Search(1.0, (0, 1, 2), (1e-3, 1e-2, 1.0))
    outcomes = run(search, world(1e-4, 0.1))
    assert sorted(outcomes) == [
        *(Trial(rate, seed) for rate in (1e-3, 1e-2) for seed in (0, 1, 2)),
        Trial(1.0, 0),  # it diverged: nothing is gained by doing that again
    ]
    found = propose(search, outcomes, 0.02)
    assert found.best is not None
    assert (found.best.rate, found.largest_stable, found.diverges) == (1e-3, 1e-2, 1.0)
    assert "the best rate is the lowest that was tried" in found.remarks[0]


@given(st.integers(2, 5), st.integers(2, 4), st.integers(0, 10**6))
def test_noise_is_the_residual_of_rates_and_seeds(rates: int, seeds: int, salt: int) -> None:
    """Against least squares with a column for each rate and each seed."""
    losses = np.random.default_rng(salt).normal(3.0, 0.1, (rates, seeds))
    evidence = Evidence(tuple(range(seeds)))
    for place in range(rates):
        for seed in range(seeds):
            outcome = Outcome(Trial(1.0 + place, seed), "finished", float(losses[place, seed]), 3.0, 9, 1.0)
            evidence.add(place, seed, outcome)
    rows, columns = np.divmod(np.arange(rates * seeds), seeds)
    design = np.hstack([np.eye(rates)[rows], np.eye(seeds)[columns]])
    fitted = design @ np.linalg.lstsq(design, losses.ravel(), rcond=None)[0]
    expected = math.sqrt(np.sum((losses.ravel() - fitted) ** 2) / ((rates - 1) * (seeds - 1)))
    assert evidence.noise() == pytest.approx(expected, rel=1e-9)


def test_ties_are_told() -> None:
    losses = {1e-3: (3.00, 3.10), 2e-3: (3.02, 3.07), 4e-3: (3.5, 3.61)}

    def make(trial: Trial) -> Outcome:
        return Outcome(trial, "finished", losses[trial.rate][trial.seed], 3.0, 9, 1.0)

    search = Search(1.0, (0, 1), tuple(losses))
    found = propose(search, run(search, make), 1.0)
    assert found.best is not None
    assert found.best.rate == 2e-3
    assert found.as_good == (1e-3,)
    assert found.best.standard_error == pytest.approx(0.025)
    assert any(remark.startswith("0.001 is as good within the noise") for remark in found.remarks)
    notes = {row[0]: row[4] for row in text_rows(found)[1:]}
    assert notes == {"0.001": "as good", "0.002": "best", "0.004": "largest stable"}


def runner(make: World, *, dies_after: int | None = None) -> Callable[[Sequence[Trial]], Generator[Outcome]]:
    """dies_after: outcomes in all, after which it raises as a kill would."""
    left = [dies_after]

    def made(trials: Sequence[Trial]) -> Generator[Outcome]:
        for trial in trials:
            if left[0] is not None:
                if left[0] == 0:
                    raise KeyboardInterrupt
                left[0] -= 1
            yield make(trial)

    return made


@pytest.mark.parametrize("after", [0, 1, 4, 9])
def test_the_store_carries_a_search_over_a_kill(tmp_path: Path, after: int) -> None:
    make, search = world(4e-3, 0.1, noise=0.02), Search(1e-3, (0, 1))
    facts = {"config": "x"}
    with TrialStore(tmp_path / "whole") as store:
        store.claim(facts)
        whole = find_rate(search, store, runner(make))
    with TrialStore(tmp_path / "killed") as store:
        store.claim(facts)
        with pytest.raises(KeyboardInterrupt):
            find_rate(search, store, runner(make, dies_after=after))
    with TrialStore(tmp_path / "killed") as store:
        store.claim(facts)
        assert len(store.outcomes) == after
        assert find_rate(search, store, runner(make)) == whole


def test_a_trial_that_fails_is_made_twice_and_then_left_out(tmp_path: Path) -> None:
    asked: list[Trial] = []
    bad = Trial(1e-2, 0)

    def make(trial: Trial) -> Outcome:
        asked.append(trial)
        return Outcome(trial, "failed", None, None, 0, 0.0, "killed") if trial == bad else world(2e-3, 1e-1)(trial)

    search = Search(1e-3, (0, 1))
    with TrialStore(tmp_path) as store:
        store.claim({"config": "x"})
        found = propose(search, find_rate(search, store, runner(make)), 0.02)
    assert asked.count(bad) == 2
    assert found.best is not None
    assert found.best.rate == pytest.approx(1.78e-3)
    assert any("failed for reasons of their own" in remark for remark in found.remarks)
    with TrialStore(tmp_path) as store:
        assert bad not in store.outcomes  # the next search tries it again


def test_where_every_trial_fails_the_reason_is_told(tmp_path: Path) -> None:
    with TrialStore(tmp_path) as store:
        store.claim({"config": "x"})
        with pytest.raises(TrialsFailed, match="all 3 trials of a set failed; the last: no memory"):
            find_rate(
                Search(1e-3, (0,)),
                store,
                runner(lambda trial: Outcome(trial, "failed", None, None, 0, 0.0, "no memory")),
            )
