"""Nothing fits: which single change would be enough, and by how many bytes the others fall short.

Changes that the user's own limits forbid are tried first (they cost nothing but a wish), from the cheapest on; then the
optimiser's state in the host's memory; then more devices, in whole nodes. For each, the layout that needs least memory
is predicted in full.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from modelworks.plan.constants import Constants
from modelworks.plan.found import Attempt, Nearest
from modelworks.plan.job import MOST_DEVICES, Job, Limits
from modelworks.plan.table import Table
from modelworks.plan.worlds import least_stored, node_size, sizes

TRIED = 32  # numbers of nodes between one that is not enough and one that is

# Keys that a user may have fixed, with what leaving each open would allow; the cheapest first.
_OPEN = {
    ("micro_batch",): "another micro_batch",
    ("recompute",): "recomputation",
    ("zero", "dp_shard", "dp_replicate", "accumulate_reduce", "pp_gather"): "another zero stage",
    ("sequence_parallel",): "sequence parallelism",
    ("pp_schedule", "pp_virtual", "pp_partition"): "another pipeline schedule",
    ("tp", "cp", "pp", "ep"): "another split (tp, cp, pp, ep)",
}


def nearest_that_fits(job: Job, limits: Limits, table: Table, constants: Constants) -> Nearest:
    """What is missing. table: of the job's own devices, which has layouts but none that fits."""
    attempts = [attempt for attempt in [_attempt("as asked for", table)] if attempt]
    for change, changed in _relaxed(limits):
        if attempt := _attempt(change, Table(job, changed, job.n_devices, constants)):
            attempts.append(attempt)
    attempts += _more_devices(job, limits, constants)
    fitting = [attempt for attempt in attempts if attempt.fits]
    return Nearest(attempts, fitting[0] if fitting else None)


def _relaxed(limits: Limits) -> Iterator[tuple[str, Limits]]:
    for keys, change in _OPEN.items():
        if mine := [key for key in keys if key in limits.fixed]:
            yield f"{change} ({', '.join(mine)} left open)", limits.without(*keys)
    if limits.max_tp is not None:
        yield "more tensor-parallel ranks (max_tp left open)", replace(limits, max_tp=None)
    if limits.headroom:
        yield "no headroom", replace(limits, headroom=0.0)
    if limits.fixed.get("offload", "none") == "none":
        yield "offload=cpu: optimiser state in the host's memory", limits.fix(offload="cpu")
    if len(limits.fixed) > 1:
        yield "every key left open", Limits(headroom=limits.headroom)


def _more_devices(job: Job, limits: Limits, constants: Constants) -> list[Attempt]:
    """The fewest devices that are enough, parts of a node and then whole nodes, else the last number that was not.

    Every number is tried from the first on that could store the model, as long as these are few; of many, those between
    the last failure and the first success in doubling, and among them one in so many.
    """
    keys = [key for key in ("dp_replicate", "dp_shard", "tp", "cp", "pp") if key in limits.fixed]
    if len(keys) == 5:  # the limits say how many devices there are
        limits = limits.without("dp_replicate", "dp_shard")
    capacity = job.device.memory_gb * 1e9 * (1.0 - limits.headroom)
    least = job.n_devices + 1
    if limits.fixed.get("offload", "none") == "none":
        least = max(least, math.ceil(least_stored(job) / capacity))
    node = node_size(job.device)
    for size in sizes(job, node - 1):
        if size >= least and (attempt := _enough(job, limits, constants, size)):
            return [attempt]
    begin = max(1, math.ceil(least / node))
    below = nodes = begin
    while nodes * node <= min(MOST_DEVICES, 4096 * max(job.n_devices, node)):
        if attempt := _enough(job, limits, constants, nodes * node):
            between = range(begin if nodes - begin <= TRIED else below + 1, nodes)
            stride = max(1, len(between) // TRIED)
            smaller = (_enough(job, limits, constants, each * node) for each in between[::stride])
            return [next(filter(None, smaller), attempt)]
        below, nodes = nodes, nodes * 2
    failed = _attempt(f"{below * node:,} devices", Table(job, limits, below * node, constants))
    return [failed] if failed else []


def _enough(job: Job, limits: Limits, constants: Constants, size: int) -> Attempt | None:
    """Of so many devices, where a layout fits."""
    table = Table(job, limits, size, constants)
    attempt = _attempt(f"{size:,} devices", table) if table.may_fit() else None
    return attempt if attempt and attempt.fits else None


def _attempt(change: str, table: Table) -> Attempt | None:
    found = table.least_memory()
    if found is None:
        return None
    short = max(0.0, found.prediction.memory - found.prediction.memory_limit)
    return Attempt(change, found.candidate, found.prediction, short)
