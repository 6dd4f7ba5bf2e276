"""Where each parameter goes: how tensor and expert parallelism split it, and which ranks' gradients add up to its own.

`PLACEMENTS` is the whole of it: the shared layers declare, by the names of their parameters, along which dimension a
weight may be cut. A family built from these layers gets every axis with no code of its own. Nothing here is computed
on tensors: `plan_parameters` turns a model and a layout into what one rank holds, for clipping, optimisers,
checkpoints, verification and the planner alike.

Invariant: over all ranks, the `stored` slices that are `counted` cover each element of each parameter exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from modelworks.config import ModelConfig, ParallelConfig, parameter_shapes
from modelworks.layout.layout import Layout
from modelworks.layout.shards import ShardSpec, split_in_chunks

# Schedules whose stages go down the ranks and come back, so that the first and the last stage share a rank.
V_SHAPED = ("zbv", "dualpipev")

Kind = Literal[
    "heads", "kv_heads", "column", "row", "vocabulary", "replicated", "per_head", "expert_column", "expert_row"
]

# The end of a parameter's name -> how it is cut. Weights are (out, in); those of experts (expert, out, in).
PLACEMENTS: dict[str, Kind] = {
    "attention.q.weight": "heads",
    "attention.q.bias": "heads",
    "attention.k.weight": "kv_heads",
    "attention.k.bias": "kv_heads",
    "attention.v.weight": "kv_heads",
    "attention.v.bias": "kv_heads",
    "attention.o.weight": "row",
    "attention.o.bias": "replicated",
    "attention.q_norm.weight": "per_head",
    "attention.k_norm.weight": "per_head",
    "feed_forward.gate.weight": "column",
    "feed_forward.gate.bias": "column",
    "feed_forward.up.weight": "column",
    "feed_forward.up.bias": "column",
    "feed_forward.down.weight": "row",
    "feed_forward.down.bias": "replicated",
    "feed_forward.router.weight": "per_head",
    "feed_forward.experts.gate.weight": "expert_column",
    "feed_forward.experts.up.weight": "expert_column",
    "feed_forward.experts.down.weight": "expert_row",
    "attention_norm.weight": "replicated",
    "attention_norm.bias": "replicated",
    "feed_forward_norm.weight": "replicated",
    "feed_forward_norm.bias": "replicated",
    "final_norm.weight": "replicated",
    "final_norm.bias": "replicated",
    "position_embedding.weight": "replicated",
    "embedding.weight": "vocabulary",
    "head.weight": "vocabulary",
}
_SUFFIXES = sorted(PLACEMENTS, key=len, reverse=True)  # `position_embedding.weight` before `embedding.weight`

# What is cut by tp along which dimension. `per_head` weights are whole on every rank, but each rank sees only its
# heads (or, for a router, only its part of the experts' outputs), so their gradients are partial sums.
_TP_DIMENSION = {"heads": 0, "column": 0, "row": 1, "vocabulary": 0, "expert_column": 1, "expert_row": 2}


@dataclass(frozen=True)
class ParameterPlan:
    """One parameter on one rank.

    computed: what the rank computes with, after pipeline, tensor and expert parallelism.
    stored: what its optimiser updates and its checkpoint counts; also cut by ZeRO, along `zero_dimension`.
    sums: groups, beyond the data-parallel ones, over which this rank's gradient is only a partial sum.
    first_copy: whether this rank, of those that see the same tokens and hold the same elements, is the first.
    experts: whether it is an expert's, whose gradient is reduced over expert_shard and expert_replicate
    instead of shard and dp_replicate.
    """

    computed: ShardSpec
    stored: ShardSpec
    zero_dimension: int | None = None
    sums: tuple[str, ...] = ()
    first_copy: bool = True
    experts: bool = False

    def named(self, name: str) -> ParameterPlan:
        """The plan of another parameter that is split alike: the same one of another layer."""
        if name == self.computed.name:
            return self
        return replace(self, computed=replace(self.computed, name=name), stored=replace(self.stored, name=name))

    @property
    def shard_group(self) -> str:
        return "expert_shard" if self.experts else "shard"

    @property
    def replicate_group(self) -> str:
        return "expert_replicate" if self.experts else "dp_replicate"


@dataclass(frozen=True)
class _Here:
    """Where one rank stands in the groups that matter to parameters, worked out once for all of them."""

    tp: int
    pp: int
    groups: Mapping[str, tuple[int, int]]  # name -> (place, size)

    @classmethod
    def of(cls, layout: Layout, rank: int) -> _Here:
        coordinates = layout.coordinates(rank)
        groups = {}
        for name in ("ep", "shard", "dp_replicate", "expert_shard", "expert_replicate"):
            ranks = layout.ranks(rank, name)
            groups[name] = (ranks.index(rank), len(ranks))
        return cls(coordinates.tp, coordinates.pp, groups)

    def place(self, group: str) -> int:
        return self.groups[group][0]

    def size(self, group: str) -> int:
        return self.groups[group][1]


def placement(name: str) -> Kind:
    """How the parameter of this full name is cut. Raises KeyError for a name that no layer declares."""
    for suffix in _SUFFIXES:
        if name == suffix or name.endswith(f".{suffix}"):
            return PLACEMENTS[suffix]
    raise KeyError(f"{name}: no layer says how this parameter may be split; add it to PLACEMENTS")


def plan_parameters(
    model: ModelConfig, layout: Layout, parallel: ParallelConfig, rank: int, stages: Sequence[Sequence[int]]
) -> dict[str, ParameterPlan]:
    """Full name -> plan, for every parameter that `rank` holds, in the model's order.

    stages: the layers of each (virtual) pipeline stage, in order; `stages_of` says which of them are on which rank.
    Raises KeyError for a parameter that no layer declares.
    """
    held = stages_of(layout, parallel, rank)
    here = _Here.of(layout, rank)
    layers = {layer for stage in held for layer in stages[stage]}
    first, last = 0 in held, len(stages) - 1 in held
    plans = {}
    alike: dict[tuple[str, tuple[int, ...]], ParameterPlan] = {}  # a parameter's name within its layer, and its shape
    for name, shape in parameter_shapes(model).items():
        if not _is_held(name, model, layers, first, last):
            continue
        kind = name.split(".", 2)[2] if name.startswith("blocks.") else name, shape
        if kind not in alike:
            alike[kind] = _plan(name, shape, model, layout, parallel, here, both_ends=first and last)
        plans[name] = alike[kind].named(name)
    return plans


def stages_of(layout: Layout, parallel: ParallelConfig, rank: int) -> list[int]:
    """The numbers of the (virtual) stages on `rank`, in order.

    Stages go round the ranks once for each virtual stage; V-shaped schedules come back the way they went, so that
    the first and the last stage share a rank.
    """
    place, degree = layout.coordinates(rank).pp, layout.pp
    if degree > 1 and parallel.pp_schedule in V_SHAPED:
        return [place, 2 * degree - 1 - place]
    return [place + degree * chunk for chunk in range(parallel.pp_virtual)]


def _is_held(name: str, model: ModelConfig, layers: set[int], first: bool, last: bool) -> bool:
    if name.startswith("blocks."):
        return int(name.split(".", 2)[1]) in layers
    if name == "embedding.weight":
        return first or (last and model.tie_embeddings)
    if name == "position_embedding.weight":
        return first
    return last  # final_norm, head


def _plan(
    name: str,
    shape: tuple[int, ...],
    model: ModelConfig,
    layout: Layout,
    parallel: ParallelConfig,
    here: _Here,
    *,
    both_ends: bool,
) -> ParameterPlan:
    kind = placement(name)
    spec = ShardSpec.whole(name, shape)
    sums: list[str] = []
    first_copy = True  # of the ranks that hold these elements after tp, pp and ep
    experts = kind in ("expert_column", "expert_row")
    if kind == "kv_heads":
        copies = max(1, layout.tp // model.n_kv_heads)
        spec = spec.cut(0, layout.tp // copies, here.tp // copies)
        if copies > 1:
            sums.append("kv")
            first_copy = here.tp % copies == 0
    elif kind in _TP_DIMENSION:
        spec = spec.cut(_TP_DIMENSION[kind], layout.tp, here.tp)
    else:
        first_copy = here.tp == 0
        if layout.tp > 1 and (kind == "per_head" or parallel.sequence_parallel):
            sums.append("tp")
    if experts:
        spec = spec.cut(0, layout.ep, here.place("ep"))
    if name == "embedding.weight" and model.tie_embeddings and layout.pp > 1 and not both_ends:
        sums.append("tied")
        first_copy = first_copy and here.pp == 0
    plan = ParameterPlan(spec, spec, None, tuple(sums), first_copy, experts)
    shards, place = here.size(plan.shard_group), here.place(plan.shard_group)
    replicas = here.place(plan.replicate_group)
    stored, dimension = spec, None
    if parallel.zero and shards > 1:
        dimension = zero_dimension(spec.local_shape, shards)
        stored = split_in_chunks(spec, dimension, shards, place)
        counted = first_copy and replicas == 0
    else:
        counted = first_copy and replicas == 0 and place == 0
    return replace(plan, stored=replace(stored, counted=counted), zero_dimension=dimension)


def zero_dimension(shape: tuple[int, ...], shards: int) -> int:
    """The dimension that ZeRO cuts: the first, unless it is too short to give every rank a row and another divides."""
    if shape[0] >= shards:
        return 0
    even = [dimension for dimension, size in enumerate(shape) if size % shards == 0]
    return even[0] if even else 0
