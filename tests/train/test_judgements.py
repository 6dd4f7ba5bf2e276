"""What the judge says of runs: nothing of clean ones, the trouble of others once, and the same after a resume."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from benchmarks._simulated_runs import EVALUATIONS, LAYERS, STEPS, WARMUP, curves, evaluations, layers
from benchmarks.false_alarms import KINDS, judged
from scipy.optimize import curve_fit  # type: ignore[import-untyped]

from modelworks.config import HealthConfig, UserError, parse_run_config
from modelworks.train.health import Judge
from modelworks.train.health.course import MOST, SMALLEST, Block, Course, fit_law


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_said_of_a_clean_run(seed: int) -> None:
    assert list(judged(seed)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_planted_is_found_and_said_once(kind: str) -> None:
    found = list(judged(7, kind))
    assert found.count(kind) == 1
    # Trouble of the loss shows in more than one way.
    loss = {"spike", "divergence", "plateau", "off the law"}
    assert set(found) <= ({kind} | loss if kind in loss else {kind})


def fed(judge: Judge, seed: int, steps: range) -> list[str]:
    """What it says of these steps of a run that overfits, whose layer 4 dies."""
    loss, norm = curves(seed)
    val, score = evaluations(seed)
    grads, moves = layers(seed)
    val *= 1 + 0.01 * np.maximum(0, np.arange(EVALUATIONS) - EVALUATIONS // 2)
    grads[120:, 4] = 0.0
    said = []
    for step in steps:
        said += judge.step(step, float(loss[step - 1]), float(norm[step - 1]))
        if step % 10 == 0:
            said += judge.layers(LAYERS, grads[step // 10 - 1].tolist(), moves[step // 10 - 1].tolist())
        if step % 50 == 0:
            metrics = {"val_loss": float(val[step // 50 - 1]), "eval/quiz/acc": float(score[step // 50 - 1])}
            said += judge.evaluation(step, metrics)
    return [repr(finding) for finding in said]


@pytest.mark.parametrize("cut", [1, 500, 1205, 1250, 1900])
def test_a_restored_judge_goes_on_as_if_never_stopped(cut: int) -> None:
    whole, first, resumed = (Judge(HealthConfig(), warmup_steps=WARMUP) for _ in range(3))
    expected = fed(whole, 3, range(1, STEPS + 1))
    assert sum("overfitting" in said for said in expected) == 1
    assert sum("dead layer" in said for said in expected) == 1
    said = fed(first, 3, range(1, cut + 1))
    resumed.load_state(json.loads(json.dumps(first.state(), allow_nan=False)))
    assert said + fed(resumed, 3, range(cut + 1, STEPS + 1)) == expected
    assert resumed.state() == whole.state()


def test_overfitting_is_said_again_only_after_a_new_best_and_ends_a_run_where_that_is_wanted() -> None:
    judge, quiet = (
        Judge(HealthConfig.model_validate({"overfitting": what}), warmup_steps=0) for what in ("stop", "off")
    )
    told = []
    values = [3.0, 2.8, *[3.0] * 5, 2.7, *[3.0] * 5]
    for place, value in enumerate(values):
        for step in range(SMALLEST * place, SMALLEST * (place + 1)):
            for each in (judge, quiet):
                each.step(step + 1, 3.0 - 0.001 * step, 1.0)
        told.append([finding.kind for finding in judge.evaluation(SMALLEST * (place + 1), {"val_loss": value})])
        assert quiet.evaluation(SMALLEST * (place + 1), {"val_loss": value}) == []
        assert judge.ends == (4 <= place < 7 or place >= 10)
        assert not quiet.ends
    assert [place for place, kinds in enumerate(told) if "overfitting" in kinds] == [4, 10]


def test_validation_alone_that_rises_is_no_overfitting() -> None:
    """Where the training loss rises with it, other things are wrong."""
    judge = Judge(HealthConfig(), warmup_steps=0)
    for place in range(8):
        for step in range(SMALLEST * place, SMALLEST * (place + 1)):
            judge.step(step + 1, 3.0 + 0.001 * step, 1.0)
        assert judge.evaluation(step + 1, {"val_loss": 3.0 + 0.05 * place}) == []


def test_a_task_score_falls_where_higher_is_better_and_a_perplexity_rises() -> None:
    judge = Judge(HealthConfig(), warmup_steps=0)
    steady = {"eval/quiz/acc": 0.5, "eval/text/word_perplexity": 20.0}
    for place in range(8):
        moved = {name: value * (1 + 0.01 * (-1) ** place) for name, value in steady.items()}
        assert judge.evaluation(place, moved) == []
    better = {"eval/quiz/acc": 0.8, "eval/text/word_perplexity": 12.0}
    assert judge.evaluation(8, better) == []
    worse = {"eval/quiz/acc": 0.1, "eval/text/word_perplexity": 60.0}
    assert [finding.subject for finding in judge.evaluation(9, worse)] == list(worse)
    assert judge.evaluation(10, {"eval/quiz/acc": math.nan}) == []


@pytest.mark.parametrize(("floor", "height", "exponent"), [(1.5, 8.0, 0.4), (0.0, 5.0, 0.1), (2.0, 30.0, 0.9)])
def test_the_law_is_that_of_another_fit(floor: float, height: float, exponent: float) -> None:
    """Against scipy; and what it says of later steps holds."""
    draw = np.random.default_rng(1)
    steps = np.arange(100, 2100, 60) + 0.5

    def law(step: np.ndarray, e: float, a: float, alpha: float) -> np.ndarray:
        return e + a * step**-alpha

    losses = law(steps, floor, height, exponent) + 0.005 * draw.standard_normal(len(steps))
    blocks = [Block(float(step), float(loss), 0.0) for step, loss in zip(steps, losses, strict=True)]
    later = [Block(step, law(np.array([step]), floor, height, exponent)[0], 0.0) for step in (3000.0, 3500.0, 4000.0)]
    found = fit_law(blocks, later)
    assert found is not None
    theirs, _ = curve_fit(law, steps, losses, p0=[floor, height, exponent], maxfev=20000)
    squares = float(((losses - law(steps, *theirs)) ** 2).sum())
    # The best floor on the grid fits nearly as well as the best of all.
    assert found.deviation**2 * (len(steps) - 3) <= 1.05 * squares
    assert found.deviation == pytest.approx(0.005, rel=0.4)
    mean = float(np.mean([block.loss for block in later]))
    assert found.low < mean < found.high
    assert found.high - found.low < 0.1 * mean


def test_a_course_keeps_few_blocks_and_all_of_the_run() -> None:
    course = Course()
    for step in range(1, 20_001):
        course.add(step, 3.0 + step, 1.0)
        assert len(course.blocks) < MOST
    assert len(course.blocks) >= MOST // 2
    middles = [block.step for block in course.blocks]
    assert middles == [course.size * (place + 0.5) + 0.5 for place in range(len(middles))]
    assert [block.loss for block in course.blocks] == [3.0 + middle for middle in middles]
    assert not course.add(1, math.nan, 1.0)


@pytest.mark.parametrize(
    "change",
    [
        {"course": {"size": 3, "blocks": [], "open": []}},
        {"course": {"size": 16, "blocks": [[1.0, 2.0]], "open": []}},
        {"best": [1.0]},
        {"evaluations": []},
        {"worse": "many"},
    ],
)
def test_a_state_that_makes_no_sense_is_refused(change: dict[str, object]) -> None:
    judge = Judge(HealthConfig(), warmup_steps=0)
    with pytest.raises((AttributeError, IndexError, KeyError, TypeError, ValueError)):
        judge.load_state({**judge.state(), **change})


def test_a_key_of_no_effect() -> None:
    with pytest.raises(UserError, match=r"health\.overfitting.*health\.judgements is false"):
        parse_run_config(
            "model: {n_layers: 1, d_model: 16, n_heads: 2, d_ff: 32, vocab_size: 8192, max_seq_len: 256}",
            "test",
            ["health.judgements=false", "health.overfitting=stop"],
        )
