"""Other numbers of devices: the fewest that hold the model, and those whose seconds cost least.

Numbers tried are whole nodes, and what divides a node. What cannot even store its parameters, gradients and optimiser
state when all of them are sharded over all devices is passed over: no layout stores less. Of each split a few schedules
are simulated, those that may be the fastest.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter

from modelworks.config import count_parameters
from modelworks.hardware import Device
from modelworks.plan.constants import Constants
from modelworks.plan.found import TIE, Found
from modelworks.plan.job import Job, Limits
from modelworks.plan.machine import Numerics
from modelworks.plan.placements import Placements
from modelworks.plan.table import Table

COMPARED = 6  # numbers of devices whose costs are compared


def fewest(job: Job, limits: Limits, constants: Constants, placements: Placements) -> Found | None:
    """The fastest layout of the fewest devices that hold it, fewer than the job's; None where no fewer do."""
    least = least_stored(job)
    for size in sizes(job):
        capacity = job.device.memory_gb * 1e9 * (1.0 - limits.headroom)
        if size >= job.n_devices:
            return None
        if "offload" not in limits.fixed and least / size > capacity:
            continue
        table = Table(job, limits, size, constants, placements)
        if table.may_fit() and (best := table.best(1, thorough=False)):
            return best[0]
    return None


def cheapest(job: Job, limits: Limits, constants: Constants, placements: Placements, few: Found, whole: Found) -> Found:
    """The layout of the fewest device-seconds a token; of those within a tie, the fewest devices."""
    between = [size for size in sizes(job) if few.candidate.n_devices < size < job.n_devices]
    chosen = [size for size in between if job.n_devices % size == 0][-COMPARED:]
    tables = [Table(job, limits, size, constants, placements) for size in chosen]
    found = [few, whole]
    for least, table in sorted(((each.n_devices * each.least_seconds(), each) for each in tables), key=itemgetter(0)):
        if least >= min(each.device_seconds_per_token for each in found) * job.tokens:
            break  # no layout of this number, or of those that come after, can be cheaper
        found += table.best(1, thorough=False)
    least = min(each.device_seconds_per_token for each in found)
    tied = [each for each in found if each.device_seconds_per_token <= least * (1.0 + TIE)]
    return min(tied, key=lambda each: (each.candidate.n_devices, each.device_seconds_per_token))


def sizes(job: Job, most: int | None = None) -> Iterator[int]:
    """Numbers of devices worth having, ascending up to `most` (the job's own)."""
    most = job.n_devices if most is None else most
    node = node_size(job.device)
    yield from (size for size in range(1, min(node, most + 1)) if node % size == 0)
    yield from range(node, most + 1, node)


def node_size(device: Device) -> int:
    """Devices that the fast link joins; 256 where it joins any number."""
    return (device.link.devices or 256) if device.link else 1


def least_stored(job: Job) -> float:
    """Bytes of parameters, gradients and optimiser state of the whole model, each once."""
    numerics = Numerics.of(job.precision)
    state = numerics.state if job.optimizer == "adamw" else 0.0
    return float(count_parameters(job.model).total * (numerics.parameter + numerics.gradient + state))
