"""`Mesh`: this rank's groups along every axis, made once from a `Layout`.

Every rank makes every group in the same order, as torch.distributed demands. Groups of the same ranks share one
process group, so `shard` costs nothing where cp is 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from modelworks.layout import Layout
from modelworks.parallel.collectives import Group
from modelworks.parallel.labels import Labels
from modelworks.parallel.traffic import Traffic

GROUPS = (
    "world",
    "pp",
    "dp_replicate",
    "dp_shard",
    "cp",
    "tp",
    "dp",
    "shard",
    "data",
    "ep",
    "expert_shard",
    "expert_replicate",
)


@dataclass
class Mesh:
    """layout: how the run is split; rank: this process. traffic: what this rank sends, by axis. labels: what it is
    doing, for reports of hangs and deaths."""

    layout: Layout
    rank: int
    device: torch.device
    groups: dict[str, Group]
    traffic: Traffic
    labels: Labels

    def group(self, name: str) -> Group:
        return self.groups[name]

    def place(self, name: str) -> int:
        """This rank's place in its group of that name."""
        return self.groups[name].index

    def size(self, name: str) -> int:
        return self.groups[name].size

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and speaks to people."""
        return self.rank == 0

    def shared(self, value: Any) -> Any:
        """Rank 0's value, on every rank. For what is small and what only one should decide."""
        world = self.groups["world"]
        return value if world.size == 1 else world.gather_objects(value if self.is_main else None)[0]


def build_mesh(
    layout: Layout, device: torch.device, *, n_kv_heads: int | None = None, labels: Labels | None = None
) -> Mesh:
    """Groups of this rank. torch.distributed is initialised with `layout.world_size` ranks, unless that is 1.

    n_kv_heads: of the model, for the group `kv`. labels: told of each operation as it starts and as it is waited for.
    """
    rank = dist.get_rank() if layout.world_size > 1 else 0
    traffic, labels = Traffic(), labels or Labels()
    handles: dict[tuple[int, ...], object] = {}
    groups = {}
    for name in (*GROUPS, "kv", "tied"):
        for member in range(layout.world_size):
            ranks = _ranks(layout, member, name, n_kv_heads)
            if len(ranks) > 1 and ranks not in handles:
                whole = len(ranks) == layout.world_size
                handles[ranks] = dist.group.WORLD if whole else dist.new_group(list(ranks))
        ranks = _ranks(layout, rank, name, n_kv_heads)
        groups[name] = Group(name, ranks, rank, handles.get(ranks), traffic, labels)
    return Mesh(layout, rank, device, groups, traffic, labels)


def single_process(device: torch.device) -> Mesh:
    """The mesh of a run that is not split: every group is this process alone."""
    return build_mesh(Layout(), device)


def _ranks(layout: Layout, rank: int, name: str, n_kv_heads: int | None) -> tuple[int, ...]:
    if name == "kv":
        return layout.kv_ranks(rank, n_kv_heads) if n_kv_heads else (rank,)
    if name == "tied":
        return layout.tied_ranks(rank)
    return layout.ranks(rank, name)
