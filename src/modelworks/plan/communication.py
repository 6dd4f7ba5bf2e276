"""How long exchanges take: latency and bandwidth of each link class (Hockney's model), by algorithm.

For N ranks and a whole tensor of S bytes, each rank sends

    all-reduce            2 (N-1)/N S     ring: 2 (N-1) steps; tree: 2 log2 N steps (whichever is faster)
    all-gather            (N-1)/N S       N-1 steps              reduce-scatter: the same
    all-to-all            (N-1)/N S       to N-1 others at once
    point to point        S               one step

(Thakur, Rabenseifner and Gropp 2005.) A group over several nodes is
bound by the slower of the fast link and its share of the network: rings enter and leave each node once through every
adapter that the group has there, so g ranks in a node see g times the bandwidth of one adapter (NCCL's rings; the same
as reducing inside the nodes first, then across).
"""

from __future__ import annotations

import numpy as np

from modelworks.plan.columns import Column
from modelworks.plan.constants import Constants
from modelworks.plan.machine import Machine
from modelworks.plan.topology import Group, network_share


def bus_bandwidth(machine: Machine, group: Group, constants: Constants) -> Column:
    """Bytes a second that each rank of a ring sends."""
    inside = machine.link_bandwidth * constants.link
    across = machine.network_bandwidth * constants.network * network_share(machine, group.span) * group.inside
    return np.where(group.nodes > 1.0, np.minimum(inside, across), inside)


def _step(machine: Machine, group: Group) -> Column:
    return np.where(group.nodes > 1.0, machine.network_latency, machine.link_latency)


def all_reduce(machine: Machine, group: Group, size: Column, constants: Constants) -> Column:
    """Seconds. size: bytes of the whole tensor."""
    n = group.size
    steps = np.minimum(2.0 * (n - 1.0), 2.0 * np.log2(np.maximum(n, 1.0)) + 2.0)
    seconds = 2.0 * (n - 1.0) / n * size / bus_bandwidth(machine, group, constants) + steps * _step(machine, group)
    return np.where(n > 1.0, seconds, 0.0)


def gather_or_scatter(machine: Machine, group: Group, size: Column, constants: Constants) -> Column:
    """Seconds of an all-gather, or of a reduce-scatter. size: bytes of the whole tensor."""
    n = group.size
    steps = np.minimum(n - 1.0, np.log2(np.maximum(n, 1.0)) + group.inside)
    seconds = (n - 1.0) / n * size / bus_bandwidth(machine, group, constants) + steps * _step(machine, group)
    return np.where(n > 1.0, seconds, 0.0)


def all_to_all(machine: Machine, group: Group, size: Column, constants: Constants) -> Column:
    """Seconds. size: bytes that a rank holds, of which 1/N stay. What leaves the node goes through its adapter."""
    n = group.size
    network = machine.network_bandwidth * constants.network * network_share(machine, group.span)
    away = (n - group.inside) / n * size / network
    near = (group.inside - 1.0) / n * size / (machine.link_bandwidth * constants.link)
    return np.where(n > 1.0, np.maximum(away, near) + _step(machine, group), 0.0)


def point_to_point(
    machine: Machine, crosses: Column, size: Column, constants: Constants, *, span: Column = 1.0
) -> Column:
    """Seconds until `size` bytes have arrived. crosses: 1 where they leave the node. span: ranks that lie between."""
    network = machine.network_bandwidth * constants.network * network_share(machine, span)
    far = size / network + machine.network_latency
    near = size / (machine.link_bandwidth * constants.link) + machine.link_latency
    return np.where(crosses > 0, far, near)
