"""What one layer, one micro-batch and one step exchange, in seconds, before and after overlap.

Volumes are those of `modelworks.layout.traffic` and `data_traffic`, which the runs measure; here they get links.

What overlaps: a transfer of c seconds beside a computation of w seconds, of which the software can hide the part o,
adds c - o min(c, w), and what is hidden still takes `contention` of itself from the computation: transfers occupy
units and memory of the same chip.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from modelworks.plan import topology
from modelworks.plan.columns import Column
from modelworks.plan.communication import all_reduce, all_to_all, gather_or_scatter, point_to_point
from modelworks.plan.compute import Work
from modelworks.plan.elements import layer_elements


@dataclass(frozen=True)
class LayerExchange:
    """Seconds of one layer's exchanges in a forward pass; a backward pass has `backward` of each (see the fields).

    tensor: in front of and after attention and feed-forward. context: keys and values round the ring.
    experts: rows to the experts and back. gather, scatter: of ZeRO-3, parameters and gradients of one layer.
    """

    tensor: Column
    context: Column
    experts: Column
    gather: Column
    scatter: Column


def layer_exchange(work: Work) -> LayerExchange:
    """Of one layer and one micro-batch, whole: as if nothing was hidden."""
    shape, split, machine, numerics, constants = work.shape, work.split, work.machine, work.numerics, work.constants
    stream = split.tokens * shape.d_model * numerics.compute
    tensor = topology.tensor_group(split, machine)
    # with sequence parallelism each all-reduce is a reduce-scatter and an all-gather: the same bytes
    sums = 2.0 * all_reduce(machine, tensor, stream, constants)
    context_group = topology.context_group(split, machine)
    keys = 2.0 * split.tokens * np.maximum(shape.d_kv / split.tp, shape.head_dim) * numerics.compute
    hop = point_to_point(machine, context_group.nodes > 1.0, keys, constants, span=context_group.span)
    context = (split.cp - 1.0) * hop
    rows = split.tokens * shape.experts_per_token * shape.d_model * numerics.compute / split.stream_split
    sparse = 1.0 - shape.dense_share
    experts = 2.0 * sparse * all_to_all(machine, topology.expert_group(split, machine), rows, constants)
    shards = topology.shard_group(split, machine)
    elements = layer_elements(shape, split)
    sharded = split.zero >= 3.0
    slower = machine.with_(network_bandwidth=machine.network_bandwidth * work.software.rings)
    gather = np.where(sharded, gather_or_scatter(slower, shards, elements * numerics.gathered, constants), 0.0)
    scatter = np.where(sharded, gather_or_scatter(slower, shards, elements * numerics.reduced, constants), 0.0)
    return LayerExchange(sums, context, experts, gather, scatter)


def beside(work: Work, transfer: Column, computation: Column, overlap: Column) -> Column:
    """Seconds that a transfer adds to a computation which can hide the part `overlap` of it."""
    hidden = overlap * np.minimum(transfer, computation)
    return transfer - hidden * (1.0 - work.constants.contention)


def send_seconds(work: Work) -> Column:
    """One stage's result to the next, whole."""
    shape, split, machine = work.shape, work.split, work.machine
    parts = np.where(work.software.scattered_sends > 0, split.tp, split.stream_split)
    size = split.tokens * shape.d_model * work.numerics.compute / parts
    crosses, apart = topology.pipeline_crosses(split, machine), split.tp * split.data_ranks
    return np.where(split.pp > 1.0, point_to_point(machine, crosses, size, work.constants, span=apart), 0.0)


def step_exchange(work: Work, elements: Column, expert_elements: Column) -> tuple[Column, Column]:
    """Seconds of one step's reduction of gradients, and of gathering what was updated, whole; not ZeRO-3's own.

    elements: of one rank's parameters, without experts'; expert_elements: those.
    """
    split, machine, numerics, constants = work.split, work.machine, work.numerics, work.constants
    data, shards = topology.data_group(split, machine), topology.shard_group(split, machine)
    replicas = topology.replicate_group(split, machine)
    size = elements * numerics.reduced
    # an expert's parameters are held by the ranks that are left of the data-parallel ones
    expert_group = topology.group(machine, split.tp * split.ep, np.maximum(split.data_ranks / split.ep, 1.0))
    experts = all_reduce(machine, expert_group, expert_elements * numerics.reduced, constants)
    whole = all_reduce(machine, data, size, constants)
    scatter = gather_or_scatter(machine, shards, size, constants)
    scatter = scatter + all_reduce(machine, replicas, size / split.shards, constants)
    gather = gather_or_scatter(machine, shards, elements * numerics.parameter, constants)
    reduce: Column = np.where(split.zero >= 1.0, scatter, whole)
    across = all_reduce(machine, replicas, size / split.shards, constants)
    reduce = np.where(split.zero >= 3.0, across, reduce)
    update = np.where((split.zero >= 1.0) & (split.zero < 3.0), gather, 0.0)
    return (reduce + experts) * split.trains_weights, update * split.trains_weights
