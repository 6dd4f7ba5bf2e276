"""Seconds below which no step of a pipeline can be, for many layouts of one pipeline at once.

A rank of the pipeline begins when the first micro-batch has come through the stages before it, computes all of its
own, and after its last gradient of inputs the stages before it have theirs to compute. It also cannot begin any
backward pass before the first micro-batch has been through all stages and back to it, and has all but the forward
passes that its order puts before still to do. Both are sums of what stages cost, hence linear in what layers, head and
sends cost: a matrix for each pipeline, times the costs of all layouts that have it.

The orders are those of `modelworks.layout.pipeline`. Invariant: a bound is never above the simulated step; where
stages are alike and nothing is sent, 1f1b, gpipe and interleaved reach it.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from modelworks.layout import V_SHAPED
from modelworks.layout.pipeline import rounds
from modelworks.plan.columns import Array
from modelworks.plan.held import shortened, stages_by_rank
from modelworks.plan.placements import Pipeline

Rows = NDArray[np.int64]

_FORWARD, _INPUT, _WEIGHT = range(3)
_COSTS = 8  # layer and head: forward, gradient of inputs, of weights; what sends take of a pass; until they arrive


def least_seconds(pipeline: Pipeline, counts: tuple[int, ...], layer: Array, head: Array, sends: Array) -> Array:
    """Of rows that have this pipeline. counts: layers of each stage. layer, head, sends: what `layer_costs` says, by
    part and row."""
    forms = _forms(pipeline.name, counts, pipeline.pp, pipeline.n_micro_batches, pipeline.virtual)
    return np.asarray((forms @ np.concatenate([layer, head, sends])).max(axis=0))


@lru_cache(maxsize=4096)
def _forms(schedule: str, counts: tuple[int, ...], pp: int, n_micro_batches: int, virtual: int) -> Array:
    """Rows of coefficients of the costs; each is a bound."""
    placed = stages_by_rank(schedule, pp, virtual)
    passes = _passes(counts)
    first, last = placed.min(axis=1), placed.max(axis=1)
    busy = n_micro_batches * passes.sum(axis=0)[placed].sum(axis=1)
    before = _before(passes[_FORWARD])
    split = schedule in ("zb-h1", "interleaved-zb")
    gradient = passes[_INPUT] if split or schedule in V_SHAPED else passes[_INPUT] + passes[_WEIGHT]
    back = _before(gradient)
    begin = before[first] + _sent(first, pp, schedule)
    tail = back[first] + _sent(first, pp, schedule) - _after_last(schedule, passes[_WEIGHT], placed, n_micro_batches)
    through = before[-1] + _sent(len(counts) - 1, pp, schedule) + back[-1] - back[last + 1]
    through = through + _sent(len(counts) - 1, pp, schedule) - _sent(last, pp, schedule)
    waiting = through + busy - _forwards(schedule, passes[_FORWARD], placed, n_micro_batches)
    return np.concatenate([begin + busy, begin + busy + tail, waiting, waiting + tail])


def _passes(counts: tuple[int, ...]) -> Array:
    """(pass, stage, cost): how often each cost is in a pass of each stage."""
    found = np.zeros((3, len(counts), _COSTS))
    for kind in (_FORWARD, _INPUT, _WEIGHT):
        found[kind, :, kind] = counts
        found[kind, -1, 3 + kind] = 1.0
        if kind != _WEIGHT:
            found[kind, :, 6] = 1.0
            found[kind, -1, 6] = 0.5  # exchanges with one other only
    return found


def _before(costs: Array) -> Array:
    """Sums over the stages before each, and over all."""
    return np.concatenate([np.zeros((1, _COSTS)), np.cumsum(costs, axis=0)])


def _sent(stage: int | Rows, pp: int, schedule: str) -> Array:
    """What arrives from one rank at another until a micro-batch is at a stage: the middle of a V is no such send."""
    hops = np.atleast_1d(np.asarray(stage, dtype=np.float64))
    if schedule in V_SHAPED:
        hops = hops - (hops >= pp)
    found = np.zeros((len(hops), _COSTS))
    found[:, 7] = hops
    return found


def _after_last(schedule: str, weight: Array, placed: Rows, n_micro_batches: int) -> Array:
    """Gradients of weights that a rank computes after its last gradient of inputs, at most, less the one of the first
    stage, which comes after all of these."""
    pp = len(placed)
    rank = np.arange(pp)[:, None]
    down, up = weight[placed[:, 0]], weight[placed[:, -1]]
    if schedule in ("zb-h1", "interleaved-zb"):
        each = down if n_micro_batches >= pp else weight[placed].max(axis=1)
        return np.asarray((rank + 1) * each - weight[0])
    if schedule == "zbv":
        return np.asarray((1 + rank) * down + rank * up - weight[0])
    if schedule == "dualpipev":
        return np.asarray((1 + rank) * (down + up))
    return np.zeros_like(down)


def _forwards(schedule: str, forward: Array, placed: Rows, n_micro_batches: int) -> Array:
    """Of the forward passes that a rank's order has before its first backward pass, at most."""
    pp, per_rank = placed.shape
    rank = np.arange(pp)
    if schedule in V_SHAPED:
        down = 2 * pp - rank - (1 if schedule == "zbv" else 0)
        down, up = (np.minimum(n_micro_batches, each)[:, None] for each in (down, rank + 1))
        return np.asarray(down * forward[placed[:, 0]] + up * forward[placed[:, 1]])
    if schedule == "gpipe":
        return np.asarray(n_micro_batches * forward[placed[:, 0]])
    parts = rounds(pp, shortened(schedule, pp, n_micro_batches, 4))
    warmup = (per_rank - 1) * len(parts[0]) + (2 if schedule == "interleaved" else 1) * (pp - 1 - rank)
    found = np.zeros((pp, _COSTS))
    left = np.minimum(warmup + 1, n_micro_batches * per_rank)
    for part in parts:
        for chunk in range(per_rank):
            now = np.minimum(left, len(part))
            found += now[:, None] * forward[placed[:, chunk]]
            left = left - now
        if not left.any():
            break
    return found
