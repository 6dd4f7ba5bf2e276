"""The learned correction: finds a planted error in range, and leaves alone what lies outside of it."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from modelworks.config import UserError
from modelworks.config.named_models import preset
from modelworks.hardware import device
from modelworks.plan import Split, Work, step_time, work_of
from modelworks.plan.correction import FEWEST_ROWS, Correction, features, fit_correction

pytest.importorskip("sklearn")
Array = NDArray[np.float64]


def rows(n: int, seed: int, *, most_tp: int = 8) -> Work:
    """Layouts of one model, drawn."""
    draw = np.random.default_rng(seed)

    def powers(most: int) -> Array:
        return 2.0 ** draw.integers(0, int(np.log2(most)) + 1, n)

    tp, pp, micro = powers(most_tp), powers(4), powers(4)
    split = Split(
        micro_batch=micro,
        global_batch=np.full(n, 512.0),
        seq_len=np.full(n, 4096.0),
        tp=tp,
        pp=pp,
        dp_shard=128.0 / (tp * pp),
        zero=np.ones(n),
        recompute=draw.integers(0, 3, n).astype(np.float64),
    )
    return work_of(preset("llama-3-8b"), split, device("H100"))


def seconds(work: Work) -> Array:
    return np.asarray(step_time(work).total, dtype=np.float64)


def measured(work: Work) -> Array:
    """As if tensor parallelism were slower than predicted, and small micro-batches too."""
    return seconds(work) * (1.0 + 0.08 * np.log2(work.split.tp)) * np.where(work.split.micro_batch < 2, 1.15, 1.0)


@pytest.fixture(scope="module")
def correction() -> Correction:
    work = rows(400, seed=0)
    return fit_correction(work, measured(work))


def test_a_planted_error_is_found_on_rows_that_were_not_trained_on(correction: Correction) -> None:
    work = rows(200, seed=1)
    truth, predicted = measured(work), seconds(work)
    found = correction(work)
    assert found.applied.mean() > 0.8
    before, after = (np.abs(value / truth - 1.0)[found.applied].mean() for value in (predicted, found.seconds))
    assert before > 0.12
    assert after < 0.03


def test_what_lies_outside_is_left_as_predicted(correction: Correction) -> None:
    work = rows(50, seed=2)
    sequences = replace(work, split=work.split.with_(seq_len=np.full(50, 32_768.0)))
    other = replace(work, machine=work_of(preset("llama-3-8b"), work.split, device("A100")).machine)
    for strange in (sequences, other):
        found = correction(strange)
        assert not found.applied.any()
        np.testing.assert_array_equal(found.seconds, seconds(strange))


def test_inside_all_bounds_but_far_from_every_row_is_outside_too() -> None:
    """Trained at the two ends of a diagonal: its middle is inside the box of the features, and near to nothing."""
    work = rows(300, seed=3, most_tp=1)
    ends = np.where(np.arange(300) % 2 == 0, 1.0, 64.0)
    extremes = replace(work, split=work.split.with_(micro_batch=ends, global_batch=512.0 * ends))
    learned = fit_correction(extremes, measured(extremes))
    middle = replace(work, split=work.split.with_(micro_batch=np.full(300, 8.0), global_batch=np.full(300, 4096.0)))
    table = np.column_stack(list(features(middle).values()))
    between = ((table >= learned.low) & (table <= learned.high)).all(axis=1)
    assert between.any()
    assert not learned(middle).applied.any()
    assert learned(extremes).applied.mean() > 0.9


def test_the_same_rows_teach_the_same(correction: Correction) -> None:
    work = rows(400, seed=0)
    again = fit_correction(work, measured(work))
    np.testing.assert_array_equal(again(work).seconds, correction(work).seconds)
    one = work_of(preset("llama-3-8b"), Split(2.0, 512.0, 4096.0, tp=2.0, dp_shard=64.0, zero=1.0), device("H100"))
    assert correction(one).seconds.shape == (1,)


def test_a_large_source_does_not_outvote_several_small_ones() -> None:
    """150 rows of one source say that nothing is missing, 30 of each of three others that half of the time is."""
    work = rows(240, seed=4)
    names = np.random.default_rng(0).permutation(["large"] * 150 + ["a", "b", "c"] * 30)
    truth = seconds(work) * np.where(names == "large", 1.0, 1.5)
    alone, weighed = fit_correction(work, truth), fit_correction(work, truth, names.tolist())
    plain, fair = (np.median(found(work).seconds / seconds(work)) for found in (alone, weighed))
    assert plain < 1.1
    assert fair > 1.4


def test_what_cannot_be_learned_from_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    few = rows(FEWEST_ROWS - 1, seed=7)
    with pytest.raises(UserError, match=f"got {FEWEST_ROWS - 1} measured rows, expected at least {FEWEST_ROWS}"):
        fit_correction(few, measured(few))
    work = rows(60, seed=8)
    with pytest.raises(UserError, match="expected measured step times in seconds"):
        fit_correction(work, np.zeros(60))
    with pytest.raises(UserError, match="got 59 measured times for 60 rows"):
        fit_correction(work, measured(work)[1:])
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    with pytest.raises(UserError, match="needs scikit-learn: pip install scikit-learn"):
        fit_correction(work, measured(work))
