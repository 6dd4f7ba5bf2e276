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
from modelworks.train.health.detector import DEVIATION, LEAST_VALUES, PATIENCE


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
            norm[step - 1] *= 100.0
        else:
            (loss if draw.random() < 0.5 else norm)[step - 1] = float(kind)
    found = {step: judgement for step, judgement in judged(loss, norm, monitor()) if judgement.spikes}
    assert found.keys() == planted.keys()
    assert not any(judgement.applied for judgement in found.values())


def test_a_spike_as_the_definition_has_it() -> None:
    """Against the formula written out, with numpy."""
    loss, norm = curves(7)
    norm[900] *= 40.0
    watch = Detector(128, 10.0)
    for one, other in zip(loss[:900], norm[:900], strict=True):
        assert watch.judge(one, other) == []
    seen = np.log(norm[900 - 128 : 900])
    medians = np.median(seen.reshape(2, 64), axis=1)
    trend = np.polynomial.Polynomial.fit([31.5, 95.5], medians, 1)
    deviation = DEVIATION * np.median(np.abs(seen - trend(np.arange(128))))
    usual = max(medians[1], trend(128))
    [spike] = watch.judge(loss[900], norm[900])
    assert spike.curve == "gradient_norm"
    assert spike.typical == pytest.approx(np.median(norm[900 - 64 : 900]))
    assert spike.deviations == pytest.approx((np.log(norm[900]) - usual) / deviation)


def test_before_there_is_a_past_only_what_is_not_finite() -> None:
    watch = Detector(128, 10.0)
    for step in range(LEAST_VALUES):
        assert not watch.judge(10.0 ** (step % 5), 1.0)
    early = Detector(128, 10.0)
    assert [spike.curve for spike in early.judge(math.nan, math.inf)] == ["loss", "gradient_norm"]


def test_warming_up_doubles_the_threshold() -> None:
    def fed() -> Detector:
        watch = Detector(64, 10.0)
        for step in range(64):
            watch.judge(4.0 + 0.1 * (-1) ** step, 1.0)
        return watch

    between = 4.0 + 15 * DEVIATION * 0.1
    assert fed().judge(between, 1.0)
    assert not fed().judge(between, 1.0, warming_up=True)


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
    told = [(place, watch.add(level)) for place, level in enumerate(levels)]
    assert [(place, one) for place, one in told if one] == [(127, (4.0, 3.0)), (511, (4.0, 2.9))]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    cut=st.integers(1, 399),
    top=st.sampled_from(["skip", "clip", "slow", "rollback", "stop"]),
)
def test_restored_state_decides_as_if_never_stopped(seed: int, cut: int, top: str) -> None:
    loss, norm = (curve[WARMUP : WARMUP + 400] for curve in curves(seed))
    draw = random.Random(seed)
    for place in draw.sample(range(400), 12):
        loss[place] = draw.choice([math.nan, 30.0, 9.0])
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
        {"slow_until": -1},
        {"detector": {"loss": [1.0], "norm": [], "refused": []}},
        {"detector": {"loss": [True], "norm": [1.0], "refused": []}},
        {"drift": {"block": [1.0] * 32, "lowest": None, "high": 0}},
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
