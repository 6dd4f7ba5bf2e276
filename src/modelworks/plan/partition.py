"""Layers to stages by the seconds that they take here, head included, under the memory of each rank.

The trainer's own `auto` balances FLOPs of stages, which are the same on every machine. What a step waits for is the
rank with the most seconds: a head whose vocabulary is no multiple of a tile, or that is bound by memory, costs more
than its FLOPs say, and of a rank with several stages their sum counts. `best_partition` makes the most loaded rank as
little loaded as layers that are whole allow, by dynamic programming over (ranks, layers). Such partitions are many:
the most even ones with what is left over early or late, on ranks and on their stages, are simulated, and the fastest
is taken. Looking up embeddings costs bytes only, of which the first rank's memory knows.

The layers of a rank are spread evenly over its stages, the head counting as layers. Where that does not fit, they move
to the later ones, which keep fewer micro-batches, until it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from modelworks.layout import V_SHAPED
from modelworks.layout.pipeline import least_maximum
from modelworks.plan.candidate import Candidate, candidate_work, costs_of_stages
from modelworks.plan.compute import Work
from modelworks.plan.constants import CONSTANTS, Constants
from modelworks.plan.held import FILLING, in_flight_over_step, shortened, stages_by_rank
from modelworks.plan.memory import rank_memory
from modelworks.plan.pipeline import seconds_of_step
from modelworks.plan.step_time import layer_costs
from modelworks.plan.stored import stages

Spread = tuple[int, ...]  # layers of each stage of a rank


def improved(candidate: Candidate, constants: Constants = CONSTANTS, *, headroom: float = 0.0) -> Candidate | None:
    """The same layout with the best partition by time; None where that is the trainer's own, or none fits."""
    counts = best_partition(candidate, constants, headroom=headroom)
    default = [len(stage) for stage in stages(candidate.model, candidate.parallel, candidate.seq_len)]
    if counts is None or counts == default:
        return None
    return replace(candidate, parallel=candidate.parallel.model_copy(update={"pp_partition": counts}))


def best_partition(
    candidate: Candidate, constants: Constants = CONSTANTS, *, headroom: float = 0.0
) -> list[int] | None:
    """Layers of each stage such that the most loaded rank has as little to do as possible; None where memory allows no
    partition."""
    parallel = candidate.parallel
    if parallel.pp == 1:
        return None
    work = candidate_work(candidate, constants)
    layer, head, sends = layer_costs(work)
    # the last stage exchanges with one other only
    beside = max(0.0, float(head.total) - float(sends.busy)) / float(layer.total)
    found = []
    for late in (False, True):
        spreads = [_spreads(candidate, work, rank, beside, headroom, late=late) for rank in range(parallel.pp)]
        found += [_joined(candidate, spreads, beside, late=each) for each in (False, True)]
    virtual = 1 if parallel.pp_schedule in V_SHAPED else parallel.pp_virtual
    least = min((load for _, load in filter(None, found)), default=np.inf) * (1.0 + 1e-12)
    times = {
        counts: seconds_of_step(
            parallel.pp_schedule,
            costs_of_stages(work, counts)[0],
            parallel.pp,
            int(work.split.n_micro_batches),
            virtual,
        )
        for counts, load in filter(None, found)
        if load <= least
    }
    fastest: Spread | None = min(times, key=times.__getitem__, default=None)
    return None if fastest is None else list(fastest)


def _joined(
    candidate: Candidate, spreads: list[dict[int, Spread]], beside: float, *, late: bool
) -> tuple[Spread, float] | None:
    """(layers of each stage, load of the most loaded rank), left-over layers on early or on late ranks."""
    parallel, n_layers = candidate.parallel, candidate.model.n_layers
    placed = stages_by_rank(parallel.pp_schedule, parallel.pp, parallel.pp_virtual)
    loads = np.full((parallel.pp, n_layers + 1), np.inf)
    for rank, mine in enumerate(spreads):
        for count in mine:
            loads[rank, count] = count + beside * (placed.max() in placed[rank])
    begin, end = np.meshgrid(np.arange(n_layers + 1), np.arange(n_layers + 1), indexing="ij")
    costs = [np.where(end >= begin, mine[np.maximum(end - begin, 0)], np.inf) for mine in loads]
    counts = least_maximum(costs if late else costs[::-1])
    if counts is None:
        return None
    counts = counts if late else counts[::-1]
    stage_counts = [0] * placed.size
    for rank, count in enumerate(counts):
        for stage, held in zip(placed[rank], spreads[rank][count], strict=True):
            stage_counts[stage] = held
    return tuple(stage_counts), max(float(loads[rank, count]) for rank, count in enumerate(counts))


def _spreads(
    candidate: Candidate, work: Work, rank: int, beside: float, headroom: float, *, late: bool
) -> dict[int, Spread]:
    """For every number of layers that fits on a rank, how they lie on its stages: what is left over on early or late
    ones."""
    model, parallel = candidate.model, candidate.parallel
    mine = stages_by_rank(parallel.pp_schedule, parallel.pp, parallel.pp_virtual)[rank]
    last = parallel.pp * len(mine) - 1
    least = [0 if stage in (0, last) else 1 for stage in mine]
    first, has_loss = 0 in mine, last in mine
    possible = [
        spread
        for even in _even(model.n_layers, least, beside if has_loss else 0.0, late=late)
        for spread in _moved_back(even, least)
    ]
    micro_batches = int(work.split.n_micro_batches)
    if parallel.pp_schedule != "gpipe":
        micro_batches = shortened(parallel.pp_schedule, parallel.pp, micro_batches, FILLING)
    layers = np.array(possible, dtype=np.float64)
    now = in_flight_over_step(parallel.pp_schedule, parallel.pp, micro_batches, parallel.pp_virtual)[rank]
    kept = (np.unique(now, axis=0) @ layers.T).max(axis=0)
    total = layers.sum(axis=1)
    needed = rank_memory(
        work,
        layers=total,
        held=kept / np.maximum(total, 1.0),
        ends=float(first) + float(has_loss) - float(first and has_loss and model.tie_embeddings),
        first=float(first),
        has_loss=float(has_loss),
    ).total
    fits = np.broadcast_to(needed, len(possible)) <= float(work.machine.memory) * (1.0 - headroom)
    found: dict[int, Spread] = {}
    for spread, fitting in zip(possible, fits, strict=True):
        if fitting:
            found.setdefault(sum(spread), spread)
    return found


def _even(most: int, least: list[int], beside: float, *, late: bool) -> Iterator[Spread]:
    """From the fewest layers that stages need up to `most`, each more on the stage that has least to do, a late or
    early one among equals; the last has a head."""
    counts, costs = list(least), [*least[:-1], least[-1] + beside]
    places = range(len(counts) - 1, -1, -1) if late else range(len(counts))
    yield tuple(counts)
    for _ in range(most - sum(least)):
        place = min(places, key=costs.__getitem__)
        counts[place] += 1
        costs[place] += 1
        yield tuple(counts)


def _moved_back(spread: Spread, least: list[int]) -> list[Spread]:
    """The spread, and then with one layer after the other moved from its first stage that can spare one to its last."""
    found, counts = [spread], list(spread)
    for place in range(len(counts) - 1):
        while counts[place] > least[place]:
            counts[place] -= 1
            counts[-1] += 1
            found.append(tuple(counts))
    return found
