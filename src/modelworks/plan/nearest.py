"""Nothing fits: which single change would be enough, and by how many bytes the others fall short.

Changes that the user's own limits forbid are tried first (they cost nothing but a wish), from the cheapest on; then the
optimiser's state in the host's memory; then more devices, in whole nodes. For each, the layout that needs least memory
is predicted in full.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from modelworks.plan.constants import Constants
from modelworks.plan.found import Attempt, Nearest
from modelworks.plan.job import MOST_DEVICES, Job, Limits
from modelworks.plan.table import Table

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
    """A number of devices that is enough, in whole nodes, else the last that was not.

    Found by doubling, and then among the eighths of what lies between: within an eighth of the fewest, not the fewest
    itself. Twice the devices never need more memory on the fullest one, so that the doubling misses nothing.
    """
    link = job.device.link
    node = (link.devices or 256) if link else 1
    keys = [key for key in ("dp_replicate", "dp_shard", "tp", "cp", "pp") if key in limits.fixed]
    if len(keys) == 5:  # the limits say how many devices there are
        limits = limits.without("dp_replicate", "dp_shard")
    size, failed = max(job.n_devices, node), None
    part_of_a_node = job.n_devices < node  # then the whole node is tried first
    while size < MOST_DEVICES and size <= 4096 * job.n_devices:
        below, size = size, size if part_of_a_node else size * 2
        part_of_a_node = False
        attempt = _devices(job, limits, constants, size)
        if attempt is None:
            continue
        if attempt.fits:
            between = range(below + node, size, max(node, (size - below) // 8 // node * node))
            smaller = (_devices(job, limits, constants, each) for each in between)
            found = next((each for each in smaller if each and each.fits), attempt)
            return [found]
        failed = attempt
    return [failed] if failed else []


def _devices(job: Job, limits: Limits, constants: Constants, size: int) -> Attempt | None:
    return _attempt(f"{size:,} devices", Table(job, limits, size, constants))


def _attempt(change: str, table: Table) -> Attempt | None:
    found = table.least_memory()
    if found is None:
        return None
    short = max(0.0, found.prediction.memory - found.prediction.memory_limit)
    return Attempt(change, found.candidate, found.prediction, short)
