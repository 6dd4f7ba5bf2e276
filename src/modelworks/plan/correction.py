"""A learned correction over the analytic prediction: what measured rows say that the formulas do not.

The logarithm of measured over predicted step time is learned by gradient-boosted trees (for now scikit-learn's
HistGradientBoosting, behind `_boosted`) from what the formulas saw: sizes, degrees, the machine, and the parts of the
predicted step. Trees say nothing about what lies beyond their rows. A row is therefore corrected only where each of
its features lies within what was trained on, and where some trained row is as near as trained rows are to each other;
elsewhere the analytic prediction stands, untouched.

It is never applied unasked. On published measurements it makes sources that it has not seen *worse* (figures in
docs/plan-correction.md): what is left over there is each source's own. It is for rows of one's own cluster and program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from importlib import import_module

import numpy as np
from numpy.typing import NDArray

from modelworks.config import UserError
from modelworks.plan.compute import Work
from modelworks.plan.step_time import StepTime, step_time

Array = NDArray[np.float64]
Learned = Callable[[Array], Array]

FEWEST_ROWS = 40  # of which trees can learn anything
NEAR = 0.95  # quantile of the distances between trained rows and their neighbours that counts as near


@dataclass(frozen=True)
class Corrected:
    """seconds: of each row. applied: where it was in range; elsewhere the prediction is as it was."""

    seconds: Array
    applied: NDArray[np.bool_]


@dataclass(frozen=True)
class Correction:
    """What `fit_correction` learned. low, high: of each feature. rows: that were trained on, `_scaled`. reach: how far
    from the nearest of them a row may lie."""

    learned: Learned
    low: Array
    high: Array
    middle: Array
    scale: Array
    rows: Array
    reach: float

    def __call__(self, work: Work) -> Corrected:
        """The step times of these rows: corrected in range, predicted elsewhere."""
        predicted, table = _predicted(work)
        applied = self.covers(table)
        seconds = predicted.copy()
        if applied.any():
            seconds[applied] *= np.exp(self.learned(table[applied]))
        return Corrected(seconds, applied)

    def covers(self, table: Array) -> NDArray[np.bool_]:
        """Which rows of features are in the range that was trained on."""
        slack = 1e-9 * (1.0 + np.abs(self.middle))
        inside = ((table >= self.low - slack) & (table <= self.high + slack)).all(axis=1)
        near = np.zeros(len(table), dtype=bool)
        places = np.flatnonzero(inside)
        for start in range(0, len(places), 1024):  # so that a search's distances fit in memory
            part = places[start : start + 1024]
            scaled = _scaled(table[part], self.middle, self.scale)
            near[part] = _distances(scaled, self.rows).min(axis=1) <= self.reach
        return inside & near


def fit_correction(work: Work, measured: Array, sources: Sequence[str] | None = None) -> Correction:
    """Learn from rows that were measured.

    measured: step times in seconds, one for each row. sources: of the rows; a source of n rows weighs as much as the
    root of n, so that one large table does not drown the others.
    Raises UserError for too few rows, for times that are not positive, and where scikit-learn is not installed.
    """
    measured = np.asarray(measured, dtype=np.float64)
    if len(measured) < FEWEST_ROWS:
        raise UserError(f"correction: got {len(measured)} measured rows, expected at least {FEWEST_ROWS}")
    if not (np.isfinite(measured).all() and (measured > 0).all()):
        raise UserError("correction: expected measured step times in seconds, more than 0")
    predicted, table = _predicted(work)
    if len(predicted) != len(measured):
        raise UserError(f"correction: got {len(measured)} measured times for {len(predicted)} rows")
    names = list(sources) if sources is not None else [""] * len(measured)
    weights = np.array([names.count(name) ** -0.5 for name in names])
    middle, scale = table.mean(axis=0), table.std(axis=0)
    scaled = _scaled(table, middle, scale)
    distances = _distances(scaled, scaled)
    np.fill_diagonal(distances, np.inf)
    return Correction(
        learned=_boosted(table, np.log(measured / predicted), weights),
        low=table.min(axis=0),
        high=table.max(axis=0),
        middle=middle,
        scale=scale,
        rows=scaled,
        reach=float(np.quantile(distances.min(axis=1), NEAR)),
    )


def features(work: Work) -> dict[str, Array]:
    """What the trees look at, by name, a number for each row. Sizes and degrees are logarithms to the base 2."""
    shape, split, machine = work.shape, work.split, work.machine
    times = step_time(work)
    total = np.asarray(times.total, dtype=np.float64)
    sizes = {
        "tokens": split.tokens,
        "seq_len": split.seq_len,
        "width": shape.d_model / split.tp,
        "hidden": np.maximum(shape.d_ff, shape.d_expert) / split.tp,
        "heads": shape.n_heads / split.tp,
        "layers": shape.n_layers / split.pp,
        "experts": 1.0 + shape.n_experts,
        "tp": split.tp,
        "pp": split.pp,
        "cp": split.cp,
        "ep": split.ep,
        "data ranks": split.data_ranks,
        "virtual": split.virtual,
        "micro-batches": split.n_micro_batches,
        "rate": machine.product_rate,
        "network": machine.network_bandwidth,
        "seconds of a micro-batch": total / split.n_micro_batches,
    }
    flags = {
        "recompute": split.recompute,
        "zero": split.zero,
        "bytes of operands": work.numerics.linear,
        "flash": work.software.flash,
    }
    parts = {f"part {field.name}": getattr(times, field.name) / total for field in fields(StepTime)}
    logarithms = {name: np.log2(np.asarray(value, dtype=np.float64)) for name, value in sizes.items()}
    rows = np.broadcast_shapes(*(np.shape(value) for value in (*sizes.values(), *flags.values())), (1,))
    return {
        name: np.broadcast_to(np.asarray(value, dtype=np.float64), rows)
        for name, value in (logarithms | flags | parts).items()
    }


def _predicted(work: Work) -> tuple[Array, Array]:
    """Seconds, and the features as rows x features."""
    table = np.column_stack(list(features(work).values()))
    seconds = np.broadcast_to(np.asarray(step_time(work).total, dtype=np.float64), len(table))
    return seconds, table


def _scaled(table: Array, middle: Array, scale: Array) -> Array:
    """Features in standard deviations from their mean. One that is the same in all rows counts for no distance: that it
    must be that is for the bounds to say."""
    varies = scale > 1e-9 * (1.0 + np.abs(middle))
    scaled: Array = np.where(varies, (table - middle) / np.where(varies, scale, 1.0), 0.0)
    return scaled


def _distances(rows: Array, others: Array) -> Array:
    """Between each row and each of the others."""
    squares = (rows**2).sum(axis=1)[:, None] + (others**2).sum(axis=1)[None, :] - 2.0 * rows @ others.T
    distances: Array = np.sqrt(np.maximum(squares, 0.0))
    return distances


def _boosted(table: Array, target: Array, weights: Array) -> Learned:
    """Gradient-boosted trees, small and slow, so that single rows do not shape them. Another learner would go here."""
    try:
        ensemble = import_module("sklearn.ensemble")
    except ImportError as error:
        raise UserError("the learned correction needs scikit-learn: pip install scikit-learn") from error
    model = ensemble.HistGradientBoostingRegressor(
        loss="absolute_error",
        learning_rate=0.05,
        max_iter=100,
        max_leaf_nodes=8,
        min_samples_leaf=10,
        l2_regularization=1.0,
        early_stopping=False,
        random_state=0,
    )
    model.fit(table, target, sample_weight=weights)

    def learned(rows: Array) -> Array:
        answers: Array = np.asarray(model.predict(rows), dtype=np.float64)
        return answers

    return learned
