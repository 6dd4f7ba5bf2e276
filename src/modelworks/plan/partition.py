"""Layers to stages by the seconds that they take here, head included, under the memory of each rank.

The trainer's own `auto` balances FLOPs, which are the same on every machine. What a stage takes is seconds: a head
whose vocabulary is no multiple of a tile, or that is bound by memory, costs more than its FLOPs say. `improved` places
layers by seconds, exactly (`layout.pipeline.least_maximum`), and where that differs gives the candidate a
`pp_partition` of its own. Looking up embeddings costs bytes only, of which the first stage's memory limit knows.

With several stages on a rank, each is allowed its share of the rank's memory, so that the answer fits but need not be
the very best of those that do.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from modelworks.layout.pipeline import least_maximum, peak_formula
from modelworks.plan.candidate import Candidate, candidate_work
from modelworks.plan.compute import Work
from modelworks.plan.constants import CONSTANTS, Constants
from modelworks.plan.memory import rank_memory
from modelworks.plan.rank_bytes import ranks_of
from modelworks.plan.step_time import layer_costs
from modelworks.plan.stored import stages


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
    """Layers of each stage such that the costliest takes as little as possible; None where memory allows none."""
    work = candidate_work(candidate, constants)
    n_layers = candidate.model.n_layers
    n_stages = len(stages(candidate.model, candidate.parallel, candidate.seq_len))
    layer, head, sends = layer_costs(work)
    beside = max(0.0, float(head.total) - float(sends.busy))  # the last stage exchanges with one other only
    most = most_layers(candidate, work, n_stages, headroom)
    return least_maximum([float(layer.total)] * n_layers, n_stages, last=beside, most=most)


def most_layers(candidate: Candidate, work: Work, n_stages: int, headroom: float) -> list[int]:
    """Layers that fit on each stage, with all that lies beside them."""
    parallel, n_layers = candidate.parallel, candidate.model.n_layers
    if parallel.pp == 1:
        return [n_layers]
    chunks = n_stages // parallel.pp
    limit = float(work.machine.memory) * (1.0 - headroom)
    micro_batches = int(work.split.n_micro_batches)
    layers = np.arange(n_layers + 1, dtype=np.float64)
    most = [0] * n_stages
    placed = [[stage] for stage in range(n_stages)]  # numbers of stages instead of layers
    for place, rank in enumerate(ranks_of(parallel, placed)):
        held = peak_formula(parallel.pp_schedule, parallel.pp, micro_batches, parallel.pp_virtual, rank=place) / chunks
        ends, has_loss = rank.ends(candidate.model), float(rank.last)
        needed = rank_memory(
            work, layers=layers, held=held, ends=ends, first=float(rank.first), has_loss=has_loss
        ).total
        fitting = int(np.sum(np.broadcast_to(needed, len(layers)) <= limit)) - 1
        for stage in rank.layers:
            most[stage] = max(fitting, 0) // chunks
    return most
