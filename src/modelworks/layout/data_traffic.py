"""What data parallelism sends in a step, collective by collective: buckets and units of ZeRO-3, program in hand.

The formulas in bytes are those of `data_memory`; here they are counted out, so that calls are exact too, and what a
pipeline adds: several stages on a rank, gatherings once a step or for each use, parameters of two stages.

    buckets  parameters of one kind, in the reverse order of the model, closed at `bucket_size` bytes of gradients;
             each is reduced once a step, or once for each backward pass, and gathered once after the update
    units    with zero 3: a block, its experts where they have ranks of their own, and what lies outside the blocks;
             a block is gathered for each use and freed after it, the rest is freed after backward passes
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from modelworks.config import ParallelConfig
from modelworks.layout.data_memory import padded_part, reduction_groups
from modelworks.layout.layout import Layout
from modelworks.layout.pipeline.actions import FULL_GRADIENT, Action
from modelworks.layout.placement import ParameterPlan
from modelworks.layout.volume import Tally


@dataclass(frozen=True)
class DataParallelStep:
    """One rank's step. stages: number -> full names of its parameters, in the module's order. actions: of this rank.

    itemsize: bytes of a stored element. n_kv_heads: of the model.
    """

    plans: Mapping[str, ParameterPlan]
    layout: Layout
    rank: int
    parallel: ParallelConfig
    stages: Mapping[int, Sequence[str]]
    actions: Sequence[Action]
    itemsize: int
    n_kv_heads: int

    def add_to(self, tally: Tally) -> None:
        """Reductions of gradients and gatherings of parameters."""
        names = dict.fromkeys(name for stage in self.stages.values() for name in stage)
        if self.parallel.zero < 3 or all(plan.zero_dimension is None for plan in self.plans.values()):
            self._add_buckets(tally, names)
            return
        rest = {name for name in names if self._owners[name] > 1 or self.plans[name].zero_dimension is None}
        self._add_units(tally, [name for name in names if name not in rest])
        self._add_buckets(tally, rest)

    @property
    def _owners(self) -> Counter[str]:
        return Counter(name for stage in self.stages.values() for name in stage)

    @property
    def _wide(self) -> int:
        return max(self.itemsize, 4)

    def _reductions(self, stages: Sequence[int]) -> int:
        """How often gradients of these stages' parameters are reduced in a step."""
        if self.parallel.accumulate_reduce == "last":
            return 1
        return sum(action.kind in FULL_GRADIENT and action.stage in stages for action in self.actions)

    def _add_buckets(self, tally: Tally, names: Mapping[str, object] | set[str]) -> None:
        for members, groups, times in self._buckets(names):
            plan = self.plans[members[0]]
            cut, shards = plan.zero_dimension is not None, self.layout.size(self.rank, plan.shard_group)
            width = sum(padded_part(self.plans[name], shards) for name in members)
            for place, group in enumerate(groups):
                ranks, calls = self.layout.size(self.rank, group), times if place == 0 else 1
                if cut and place == 0:
                    tally.part(group, "reduce_scatter", ranks, ranks * width * self._wide, calls)
                else:
                    tally.all_reduce(group, ranks, width * self._wide, calls)
            if cut:
                tally.part(groups[0], "all_gather", shards, shards * width * self.itemsize)
        self._add_partial_sums(tally, names)

    def _buckets(self, names: Mapping[str, object] | set[str]) -> list[tuple[list[str], tuple[str, ...], int]]:
        """(parameters, groups one after the other, reductions over the first) of each."""
        buckets = []
        seen: set[str] = set()
        for stage in self.stages:
            kept: dict[tuple[object, ...], list[str]] = {}
            for name in reversed(self.stages[stage]):
                groups = reduction_groups(self.plans[name], self.layout, self.rank)
                if name not in names or name in seen or not groups:
                    continue
                seen.add(name)
                kind = (self.plans[name].zero_dimension is not None, groups, self._owners[name])
                held = kept.setdefault(kind, [])
                held.append(name)
                if sum(self.plans[n].computed.n_local * self._wide for n in held) >= int(self.parallel.bucket_size):
                    buckets.append(kept.pop(kind))
            buckets += kept.values()
        found = []
        for members in buckets:
            owning = [stage for stage, held in self.stages.items() if members[0] in held]
            groups = reduction_groups(self.plans[members[0]], self.layout, self.rank)
            found.append((members, groups, self._reductions(owning)))
        return found

    def _add_units(self, tally: Tally, names: Sequence[str]) -> None:
        frees = not (self.parallel.pp > 1 and self.parallel.pp_gather == "step")
        for stage, held in self.stages.items():
            blocks, outside = _gatherings([action for action in self.actions if action.stage == stage], frees)
            units: dict[tuple[str, str], list[str]] = {}
            for name in held:
                if name in names:
                    block = name.split(".")[1] if name.startswith("blocks.") else ""
                    units.setdefault((block, self._unit_group(name)), []).append(name)
            for (block, group), members in units.items():
                ranks = self.layout.size(self.rank, group)
                width = sum(padded_part(self.plans[name], ranks) for name in members)
                tally.part(group, "all_gather", ranks, ranks * width * self.itemsize, blocks if block else outside)
                tally.part(group, "reduce_scatter", ranks, ranks * width * self._wide, self._reductions([stage]))
                replicas = self.plans[members[0]].replicate_group
                tally.all_reduce(replicas, self.layout.size(self.rank, replicas), width * self._wide)
        self._add_partial_sums(tally, names)

    def _unit_group(self, name: str) -> str:
        """Experts are a unit of their own where they are sharded over other ranks than the rest of their block."""
        same = self.layout.ranks(self.rank, "expert_shard") == self.layout.ranks(self.rank, "shard")
        return "shard" if same else self.plans[name].shard_group

    def _add_partial_sums(self, tally: Tally, names: Mapping[str, object] | Sequence[str] | set[str]) -> None:
        """One all-reduce a group, of the stored shards whose gradients are partial sums there."""
        for group in ("tp", "kv", "tied"):
            size = sum(self.plans[name].stored.n_local for name in names if group in self.plans[name].sums)
            if size:
                tally.all_reduce(group, self._size(group), size * self._wide)

    def _size(self, group: str) -> int:
        if group == "kv":
            return len(self.layout.kv_ranks(self.rank, self.n_kv_heads))
        return len(self.layout.tied_ranks(self.rank)) if group == "tied" else self.layout.size(self.rank, group)


def _gatherings(actions: Sequence[Action], frees: bool) -> tuple[int, int]:
    """How often one stage gathers each of its blocks, and what lies outside them. frees: blocks go after each use."""
    counts = {"blocks": 0, "outside": 0}
    here = {"blocks": False, "outside": False}
    for action in actions:
        if action.kind in ("unshard", "forward", "backward", "backward_input"):
            for part in counts:
                counts[part] += not here[part]
                here[part] = True
        if action.kind == "forward" and frees:
            here["blocks"] = False
        if action.kind == "reshard" or (action.kind in ("backward", "backward_input") and frees):
            here = dict.fromkeys(here, False)
    return counts["blocks"], counts["outside"]
