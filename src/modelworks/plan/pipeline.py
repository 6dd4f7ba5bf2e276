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
from typing import NamedTuple

import numpy as np

from modelworks.layout.pipeline import (
    Costs,
    Program,
    Rehearsal,
    Timeline,
    compute_orders,
    simulate,
)
from modelworks.plan.columns import SCHEDULES, Column, Shape, Split
from modelworks.plan.held import most_held, shortened

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


class Sends(NamedTuple):
    """Seconds of what a stage between two others exchanges for one micro-batch. busy: that each of its passes takes
    longer. hidden: from then until what it computed has arrived."""

    busy: Column
    hidden: Column


def stage_costs(layer: Sequence[float], head: Sequence[float], sends: Sends, counts: Sequence[int]) -> Costs:
    """Of stages that hold so many layers; the last also the head, and exchanges with one other only. layer, head:
    forward and the two halves backward."""
    last = len(counts) - 1
    forward, backward_input, backward_weight = (
        tuple(
            count * each + (end if stage == last else 0.0) + busy * (0.5 if stage == last else 1.0)
            for stage, count in enumerate(counts)
        )
        for each, end, busy in zip(layer, head, (sends.busy, sends.busy, 0.0), strict=True)
    )
    return Costs(forward, backward_input, backward_weight, float(sends.hidden))


def simulated(schedule: str, costs: Costs, pp: int, n_micro_batches: int, virtual: int = 1) -> Timeline:
    """What happens when, from the schedule that the trainer runs. costs: seconds by stage. Only computations are in it:
    what is sent takes `costs.send` to arrive, and no time of the ranks beyond what their costs say."""
    return simulate(_computations(schedule, pp, n_micro_batches, virtual), costs)


@dataclass(frozen=True)
class Pipelined:
    """What a simulated step comes to. held: by rank, layers times micro-batches whose activations it keeps at once."""

    makespan: float
    bubble: float
    held: tuple[float, ...]


def pipelined(
    schedule: str, costs: Costs, layers: tuple[int, ...], pp: int, n_micro_batches: int, virtual: int = 1
) -> Pipelined:
    """The same in few numbers. costs: of tuples. layers: of each stage."""
    seconds = seconds_of_step(schedule, costs, pp, n_micro_batches, virtual)
    busy = n_micro_batches * sum(map(sum, (costs.forward, costs.backward_input, costs.backward_weight)))
    return Pipelined(seconds, 1.0 - busy / (pp * seconds), most_held(schedule, layers, pp, n_micro_batches, virtual))


@lru_cache(maxsize=4096)
def seconds_of_step(schedule: str, costs: Costs, pp: int, n_micro_batches: int, virtual: int = 1) -> float:
    """When the last computation of the simulated step ends. Remembered: layouts that differ in data parallelism only
    have the same pipeline.

    Once it is filled, a pipeline repeats itself: each `pp` micro-batches more (a round of them where a rank has several
    stages) take so much longer. A shorter step is run, and where all ranks are seen to repeat themselves to its end,
    the rest is added up, which is exact; where they do not yet, a longer one, and in the end the whole step. Only where
    that has more rounds than `LONGEST` it is drawn out in a straight line: a rank that is hardly slower than another
    may overtake it later still, by less than 0.2 % in all that was tried.
    """
    if schedule == "gpipe":
        return _all_forwards_first(costs, pp, n_micro_batches)
    for n_rounds in (8, 24):
        short = shortened(schedule, pp, n_micro_batches, n_rounds)
        if n_micro_batches <= short + pp:
            break
        ends = _rehearsal(schedule, pp, short, virtual).ends(costs)
        last = max(each[-1] for each in ends)
        rise = _rise(ends, _repeated(schedule, pp, short, virtual), 1e-11 * last)
        if rise is not None:
            return last + (n_micro_batches - short) // pp * rise
    long = shortened(schedule, pp, n_micro_batches, LONGEST)
    seconds = _rehearsal(schedule, pp, long, virtual).makespan(costs)
    if long == n_micro_batches:
        return seconds
    half = shortened(schedule, pp, n_micro_batches, LONGEST // 2)
    before = _rehearsal(schedule, pp, half, virtual).makespan(costs)
    return seconds + (n_micro_batches - long) * (seconds - before) / (long - half)


LONGEST = 64  # rounds of a step that is simulated whole


def _all_forwards_first(costs: Costs, pp: int, n_micro_batches: int) -> float:
    """Seconds of a step of gpipe: micro-batches that are alike leave a line of stages one slowest stage after another,
    and on the way back every stage has long done its forwards."""
    backward = [first + second for first, second in zip(costs.backward_input, costs.backward_weight, strict=True)]
    through = sum(costs.forward) + sum(backward) + 2 * (pp - 1) * costs.send
    return through + (n_micro_batches - 1) * (max(costs.forward) + max(backward))


_WINDOW = 2  # rounds that must repeat the one before: what a rank waits for was computed at most so long ago


def _rise(ends: list[list[float]], repeated: list[tuple[int, int, int]], tolerance: float) -> float | None:
    """Seconds by which each action of the last rounds ends after the same one of the round before, None where these
    differ. As nothing waits for what is older than these rounds, another round would end as much later again."""
    rises = [
        np.diff(np.array(each[begin:stop]).reshape(-1, period), axis=0)
        for each, (begin, stop, period) in zip(ends, repeated, strict=True)
    ]
    if any(len(each) < _WINDOW for each in rises):
        return None
    least, most = min(each.min() for each in rises), max(each.max() for each in rises)
    return float(most) if most - least <= tolerance else None


@lru_cache(maxsize=512)
def _repeated(schedule: str, pp: int, n_micro_batches: int, virtual: int) -> list[tuple[int, int, int]]:
    """By rank: (begin, stop, actions of a round) of the last rounds that repeat each other."""
    found = []
    for actions in _computations(schedule, pp, n_micro_batches, virtual):
        codes = np.array([(ord(kind[-1]), len(kind), stage, micro_batch) for kind, stage, micro_batch in actions])
        later = codes + np.array([0, 0, 0, pp])
        inside = len(actions) - 4 * pp * (len(actions) // n_micro_batches)  # neither filling nor draining
        period = int(np.argmax((codes == later[inside]).all(axis=1))) - inside  # from one round to the next
        if period <= 0:
            found.append((0, 0, 1))
            continue
        same = (codes[period:] == later[:-period]).all(axis=1)
        ends = np.flatnonzero(np.diff(np.concatenate(([False], same, [False])).astype(np.int8))).reshape(-1, 2)
        begin, stop = ends[np.argmax(ends[:, 1] - ends[:, 0])]  # the longest run
        rounds = min(_WINDOW + 1, int(stop + period - begin) // period)
        found.append((int(stop) + period - rounds * period, int(stop) + period, period))
    return found


@lru_cache(maxsize=512)
def _rehearsal(schedule: str, pp: int, n_micro_batches: int, virtual: int) -> Rehearsal:
    return Rehearsal(_computations(schedule, pp, n_micro_batches, virtual))


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
