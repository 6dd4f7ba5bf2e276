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
from modelworks.plan.columns import Array

FILLING = 2  # rounds after which a pipeline has held the most it will


@lru_cache(maxsize=4096)
def most_held(schedule: str, layers: tuple[int, ...], pp: int, n_micro_batches: int, virtual: int) -> tuple[float, ...]:
    """By rank. layers: of each stage."""
    counts = np.array(layers, dtype=np.float64)[stages_by_rank(schedule, pp, virtual)]
    if schedule == "gpipe":
        return tuple((n_micro_batches * counts[:, 0]).tolist())
    now = in_flight_over_step(schedule, pp, shortened(schedule, pp, n_micro_batches, FILLING), virtual)
    return tuple((now @ counts[:, :, None]).max(axis=(1, 2)).tolist())


@lru_cache(maxsize=1024)
def in_flight_over_step(schedule: str, pp: int, n_micro_batches: int, virtual: int) -> Array:
    """(rank, forward pass of it, place on it): micro-batches that each of its stages keeps after that pass."""
    if schedule in V_SHAPED:
        return _followed(schedule, pp, n_micro_batches)
    chunks = stages_by_rank(schedule, pp, virtual).shape[1]
    parts = [len(part) for part in rounds(pp, n_micro_batches)]
    forwards = np.concatenate([np.repeat(np.eye(chunks), part, axis=0) for part in parts]).cumsum(axis=0)
    backwards = np.concatenate([np.repeat(np.eye(chunks)[::-1], part, axis=0) for part in parts]).cumsum(axis=0)
    freed = np.concatenate([np.zeros((1, chunks)), backwards])
    behind = pp - 1 - np.arange(pp)
    warmup = n_micro_batches if schedule == "gpipe" else (chunks - 1) * parts[0]
    warmup = warmup + (2 if schedule == "interleaved" else 1) * behind
    if schedule in ("zb-h1", "interleaved-zb"):
        warmup = warmup + np.arange(pp)  # a weight gradient that waits frees nothing yet
    done = np.maximum(np.arange(len(forwards))[None, :] - warmup[:, None], 0)
    return np.asarray(forwards[None] - freed[done])


def _followed(schedule: str, pp: int, n_micro_batches: int) -> Array:
    """The same from the order itself."""
    found = np.zeros((pp, 2 * n_micro_batches, 2))
    for rank, order in enumerate(compute_orders(schedule, pp, n_micro_batches, 1)):
        now, place = [0, 0], 0
        for kind, stage, _ in order:
            if kind == "forward":
                now[stage >= pp] += 1
                found[rank, place] = now
                place += 1
            elif kind in FULL_GRADIENT:
                now[stage >= pp] -= 1
    return found


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
