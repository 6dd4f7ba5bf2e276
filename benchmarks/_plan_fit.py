"""Fitting the constants of the planner's cost model on published step times, and what that is worth elsewhere.

Each constant starts from what is known of it (a prior: a value, and how far off it may be as a factor), so that one on
which the rows at hand say nothing stays where it was. Errors count by their logarithm, large ones less than in
proportion, and a row of a source with many rows less than one of a source with few.

Leaving one source out: the constants are fitted without it, and it is predicted with them. That is the figure to
expect for a program and a cluster that nobody has measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from modelworks.plan import Constants, Work, step_time

Array = NDArray[np.float64]
SCALE = 0.05  # of an error that is taken for granted


@dataclass(frozen=True)
class Free:
    """A constant that is fitted. prior, spread: the value that is likely, and the factor (as a logarithm) by which it
    may well be off."""

    name: str
    prior: float
    spread: float
    low: float
    high: float


FREE = (
    Free("sustained", 0.84, 0.06, 0.5, 1.0),
    Free("depth", 150.0, 0.6, 5.0, 1500.0),
    Free("wave", 0.8, 0.4, 0.01, 1.0),
    Free("memory", 0.85, 0.08, 0.6, 0.92),
    Free("elementwise_backward", 1.8, 0.15, 1.2, 4.0),
    Free("link", 0.73, 0.05, 0.3, 0.8),
    Free("network", 0.8, 0.06, 0.2, 1.0),
    Free("contention", 0.2, 0.4, 0.01, 0.9),
    Free("tensor_overlap", 0.6, 0.4, 0.01, 1.0),
    Free("off_line", 0.75, 0.2, 0.4, 1.0),
    Free("unaligned", 0.25, 0.2, 0.1, 1.0),
    Free("kernel_waits", 5e-4, 0.5, 1e-5, 4e-3),
    Free("step_overhead", 0.02, 0.3, 1e-4, 0.2),
    Free("straggler", 0.004, 0.5, 1e-5, 0.03),
    Free("gather_overlap", 0.9, 0.3, 0.1, 1.0),
    Free("pipeline_overlap", 0.5, 0.8, 0.01, 1.0),
)


def with_values(work: Work, values: Array) -> Work:
    """The same rows, with those constants."""
    constants = {free.name: float(value) for free, value in zip(FREE, values, strict=True)}
    return replace(work, constants=replace(work.constants, **constants))


def fit(work: Work, measured: Array, weights: Array, *, steps: int = 40) -> Array:
    """Values of `FREE`, by Levenberg and Marquardt's method on their logarithms."""
    prior = np.log([free.prior for free in FREE])
    spread = np.array([free.spread for free in FREE])
    low, high = np.log([free.low for free in FREE]), np.log([free.high for free in FREE])

    def residuals(point: Array) -> Array:
        errors = np.log(step_time(with_values(work, np.exp(point))).total / measured)
        soft = np.sign(errors) * SCALE * np.sqrt(2.0 * (np.sqrt(1.0 + (errors / SCALE) ** 2) - 1.0))
        return np.concatenate([weights * soft / SCALE, (point - prior) / spread])

    point, damping = prior.copy(), 1e-2
    now = residuals(point)
    for _ in range(steps):
        slopes = np.stack([(residuals(point + step) - now) / 1e-5 for step in 1e-5 * np.eye(len(point))], axis=1)
        inside = ((point > low) | (slopes.T @ now < 0)) & ((point < high) | (slopes.T @ now > 0))
        slopes = slopes * inside  # what pushes against a bound stays there
        normal = slopes.T @ slopes
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -slopes.T @ now)
        trial = np.clip(point + step, low, high)
        after = residuals(trial)
        if after @ after < now @ now:
            done = now @ now - after @ after < 1e-6 * (now @ now)
            point, now, damping = trial, after, damping / 3.0
            if done:
                break
        else:
            damping *= 4.0
    return np.exp(point)


def weights_of(sources: NDArray[np.str_]) -> Array:
    """A source counts by the three quarters' power of its rows."""
    _, place, counts = np.unique(sources, return_inverse=True, return_counts=True)
    weights = counts[place] ** -0.25
    result: Array = weights / weights.mean()
    return result


def left_out(
    fitted_on: Callable[[NDArray[np.bool_]], Work],
    predicted_as: Callable[[NDArray[np.bool_]], Work],
    sources: NDArray[np.str_],
    measured: Array,
) -> Array:
    """Step times predicted for each source with constants fitted on all others. Both functions: mask -> those rows."""
    predicted = np.zeros_like(measured)
    for source in np.unique(sources):
        out = sources == source
        values = fit(fitted_on(~out), measured[~out], weights_of(sources[~out]))
        predicted[out] = step_time(with_values(predicted_as(out), values)).total
    return predicted


def report(values: Array, constants: Constants) -> list[str]:
    """Lines: fitted value, what is in use, and the prior."""
    return [
        f"{free.name:>20}  fitted {value:.4g}, in use {getattr(constants, free.name):.4g}, prior {free.prior:g}"
        for free, value in zip(FREE, values, strict=True)
    ]
