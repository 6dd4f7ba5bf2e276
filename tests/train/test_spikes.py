"""What is a spike and what is not: clean curves raise no alarm, planted trouble is found, state resumes exactly."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
from benchmarks._simulated_runs import STEPS, WARMUP, curves
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from modelworks.config import HealthConfig, parse_run_config
from modelworks.config.errors import UserError
from modelworks.train.health import Detector, Drift, Judgement, Monitor
from modelworks.train.health.detector import DEVIATION, LEAST_VALUES, PATIENCE, Seen


def monitor(spikes: str = "skip", **more: object) -> Monitor:
    return Monitor(HealthConfig.model_validate({"spikes": spikes, **more}), warmup_steps=WARMUP, grad_clip=1.0)


def judged(loss: NDArray[np.float64], norm: NDArray[np.float64], watch: Monitor) -> Iterator[tuple[int, Judgement]]:
    for step, (one, other) in enumerate(zip(loss.tolist(), norm.tolist(), strict=True), start=1):
        yield step, watch.judge(step, one, other)


@pytest.mark.parametrize("seed", range(20))
def test_no_false_alarm_and_every_planted_spike(seed: int) -> None:
    loss, norm = curves(seed)
    for step, judgement in judged(loss, norm, monitor()):
        assert judgement == Judgement(), step
    draw = random.Random(seed)
    planted = {}
    for step in draw.sample(range(WARMUP + 128, STEPS - 10), 6):  # curves are too steep to tell before
        kind = draw.choice(["loss", "norm", "nan", "inf"])
        planted[step] = kind
        if kind == "loss":
            loss[step - 1] = 2 * loss[step - 1]
        elif kind == "norm":
            norm[step - 1] *= 100.0  # beyond what is let pass as an outlier
        else:
            (loss if draw.random() < 0.5 else norm)[step - 1] = float(kind)
    found = {step: judgement for step, judgement in judged(loss, norm, monitor()) if judgement.spikes}
    assert found.keys() == planted.keys()
    assert not any(judgement.applied for judgement in found.values())


def test_a_spike_as_the_definition_has_it() -> None:
    """Against the formula written out, with numpy."""
    loss, norm = curves(7)
    norm[900] *= 60.0
    watch = Detector(128, 10.0)
    for one, other in zip(loss[:900], norm[:900], strict=True):
        assert watch.judge(one, other, clip_at=None) == Seen()
    seen = np.log(norm[900 - 128 : 900])
    medians = np.median(seen.reshape(2, 64), axis=1)
    trend = np.polynomial.Polynomial.fit([31.5, 95.5], medians, 1)
    deviation = DEVIATION * np.median(np.abs(seen - trend(np.arange(128))))
    usual = max(medians[1], trend(128))
    [spike] = watch.judge(loss[900], norm[900], clip_at=1.0).spikes
    assert spike.curve == "gradient_norm"
    assert spike.typical == pytest.approx(np.median(norm[900 - 64 : 900]))
    assert spike.deviations == pytest.approx((np.log(norm[900]) - usual) / deviation)


def test_before_there_is_a_past_only_what_is_not_finite() -> None:
    watch = Detector(128, 10.0)
    for step in range(LEAST_VALUES):
        assert watch.judge(10.0 ** (step % 5), 1.0, clip_at=None) == Seen()
    early = Detector(128, 10.0)
    assert [spike.curve for spike in early.judge(math.nan, math.inf, clip_at=1.0).spikes] == ["loss", "gradient_norm"]


def test_warming_up_doubles_the_threshold() -> None:
    def fed() -> Detector:
        watch = Detector(64, 10.0)
        for step in range(64):
            watch.judge(4.0 + 0.1 * (-1) ** step, 1.0, clip_at=None)
        return watch

    between = 4.0 + 15 * DEVIATION * 0.1
    assert fed().judge(between, 1.0, clip_at=None).spikes
    assert not fed().judge(between, 1.0, clip_at=None, warming_up=True).spikes


def test_a_norm_that_jumps_alone_is_an_outlier_unless_something_else_speaks_for_trouble() -> None:
    """With the same jump each time: what comes with it or after it decides."""

    def fed() -> Detector:
        watch = Detector(64, 10.0)
        for step in range(64):
            watch.judge(4.0 + 0.02 * (-1) ** step, 1.0 + 0.05 * (-1) ** step, clip_at=2.0)
        return watch

    def told(*steps: tuple[float, float], clip_at: float | None = 2.0) -> list[str]:
        watch, found = fed(), []
        for loss, norm in steps:
            seen = watch.judge(loss, norm, clip_at=clip_at)
            assert not (seen.spikes and seen.outlier)
            found.append("spike" if seen.spikes else "outlier" if seen.outlier else "")
        return found

    usual, jump = (4.0, 1.0), (4.0, 8.0)
    assert told(usual, jump, usual, usual) == ["", "outlier", "", ""]
    assert told(jump, jump, jump, jump) == ["outlier", "outlier", "spike", "spike"]  # it persists
    assert told(jump, usual, jump, usual) == ["outlier", "", "", ""]  # the window has seen such a step
    # A loss that would be none by itself is one beside a jump, and for a while after one.
    assert told((4.3, 1.0)) == [""]
    assert told((4.3, 8.0)) == ["spike"]
    assert told(jump, usual, (4.3, 1.0)) == ["outlier", "", "spike"]
    assert told(jump, *[usual] * PATIENCE, (4.3, 1.0)) == ["outlier", *[""] * PATIENCE, ""]
    assert told((5.0, 1.0), jump) == ["spike", "spike"]  # right behind one
    # The size of it, where nothing clips it; and one that no data makes.
    assert told((4.0, 12.0)) == ["outlier"]
    assert told((4.0, 12.0), clip_at=None) == told((4.0, 12.0), clip_at=11.0) == ["spike"]
    assert told((4.0, 60.0)) == ["spike"]


def test_a_new_level_is_no_row_of_spikes() -> None:
    """Another part of the data, say: after some steps the run goes on learning from it."""
    loss, norm = curves(3)
    loss[1000:] += 3.0
    answers = [step for step, judgement in judged(loss, norm, monitor()) if judgement.spikes]
    assert answers == list(range(1001, 1001 + PATIENCE))
    last = dict(judged(loss, norm, monitor()))[1000 + PATIENCE]
    assert (last.new_level, last.applied) == (True, True)


@pytest.mark.parametrize("seed", range(20))
def test_slow_divergence(seed: int) -> None:
    """No step is a spike, the sum of them is."""
    loss, norm = curves(seed)
    rise = np.maximum(0, np.arange(STEPS) - 1200) * 0.004 * loss[1000:1200].mean() / 2
    found = [step for step, judgement in judged(loss + rise, norm, monitor()) if judgement.drift]
    assert len(found) >= 1
    assert 1200 < found[0] < 1600


def test_divergence_is_told_once_until_the_loss_has_come_back() -> None:
    watch = Drift()
    levels = [3.0] * 64 + [4.0] * 320 + [2.9] * 64 + [4.0] * 128
    told = [(place, watch.add(place + 1, level)) for place, level in enumerate(levels)]
    assert [(place, one) for place, one in told if one] == [(127, (4.0, 3.0)), (511, (4.0, 2.9))]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    cut=st.integers(1, 399),
    rises=st.booleans(),
    top=st.sampled_from(["skip", "clip", "slow", "rollback", "stop"]),
)
def test_restored_state_decides_as_if_never_stopped(seed: int, cut: int, top: str, rises: bool) -> None:
    loss, norm = (curve[WARMUP : WARMUP + 400] for curve in curves(seed))
    draw = random.Random(seed)
    for place in draw.sample(range(400), 12):
        if draw.random() < 0.3:
            norm[place] *= 12.0
        else:
            loss[place] = draw.choice([math.nan, 30.0, 9.0])
    if rises:
        loss[200:] *= 1 + 0.003 * np.arange(200)
    whole, first = monitor(top, calm=20), monitor(top, calm=20)
    expected = [repr(judgement) for _, judgement in judged(loss, norm, whole)]
    ours = [repr(judgement) for _, judgement in judged(loss[:cut], norm[:cut], first)]
    resumed = monitor(top, calm=20)
    resumed.load_state(json.loads(json.dumps(first.state())))
    for step in range(cut + 1, 401):
        assert resumed.rate_factor(step) == first.rate_factor(step)
        assert resumed.clip_at(step) == first.clip_at(step)
        ours.append(repr(resumed.judge(step, float(loss[step - 1]), float(norm[step - 1]))))
        first.judge(step, float(loss[step - 1]), float(norm[step - 1]))
    assert ours == expected
    assert resumed.state() == whole.state()


@pytest.mark.parametrize(
    "change",
    [
        {"rung": 9},
        {"rung": 0},
        {"steps": ["1"]},
        {"rollbacks": [-1]},
        {"clip": [3]},
        {"clip": [3, -1.0]},
        {"detector": {"loss": [1.0], "norm": [], "refused": []}},
        {"detector": {"loss": [True], "norm": [1.0], "refused": []}},
        {"drift": {"block": [1.0] * 32, "lowest": None, "high": 0}},
        {"slow": [3, -1]},
        {"answered": 0.5},
    ],
)
def test_a_state_that_makes_no_sense_is_refused(change: dict[str, object]) -> None:
    watch = monitor()
    with pytest.raises((KeyError, TypeError, ValueError)):
        watch.load_state({**watch.state(), **change})


def test_the_ladder() -> None:
    """A rung for each spike; the bottom again after quiet steps; tighter clipping and the lower rate end."""
    watch = monitor("stop", calm=50, slow_factor=0.25)
    loss, norm = curves(1)
    bad = {500: "skip", 551: "skip", 561: "clip", 571: "slow", 800: "skip", 801: "clip", 802: "slow", 803: "stop"}
    answers, usual = {}, 0.0
    for step in range(1, 804):
        if step == 561:
            usual = float(np.median(norm[[at for at in range(400, 560) if at + 1 not in bad][-64:]]))
        judgement = watch.judge(step, 50.0 if step in bad else float(loss[step - 1]), float(norm[step - 1]))
        if judgement.answer:
            answers[step] = judgement.answer
            assert not judgement.applied
        assert watch.rate_factor(step + 1) == (0.25 if 571 <= step < 621 or step >= 802 else 1.0), step
        if step == 561:
            assert watch.clip_at(562) == pytest.approx(min(1.0, usual))
            assert watch.clip_at(611) == watch.clip_at(562)
            assert watch.clip_at(612) == 1.0
    assert answers == bad
    assert judgement.stops
    assert judgement.steps == (800, 801, 802, 803)


def test_rollback_is_a_rung_and_ends() -> None:
    """Where it goes back to, and that what was before the first spike of the row decides that."""
    watch, (loss, norm) = monitor("rollback", calm=50, rollback_limit=2), curves(1)
    for step in range(1, 500):
        watch.judge(step, float(loss[step - 1]), float(norm[step - 1]))
        assert watch.good_before(step + 1) == max(0, (step - 50) // 50 * 50)
    state = json.loads(json.dumps(watch.state()))
    found = []
    for _ in range(3):
        answers = [watch.judge(step, 50.0, 1.0) for step in range(500, 504)]
        found.append([(answer.answer, answer.good) for answer in answers])
        went = watch.rollbacks
        watch.load_state(state)
        watch.rollbacks = went
    climb = [("skip", None), ("clip", None), ("slow", None)]
    assert found == [[*climb, ("rollback", 400)], [*climb, ("rollback", 400)], [*climb, ("stop", None)]]
    # Far behind, another trouble: counted anew.
    for step in range(500, 600):
        watch.judge(step, float(loss[step - 1]), float(norm[step - 1]))
    assert [watch.judge(step, 50.0, 1.0).good for step in range(600, 604)] == [None, None, None, 500]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 30), max_size=20), st.integers(1, 20))
def test_a_state_that_is_not_needed_is_never_gone_back_to(gaps: list[int], calm: int) -> None:
    """Whatever comes, the step to go back to never falls, and lies `calm` steps before the first spike of a row."""
    watch, bad, step = monitor("stop", calm=calm), set[int](), 40
    for gap in gaps:
        bad.add(step := step + gap)
    needed = 0
    for step in range(1, 700):
        now = watch.good_before(step)
        assert now >= needed
        assert now % calm == 0
        needed = now
        judgement = watch.judge(step, math.nan if step in bad else 3.0, 1.0)
        if judgement.answer:
            assert now == max(0, judgement.steps[0] - 1 - calm) // calm * calm or len(judgement.steps) == PATIENCE
        if judgement.stops:
            break


RISING = 1 + np.maximum(0, np.arange(STEPS) - 1100) * 0.001  # by a tenth in a hundred steps


@pytest.mark.parametrize("top", ["warn", "skip", "clip", "slow", "stop"])
def test_a_divergence_is_answered_by_the_rungs_that_last(top: str) -> None:
    """Each as far as the ladder goes, again after `calm` steps; the second time the last rung ends the run."""
    watch, (loss, norm), told = monitor(top, **({} if top in ("warn", "skip") else {"calm": 50})), curves(7), []
    for step, judgement in judged(loss * RISING, norm, watch):
        if judgement.drift:
            told.append((step, judgement.against))
            first = told[0][0]
            assert judgement.stops == (judgement.against == "stop")
            assert judgement.applied or judgement.stops
        if told and step == told[0][0]:
            assert watch.rate_factor(step + 1) == (0.5 if top in ("slow", "stop") else 1.0)
            assert (watch.clip_at(step + 1) != 1.0) == (top in ("clip", "slow", "stop"))
        if judgement.stops:
            break
    assert 1200 < first < 1300
    if top in ("warn", "skip"):
        assert told == [(first, None)]
    elif top == "stop":
        assert told == [(first, "slow"), (first + 50, "stop")]
    else:
        assert told == [(step, top) for step in range(first, STEPS + 1, 50)]


def test_a_divergence_makes_the_run_go_back_to_before_it_began() -> None:
    """And on at the lower rate, behind the good step only, until where it was told."""
    watch, (loss, norm) = monitor("rollback", calm=40, rollback_limit=1), curves(7)
    needed, states = 0, {}
    for step in range(1, STEPS + 1):
        assert needed <= (needed := watch.good_course(step))
        judgement = watch.judge(step, float((loss * RISING)[step - 1]), float(norm[step - 1]))
        if judgement.drift:
            break
        states[step] = json.loads(json.dumps(watch.state()))
    assert (judgement.answer, judgement.against, judgement.applied) == ("rollback", "rollback", False)
    good = judgement.good
    assert good is not None
    assert good == needed
    assert good % 40 == 0
    assert 1040 <= good <= 1160  # the rise begins at 1,100, and is 6% at the latest of these
    back = monitor("rollback", calm=40, rollback_limit=1)
    back.load_state(states[good - 40])  # from a checkpoint, say, that is older
    back.went_back(judgement, watch.rollbacks)
    factors = {at: back.rate_factor(at) for at in range(good - 40, step + 80)}
    assert [at for at, factor in factors.items() if factor == 0.5] == list(range(good + 1, step + 41))
    # Once is allowed.
    for at in range(good - 39, STEPS + 1):
        judgement = back.judge(at, float((loss * RISING)[at - 1]), float(norm[at - 1]))
        if judgement.drift:
            break
    assert at == step
    assert judgement.stops
    assert judgement.against == "stop"
    assert judgement.reason.endswith("1 rollbacks have not helped")


def test_without_a_limit_of_its_own_clip_sets_one() -> None:
    watch = Monitor(HealthConfig(spikes="clip"), warmup_steps=0, grad_clip=None)
    for step in range(1, 65):
        watch.judge(step, 3.0 + 0.01 * (step % 3), 2.0 + 0.01 * (step % 3))
    assert watch.clip_at(65) is None
    watch.judge(65, 9.0, 2.0)
    watch.judge(66, 9.0, 2.0)
    assert watch.clip_at(67) == pytest.approx(2.01)


def test_steps_that_stay_not_finite_stop_the_run_on_every_rung() -> None:
    watch = monitor("skip")
    judgements = [watch.judge(step, math.nan, 1.0) for step in range(1, PATIENCE + 1)]
    assert [judgement.answer for judgement in judgements] == ["skip"] * (PATIENCE - 1) + ["stop"]


def test_warnings_leave_training_as_it_is() -> None:
    loss, norm = curves(2)
    loss[700] = 40.0
    for step, judgement in judged(loss, norm, monitor("warn")):
        assert judgement.applied
        assert judgement.answer is None
        assert bool(judgement.spikes) == (step == 701)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("health.spikes=warm", "health.spikes: got 'warm'"),
        ("health.window=3", "health.window: got 3"),
        ("health.threshold=1", "health.threshold: got 1"),
        ("health.slow_factor=1.5", "health.slow_factor: got 1.5"),
        ("health.slow_factor=0.1", "health.slow_factor"),  # of no effect: nothing lowers the rate
        ("health.calm=7", "health.calm"),
        ("health.rollback_limit=2", "health.rollback_limit"),
        ("health.rollback_from=memory", "health.rollback_from"),
        ("health.overfitting=yes", "health.overfitting: got 'yes'"),
        ("health.layers_every=0", "health.layers_every: got 0"),
    ],
)
def test_keys_that_are_wrong_or_of_no_effect(override: str, message: str) -> None:
    model = "model: {n_layers: 1, d_model: 16, n_heads: 2, d_ff: 32, vocab_size: 8192, max_seq_len: 256}"
    with pytest.raises(UserError) as error:
        parse_run_config(model, "test", [override])
    assert message in str(error.value)
