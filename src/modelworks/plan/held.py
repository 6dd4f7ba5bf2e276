"""Layers times micro-batches whose activations each rank of a pipeline keeps at once.

Most of a step by the rules that make the orders (`modelworks.layout.pipeline.orders`): a rank does so many forward
passes first, then a backward and a forward in turn, so that what it keeps after each forward pass is a difference of
two sums; V-shaped schedules have orders without such a rule, and these are followed. Over time: from a simulated step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from modelworks.layout import V_SHAPED
from modelworks.layout.pipeline import FULL_GRADIENT, Timeline, compute_orders, placed_stages, rounds

FILLING = 2  # rounds after which a pipeline has held the most it will


@lru_cache(maxsize=4096)
def most_held(schedule: str, layers: tuple[int, ...], pp: int, n_micro_batches: int, virtual: int) -> tuple[float, ...]:
    """By rank. layers: of each stage."""
    if schedule == "gpipe":
        return tuple(float(n_micro_batches * each) for each in layers)
    if (enough := shortened(schedule, pp, n_micro_batches, FILLING)) < n_micro_batches:
        return most_held(schedule, layers, pp, enough, virtual)
    if schedule in V_SHAPED:
        return tuple(_followed(order, layers) for order in _v_orders(schedule, pp, n_micro_batches))
    placed = stages_by_rank(schedule, pp, virtual)
    counts = np.array(layers, dtype=np.float64)[placed]
    chunks = placed.shape[1]
    parts = [len(part) for part in rounds(pp, n_micro_batches)]
    filled = np.concatenate([np.repeat(counts, part, axis=1) for part in parts], axis=1).cumsum(axis=1)
    freed = np.concatenate([np.repeat(counts[:, ::-1], part, axis=1) for part in parts], axis=1).cumsum(axis=1)
    freed = np.concatenate([np.zeros((pp, 1)), freed], axis=1)
    behind = pp - 1 - np.arange(pp)
    warmup = (chunks - 1) * parts[0] + (2 if schedule == "interleaved" else 1) * behind
    if schedule in ("zb-h1", "interleaved-zb"):
        warmup = warmup + np.arange(pp)  # a weight gradient that waits frees nothing yet
    done = np.maximum(np.arange(filled.shape[1])[None, :] - warmup[:, None], 0)
    held = filled - np.take_along_axis(freed, done, axis=1)
    return tuple(held.max(axis=1).tolist())


@lru_cache(maxsize=1024)
def stages_by_rank(schedule: str, pp: int, virtual: int) -> NDArray[np.int64]:
    """(rank, place on it): the number of the stage."""
    return np.array(placed_stages(schedule, pp, virtual))


def shortened(schedule: str, pp: int, n_micro_batches: int, n_rounds: int) -> int:
    """Micro-batches of a shorter step, in so many rounds that are alike; before those come the same as in the whole."""
    rest = n_micro_batches % pp
    longer = rest if schedule in ("interleaved", "interleaved-zb") else 0  # rounds of one more than pp, the first ones
    return min(n_micro_batches, (n_rounds + longer) * pp + rest)


def held_over_time(timeline: Timeline, layers: Sequence[int]) -> list[list[tuple[float, float]]]:
    """By rank: (seconds, layers times micro-batches whose activations it keeps from then on). layers: of each stage.

    A forward pass fills its share as it begins, and the last gradient that needs it frees it as it ends; times what a
    layer keeps, plus what does not change, these are the bytes of a rank over a step.
    """
    curves = []
    for rank in timeline.ranks:
        changes = [(timed.start, layers[timed.action.stage]) for timed in rank if timed.action.kind == "forward"]
        changes += [(timed.end, -layers[timed.action.stage]) for timed in rank if timed.action.kind in FULL_GRADIENT]
        held, curve = 0.0, []
        for seconds, change in sorted(changes):  # what is freed at a moment makes room for what begins then
            held += change
            curve.append((seconds, held))
        curves.append(curve)
    return curves


@lru_cache(maxsize=256)
def _v_orders(schedule: str, pp: int, n_micro_batches: int) -> list[list[tuple[int, int]]]:
    """By rank: (1, stage) where a forward pass keeps something, (-1, stage) where a gradient frees it."""
    return [
        [
            (1 if kind == "forward" else -1, stage)
            for kind, stage, _ in order
            if kind == "forward" or kind in FULL_GRADIENT
        ]
        for order in compute_orders(schedule, pp, n_micro_batches, 1)
    ]


def _followed(order: Sequence[tuple[int, int]], layers: tuple[int, ...]) -> float:
    signs, stages = np.array(order).T
    return float(np.max(np.cumsum(signs * np.array(layers)[stages]), initial=0.0))
