"""Runs without trouble, drawn: loss and gradient norm of each step, figures of layers, evaluations. By seed alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

STEPS, WARMUP = 2000, 100
EVALUATIONS, QUESTIONS = 40, 100
LAYERS = ["embedding", *(f"blocks.{place}" for place in range(8)), "final_norm", "head"]
Curve = NDArray[np.float64]


def curves(seed: int) -> tuple[Curve, Curve]:
    """Loss and gradient norm as of a run: a power law with a bend, noise that is a share of the level with heavy tails
    (Student's t with 6 degrees), a norm that falls, then grows, in ratios with tails as heavy."""
    draw = np.random.default_rng(seed)
    step = np.arange(1, STEPS + 1)
    level = 1.5 + 8.0 * (1 + step / 20) ** -draw.uniform(0.25, 0.5)
    loss = level * (1 + draw.uniform(0.005, 0.03) * draw.standard_t(6, STEPS))
    trend = np.log(0.3) + 3 * np.exp(-step / 40) + draw.uniform(-0.3, 1.0) * step / STEPS
    norm = np.exp(trend + draw.uniform(0.05, 0.25) * draw.standard_t(6, STEPS))
    return loss, norm


def evaluations(seed: int) -> tuple[Curve, Curve]:
    """Validation loss, close above the training loss's law, and the share of `QUESTIONS` answered rightly."""
    draw = np.random.default_rng([seed, 1])
    step = np.arange(1, EVALUATIONS + 1) * STEPS / EVALUATIONS
    level = 1.55 + 8.0 * (1 + step / 20) ** -draw.uniform(0.25, 0.5)
    loss = level * (1 + 0.003 * draw.standard_t(6, EVALUATIONS))
    able = draw.uniform(0.2, 0.3) + draw.uniform(0.0, 0.4) * (1 - np.exp(-step / STEPS))
    return loss, draw.binomial(QUESTIONS, able) / QUESTIONS


def layers(seed: int, rows: int = STEPS // 10) -> tuple[Curve, Curve]:
    """(rows, layers): gradient norms and updates over weights, each layer with a level and a drift of its own."""
    draw = np.random.default_rng([seed, 2])
    level, drift = draw.normal(-2, 1, len(LAYERS)), draw.normal(0, 0.5, len(LAYERS))
    share = np.arange(rows)[:, None] / rows
    noise = draw.standard_t(6, (2, rows, len(LAYERS)))
    norms = np.exp(level + drift * share + 0.3 * noise[0])
    return norms, 1e-3 * np.exp(-share + 0.3 * noise[1])
