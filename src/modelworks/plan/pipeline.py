"""The pipeline: which stage takes how long, and what that makes of a step.

Two ways to the same answer. `makespan` is a closed form over columns, for searches. `simulated` runs the very
schedule that the trainer runs (`modelworks.layout.pipeline`), stage by stage, for the candidates that are looked at.

With stages of times t_i for one micro-batch, m micro-batches and v stages on each of p ranks (t_i all of a rank's),

    makespan = m max t_i + idle,   idle = (sum of t_i - max t_i) / v x share

(Narayanan et al. 2021, 2104.04473: (p - 1) t / v for equal stages), and (p - m) (1 - 1 / v) t more where m < p. share:
1 for gpipe, 1f1b, interleaved; for the zero-bubble ones what is left of f + b + w when weight gradients fill the bubble
(`layout.pipeline.formulas`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from modelworks.layout.pipeline import (
    FULL_GRADIENT,
    Action,
    Costs,
    Program,
    Rehearsal,
    Timeline,
    compute_orders,
    simulate,
)
from modelworks.plan.columns import SCHEDULES, Column, Shape, Split

_ZERO_BUBBLE = tuple(SCHEDULES.index(name) for name in ("zb-h1", "interleaved-zb"))
V_SHAPED = tuple(SCHEDULES.index(name) for name in ("zbv", "dualpipev"))


@dataclass(frozen=True)
class Stages:
    """Layers by rank. most: of any rank without the head. last: beside the head. first: beside the embedding. total: of
    all ranks."""

    most: Column
    last: Column
    first: Column
    total: Column


def stage_counts(shape: Shape, split: Split, head: Column) -> Stages:
    """Layers of the ranks. head: what the head costs, in layers.

    Balanced stages make the costliest as cheap as possible, as `layout.pipeline.partition` does: the last holds j
    layers and the head, the others at most n, where n + head shrinks as j does. Even stages hold the same number.
    """
    layers, ranks, chunks = shape.n_layers, split.pp, split.virtual
    stages = ranks * chunks
    even = layers / ranks
    best_cost: Column = np.inf
    best_most, best_last = even, even
    for more in range(4):
        inner = np.ceil(layers / stages) + more
        last = np.clip(layers - (stages - 1.0) * inner, 0.0, inner)
        cost = np.maximum(inner, last + head)
        better = cost < best_cost
        best_most = np.where(better, inner, best_most)
        best_last = np.where(better, last, best_last)
        best_cost = np.where(better, cost, best_cost)
    # a rank's other chunks are inner ones
    most, last = best_most * chunks, best_last + best_most * (chunks - 1.0)
    divides = np.mod(layers, stages) == 0
    uniform = (split.even > 0) & divides
    single = ranks <= 1.0
    most = np.where(single | uniform, even, np.minimum(most, layers))
    last = np.where(single | uniform, even, last)
    return Stages(most, last, most, layers)


def makespan(
    split: Split, stages: Stages, forward: Column, backward_input: Column, backward_weight: Column, head: Column
) -> tuple[Column, Column]:
    """(seconds computing on the costliest rank, seconds idle there).

    forward, backward_input, backward_weight: of a layer and micro-batch. head: all passes of the head.
    """
    layer = forward + backward_input + backward_weight
    inner, last = stages.most * layer, stages.last * layer + head
    most = np.maximum(inner, last)
    others = np.where(split.pp > 1.0, np.maximum(stages.total * layer + head - most, 0.0), 0.0)
    schedule = split.schedule
    zero_bubble = np.maximum(np.maximum(forward + backward_input - backward_weight, forward), backward_input) / layer
    share = np.where(np.isin(schedule, _ZERO_BUBBLE), zero_bubble, 1.0)
    share = np.where(np.isin(schedule, V_SHAPED), forward / layer, share)
    # with fewer micro-batches than ranks, those that come round again find their rank waiting for them
    missing = np.maximum(split.pp - split.n_micro_batches, 0.0) / np.maximum(split.pp - 1.0, 1.0)
    unfilled = missing * (1.0 - 1.0 / split.virtual) * others
    return split.n_micro_batches * most, share * (others / split.virtual + unfilled)


def stage_costs(layer: Sequence[float], head: Sequence[float], send: float, counts: Sequence[int]) -> Costs:
    """Of stages that hold so many layers, the last also the head. layer, head: forward and the two halves backward."""
    last = len(counts) - 1
    forward, backward_input, backward_weight = (
        tuple(count * each + (end if stage == last else 0.0) for stage, count in enumerate(counts))
        for each, end in zip(layer, head, strict=True)
    )
    return Costs(forward, backward_input, backward_weight, send)


def simulated(schedule: str, costs: Costs, pp: int, n_micro_batches: int, virtual: int = 1) -> Timeline:
    """What happens when, from the schedule that the trainer runs. costs: seconds by stage. Only computations are in it:
    what is sent takes `costs.send` to arrive, and no time of the ranks."""
    return simulate(_computations(schedule, pp, n_micro_batches, virtual), costs)


@dataclass(frozen=True)
class Pipelined:
    """What a simulated step comes to. held: by rank, layers times micro-batches whose activations it keeps at once."""

    makespan: float
    bubble: float
    held: tuple[float, ...]


@lru_cache(maxsize=1024)
def pipelined(
    schedule: str, costs: Costs, layers: tuple[int, ...], pp: int, n_micro_batches: int, virtual: int = 1
) -> Pipelined:
    """The same in few numbers, remembered: layouts that differ in data parallelism only have the same pipeline.

    costs: of tuples. layers: of each stage.
    """
    program = _computations(schedule, pp, n_micro_batches, virtual)
    seconds = _rehearsal(schedule, pp, n_micro_batches, virtual).makespan(costs)
    busy = n_micro_batches * sum(map(sum, (costs.forward, costs.backward_input, costs.backward_weight)))
    held = tuple(_most_held(actions, layers) for actions in program)
    return Pipelined(seconds, 1.0 - busy / (pp * seconds), held)


@lru_cache(maxsize=4096)
def estimated_makespan(schedule: str, costs: Costs, pp: int, n_micro_batches: int, virtual: int = 1) -> float:
    """The same seconds sooner: once it is filled, a pipeline repeats itself with every micro-batch, or every round of
    them, so that a step of so many more takes so much longer. Within a percent even where stages are very uneven."""
    m = n_micro_batches
    repeats = schedule != "gpipe" and (m % pp == 0 or schedule not in ("interleaved", "interleaved-zb"))
    short = _FILLED * pp + m % pp
    if not repeats or m <= short + 2 * pp:
        return _rehearsal(schedule, pp, m, virtual).makespan(costs)
    before, after = (_rehearsal(schedule, pp, short + more, virtual).makespan(costs) for more in (0, pp))
    return after + (m - short - pp) // pp * (after - before)


_FILLED = 3  # times as many micro-batches as ranks, after which a step repeats itself


@lru_cache(maxsize=256)
def _rehearsal(schedule: str, pp: int, n_micro_batches: int, virtual: int) -> Rehearsal:
    return Rehearsal(_computations(schedule, pp, n_micro_batches, virtual))


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


def _most_held(actions: Sequence[Action], layers: tuple[int, ...]) -> float:
    now = most = 0
    for kind, stage, _ in actions:
        if kind == "forward":
            now += layers[stage]
            most = max(most, now)
        elif kind in FULL_GRADIENT:
            now -= layers[stage]
    return float(most)


@lru_cache(maxsize=16)
def _computations(schedule: str, pp: int, n_micro_batches: int, virtual: int) -> Program:
    return tuple(map(tuple, compute_orders(schedule, pp, n_micro_batches, virtual)))


def in_flight(split: Split, *, last: bool = False) -> Column:
    """Micro-batches that the first (or last) rank holds at once, in units of all its layers; `peak_formula`."""
    p, v, m = split.pp, split.virtual, split.n_micro_batches
    rank = p - 1.0 if last else 0.0 * p
    first_round = np.ceil(m / np.maximum(1.0, np.floor(m / p)))
    by_schedule = {
        "gpipe": m,
        "1f1b": p - rank,
        "interleaved": (v - 1.0) * first_round + 2.0 * (p - rank) - 1.0,
        "zb-h1": p,
        "interleaved-zb": (v - 1.0) * first_round + p,
        "zbv": np.minimum(m + rank + 1.0, 2.0 * p),
        "dualpipev": np.minimum(m + rank + 1.0, 2.0 * p + 1.0),
    }
    held = np.select([split.schedule == SCHEDULES.index(name) for name in by_schedule], list(by_schedule.values()), m)
    return np.where(p > 1.0, np.minimum(v * m, held) / v, 1.0)
