"""Which axis goes over which links: ranks are numbered with tp fastest, then cp, dp_shard, dp_replicate, pp.

That is the order of `modelworks.layout`. A node holds `node` consecutive ranks, so an axis whose ranks lie `stride`
apart has `node / stride` of its group in one node, as long as the strides of the axes below it fit. What does not fit
crosses the network, and beyond a leaf switch the oversubscribed part of it; then all groups of a node share its
adapters, one adapter for each device, so that a group with g ranks in a node has g adapters' bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from modelworks.plan.columns import Column, Split
from modelworks.plan.machine import Machine


@dataclass(frozen=True)
class Group:
    """A group of ranks that exchange. size: ranks. inside: of them, those in one node (1: each in its own). span: all
    ranks from the first of them to the last."""

    size: Column
    inside: Column
    span: Column = 1.0

    @property
    def nodes(self) -> Column:
        return np.maximum(1.0, self.size / self.inside)


def group(machine: Machine, stride: Column, size: Column) -> Group:
    """`size` ranks that lie `stride` apart."""
    inside = np.clip(machine.node / stride, 1.0, size)
    return Group(size, inside, stride * size)


def network_share(machine: Machine, span: Column) -> Column:
    """What is left of the network's bandwidth for ranks so far apart: all of it below one leaf switch."""
    return np.where(span > machine.leaf, 1.0 / machine.oversubscription, 1.0)


def tensor_group(split: Split, machine: Machine) -> Group:
    return group(machine, 1.0, split.tp)


def context_group(split: Split, machine: Machine) -> Group:
    return group(machine, split.tp, split.cp)


def shard_group(split: Split, machine: Machine) -> Group:
    """dp_shard x cp: what ZeRO shards over."""
    return group(machine, split.tp, split.shards)


def replicate_group(split: Split, machine: Machine) -> Group:
    return group(machine, split.tp * split.shards, split.dp_replicate)


def data_group(split: Split, machine: Machine) -> Group:
    """All ranks that hold the same parameters."""
    return group(machine, split.tp, split.data_ranks)


def expert_group(split: Split, machine: Machine) -> Group:
    return group(machine, split.tp, split.ep)


def pipeline_crosses(split: Split, machine: Machine) -> Column:
    """Whether neighbouring stages lie in different nodes: 1 where they do."""
    return np.where(split.tp * split.data_ranks >= machine.node, 1.0, 0.0) * (split.pp > 1)
