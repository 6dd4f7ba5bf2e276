"""What data parallelism costs one rank: bytes of parameters and gradients, and bytes sent in a step, as formulas.

P, G   bytes of a rank's parameters and of their gradients (after tp, pp and ep), gradients at least float32
P', G' the same, each parameter padded so that N shards of it are equal: N ceil(rows / N) rows
N, R   ranks of the shard group and of the replicate group;   m   micro-batches of a step

    zero  accumulate    gradients between     at the       sent by one rank in a step
                        micro-batches         update
    0     last          G                     G            2 (NR-1)/NR G              all-reduce
    0     every         G                     G            m times that
    1     last          G                     G'           (N-1)/N (G' + P')          reduce-scatter, all-gather
    2     last          G                     G'/N         the same
    1, 2  every         G'/N                  G'/N         (N-1)/N (m G' + P')
    3     last          G                     G'/N         (N-1)/N (G' + m (2 P' - root))
    3     every         G'/N                  G'/N         (N-1)/N m (G' + 2 P' - root)

With replicas (hybrid sharding) each rank also sends 2 (R-1)/R G'/N, once a step however gradients accumulate. `root`
is what lies outside the blocks (embeddings, final norm, head): gathered once for a forward and its backward, where a
block is gathered for each. With float32 parameters G = P, so that ZeRO-1 and 2 send what plain data parallelism does
and ZeRO-3 at most one and a half times as much (Rajbhandari et al. 2020, 1910.02054, section 7).

Zero 1 keeps the buffers that it reduces; zero 2 frees each as soon as it is reduced. Under `every` only shards live
from one micro-batch to the next, so that zero 1 and 2 are the same. bf16 and fp16 gradients are reduced in float32,
and summed in float32 where several micro-batches accumulate before the reduction: `G` is then 2 bytes an element for
one micro-batch and 4 for several, and 4 at the update. A parameter that no other rank holds is reduced with nobody:
its whole gradient stays.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from modelworks.config import ModelConfig, ParallelConfig
from modelworks.layout.layout import Layout
from modelworks.layout.placement import V_SHAPED, ParameterPlan

Accumulate = Literal["last", "every"]


@dataclass(frozen=True)
class DataParallelMemory:
    """Bytes on one rank. parameters: while none is gathered. accumulating: gradients between two micro-batches.
    gradients: at the update."""

    parameters: int
    accumulating: int
    gradients: int


def reduction_groups(plan: ParameterPlan, layout: Layout, rank: int) -> tuple[str, ...]:
    """The groups over which one parameter's gradient is reduced one after the other; those of one rank left out.

    A parameter that ZeRO cuts is reduce-scattered over the first and its shard all-reduced over the second.
    """
    if plan.zero_dimension is not None:
        names: tuple[str, ...] = (plan.shard_group, plan.replicate_group)
    else:
        names = (plan.shard_group, plan.replicate_group) if plan.experts else ("data",)
    return tuple(name for name in names if layout.size(rank, name) > 1)


def padded_part(plan: ParameterPlan, shards: int) -> int:
    """Elements of one shard with the padding that makes all of them equal; of the whole where nothing is cut."""
    if plan.zero_dimension is None:
        return plan.computed.n_local
    shape = list(plan.computed.local_shape)
    shape[plan.zero_dimension] = -(-shape[plan.zero_dimension] // shards)
    return math.prod(shape)


def is_copied(plan: ParameterPlan) -> bool:
    """Whether the shard is not contiguous inside its parameter, so that zero 1 and 2 keep a copy to update."""
    if not plan.zero_dimension:
        return False
    whole, part = plan.computed.local_shape, plan.stored.local_shape
    return whole != part and math.prod(whole[: plan.zero_dimension]) > 1


def data_parallel_memory(
    plans: Mapping[str, ParameterPlan],
    layout: Layout,
    rank: int,
    *,
    zero: int,
    accumulate: Accumulate,
    micro_batches: int,
    itemsize: int = 4,
    gathered_whole: Collection[str] = (),
) -> DataParallelMemory:
    """Bytes for the parameters in `plans`, all trained, of `itemsize` bytes an element.

    gathered_whole: with zero 3, parameters that are treated as with zero 2: those shared by two stages of one rank.
    """
    wide = max(itemsize, 4)
    parameters = accumulating = gradients = 0
    for name, plan in plans.items():
        shards = layout.size(rank, plan.shard_group)
        cut = plan.zero_dimension is not None
        part, whole = padded_part(plan, shards), plan.computed.n_local
        if zero == 3 and cut and name not in gathered_whole:
            parameters += itemsize * part
        else:
            parameters += itemsize * (whole + (plan.stored.n_local if is_copied(plan) else 0))
        if accumulate == "every" and reduction_groups(plan, layout, rank):
            accumulating += wide * part
        else:
            accumulating += (wide if micro_batches > 1 else itemsize) * whole
        keeps_buffer = zero == 1 and accumulate == "last" and cut
        gradients += wide * part * (shards if keeps_buffer else 1)
    return DataParallelMemory(parameters, accumulating, gradients)


def memory_of_run(
    plans: Mapping[str, ParameterPlan],
    model: ModelConfig,
    parallel: ParallelConfig,
    rank: int,
    *,
    micro_batches: int,
    itemsize: int,
) -> DataParallelMemory:
    """`data_parallel_memory` of what `plan_parameters` plans for `rank` of a run of so many micro-batches a step."""
    both_ends = parallel.pp > 1 and model.tie_embeddings and parallel.pp_schedule in V_SHAPED
    return data_parallel_memory(
        plans,
        Layout.of(parallel),
        rank,
        zero=parallel.zero,
        accumulate=parallel.accumulate_reduce,
        micro_batches=micro_batches,
        itemsize=itemsize,
        gathered_whole={"embedding.weight"} if both_ends else (),
    )


def data_parallel_traffic(
    plans: Mapping[str, ParameterPlan],
    layout: Layout,
    rank: int,
    *,
    zero: int,
    accumulate: Accumulate,
    micro_batches: int,
    itemsize: int = 4,
    gathered_whole: Collection[str] = (),
    gathers: Literal["micro-batch", "step"] = "micro-batch",
    n_kv_heads: int | None = None,
) -> dict[tuple[str, str], float]:
    """(group, kind of collective) -> bytes that one rank sends in a step, reducing gradients and gathering parameters.

    gathers: with zero 3, whether parameters are gathered for every micro-batch's use or once a step. n_kv_heads: of the
    model, for parameters whose gradients are also summed over `kv`; like those of `tp` and `tied`, on their shards.
    """
    wide = max(itemsize, 4)
    times = micro_batches if accumulate == "every" else 1
    sent: dict[tuple[str, str], float] = defaultdict(float)
    for name, plan in plans.items():
        shards = layout.size(rank, plan.shard_group)
        cut = plan.zero_dimension is not None
        part = padded_part(plan, shards)
        for place, group in enumerate(reduction_groups(plan, layout, rank)):
            size, count = layout.size(rank, group), times if place == 0 else 1
            if cut and place == 0:
                sent[group, "reduce_scatter"] += count * (shards - 1) * part * wide
            else:
                sent[group, "all_reduce"] += count * 2 * (size - 1) / size * part * wide
        if cut:
            count = 1
            if zero == 3 and name not in gathered_whole and gathers == "micro-batch":
                count = micro_batches * (2 if name.startswith("blocks.") else 1)
            sent[plan.shard_group, "all_gather"] += count * (shards - 1) * part * itemsize
        for group in plan.sums:
            size = _size(group, layout, rank, n_kv_heads)
            sent[group, "all_reduce"] += 2 * (size - 1) / size * plan.stored.n_local * wide
    return dict(sent)


def _size(group: str, layout: Layout, rank: int, n_kv_heads: int | None) -> int:
    if group == "kv":
        return len(layout.kv_ranks(rank, n_kv_heads)) if n_kv_heads else 1
    return len(layout.tied_ranks(rank)) if group == "tied" else layout.size(rank, group)
