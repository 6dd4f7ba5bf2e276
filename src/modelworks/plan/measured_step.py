"""The time of a step on a measured machine, put together from the rates of `measured` over columns.

The same parts as `step_time` has, with what differs on a CPU: nothing hides an exchange (the cores that carry it are
those that compute), and every exchange is taken at the measured rate of its own kind.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from modelworks.plan.columns import Column, Split
from modelworks.plan.compute import (
    Passes,
    Work,
    attended_keys,
    attention_products,
    expert_products,
    feed_forward_products,
)
from modelworks.plan.elements import layer_elements, rank_elements
from modelworks.plan.measured import Counts, Measured
from modelworks.plan.pipeline import Stages, makespan, stage_counts

LONGEST_BLOCKWISE = 512  # tokens of a sequence whose attention selective recomputation runs again on a CPU


@dataclass(frozen=True)
class LayerSeconds:
    """One layer and micro-batch on one rank. recompute: forward work that runs again. The exchanges: of all passes;
    forward: of them, in the forward pass."""

    linear: Passes
    attention: Passes
    between: Passes
    recompute: Column
    tensor: Column
    context: Column
    experts: Column
    gather: Column
    forward: Column

    @property
    def exchanges(self) -> Column:
        return self.tensor + self.context + self.experts + self.gather

    @property
    def passes(self) -> Passes:
        """With exchanges and what is recomputed."""
        computed = self.linear + self.attention + self.between
        later = self.exchanges - self.forward + self.recompute
        return computed + Passes(self.forward, later, 0.0)


def measured_parts(work: Work, measured: Measured, stages: Stages | None) -> dict[str, Column]:
    """Seconds of a step by the names of `StepTime`'s fields. stages: as for `step_time`."""
    shape, split = work.shape, work.split
    layer, head, send = measured_layer(work, measured), measured_head(work, measured), measured_send(work, measured)
    stages = stages or stage_counts(shape, split, head.total / layer.passes.total)
    _, idle = makespan(split, stages, *layer.passes, head.total)
    on_last = stages.last * layer.passes.total + head.total >= stages.most * layer.passes.total
    m = split.n_micro_batches
    layers, with_head = np.where(on_last, stages.last, stages.most) * m, np.where(on_last, m, 0.0)
    elements, expert_elements = rank_elements(shape, split, stages.most)
    costs = measured.costs
    sends = np.where(split.pp > 1.0, 2.0 * (split.virtual * m + split.pp - 1.0) * send, 0.0)
    return {
        "linear": layers * layer.linear.total,
        "attention": layers * layer.attention.total,
        "elementwise": layers * layer.between.total,
        "head": with_head * head.total,
        "recompute": layers * layer.recompute,
        "tensor": layers * layer.tensor,
        "context": layers * layer.context,
        "experts": layers * layer.experts,
        "gather": layers * layer.gather,
        "idle": idle,
        "sends": sends,
        "data": _reductions(work, measured, elements, expert_elements),
        "optimizer": measured.slowdown * costs.update * _updated(split, elements, expert_elements),
        "overhead": measured.slowdown * (costs.step + costs.micro_batch * m),
    }


def measured_layer(work: Work, measured: Measured) -> LayerSeconds:
    """Of the mean layer."""
    shape, split, numerics = work.shape, work.split, work.numerics
    counts = Counts.of(shape, split)
    linear = Passes(*(layer_products(work, measured, half) for half in range(3)))
    attention = Passes(layer_attention(work, measured, 0), layer_attention(work, measured, 1), 0.0)
    between = Passes(measured.between(counts, "forward"), measured.between(counts, "backward"), 0.0)
    mode = split.recompute
    again = np.where(split.seq_len <= LONGEST_BLOCKWISE, attention.forward, 0.0) + between.forward
    full = linear.forward + attention.forward + between.forward
    recompute = np.where(mode <= 1.0, mode * again, again + (mode - 1.0) * (full - again))
    runs = 1.0 + np.minimum(mode, 1.0)  # forward exchanges are made again by both modes

    sums = 2.0 * tensor_pair(work, measured)
    kv = 2.0 * split.tokens * np.maximum(shape.d_kv / split.tp, shape.head_dim) * numerics.compute
    hops = split.cp - 1.0
    hop, wide = (measured.exchange("send", split.cp, size) for size in (kv, kv * 4.0 / numerics.compute))
    rows = split.tokens * shape.experts_per_token * shape.d_model / split.stream_split
    sparse = 1.0 - shape.dense_share
    routed = 2.0 * sparse * measured.exchange("all_to_all", split.ep, rows * numerics.stream)
    gather, scatter = _gathers(work, measured)
    return LayerSeconds(
        linear=linear,
        attention=attention,
        between=between,
        recompute=recompute,
        tensor=sums * (1.0 + runs),
        context=hops * (hop * (1.0 + runs) + wide),
        experts=routed * (1.0 + runs),
        gather=2.0 * gather + scatter,
        forward=sums + hops * hop + routed + gather,
    )


def measured_head(work: Work, measured: Measured) -> Passes:
    """Of the output projection, the loss, the embedding and the final norm, as passes of the last stage."""
    around, loss = measured.outside(work.shape, work.split)
    exchanged = 2.0 * tensor_pair(work, measured)  # after the embedding and before the head, and both on the way back
    return Passes(head_products(work, measured) + loss + around + exchanged, 0.0, 0.0)


def tensor_pair(work: Work, measured: Measured) -> Column:
    """Seconds of tensor parallelism's two exchanges around a part of a layer, one micro-batch and direction.

    Sequences are cut along their second dimension, so that what is gathered or scattered is copied once; a sum is made
    in a copy.
    """
    split = work.split
    stream = split.tokens * work.shape.d_model * work.numerics.stream
    copied = np.where(split.tp > 1.0, measured.copy(stream), 0.0)
    gathered = measured.exchange("all_gather", split.tp, stream)
    scattered = measured.exchange("reduce_scatter", split.tp, stream)
    summed = measured.exchange("all_reduce", split.tp, stream)
    return np.where(split.sequence_parallel > 0, gathered + scattered + 2.0 * copied, summed + copied)


def measured_send(work: Work, measured: Measured) -> Column:
    """Of one stage's result to the next."""
    split = work.split
    size = split.tokens * work.shape.d_model * work.numerics.stream / split.stream_split
    return measured.exchange("send", split.pp, size)


def layer_products(work: Work, measured: Measured, half: int) -> Column:
    """Seconds of the products of the mean layer, one micro-batch. half: see `Measured.product`."""
    dense, sparse = work.shape.dense_share, 1.0 - work.shape.dense_share
    groups = (attention_products(work), 1.0), (feed_forward_products(work), dense), (expert_products(work), sparse)
    return sum(share * measured.product(*each, half) for products, share in groups for each in products)


def layer_attention(work: Work, measured: Measured, backward: int) -> Column:
    """Seconds of the attention of one layer and micro-batch."""
    shape, split = work.shape, work.split
    flops = 4.0 * split.tokens * attended_keys(work) * shape.d_attention / split.tp
    return measured.attention(split.seq_len, flops, backward)


def head_products(work: Work, measured: Measured) -> Column:
    """Seconds of the three products of the output projection, one micro-batch."""
    shape, split = work.shape, work.split
    columns = shape.vocab_size / split.tp
    return sum(measured.product(split.tokens, columns, shape.d_model, 1.0, half) for half in range(3))


def _gathers(work: Work, measured: Measured) -> tuple[Column, Column]:
    """Seconds of ZeRO-3's gather of a layer's parameters, and of the reduction of its gradients, a micro-batch."""
    split, numerics = work.split, work.numerics
    elements = layer_elements(work.shape, split)
    shards = np.where(split.zero >= 3.0, split.shards, 1.0)
    gathers = np.where(split.gather_every > 0, 1.0, 1.0 / split.n_micro_batches)
    reduces = np.where(split.reduce_every > 0, 1.0, 1.0 / split.n_micro_batches)
    gather = measured.exchange("all_gather", shards, elements * numerics.gathered)
    scatter = measured.exchange("reduce_scatter", shards, elements * numerics.reduced)
    return gathers * gather, reduces * scatter


def _reductions(work: Work, measured: Measured, elements: Column, expert_elements: Column) -> Column:
    """Seconds of reducing the gradients of one rank's parameters over data-parallel ranks, and of gathering what was
    updated; ZeRO-3's own are in the layers."""
    split, numerics = work.split, work.numerics
    size, zero = elements * numerics.reduced, split.zero
    whole = measured.exchange("all_reduce", np.where(zero < 1.0, split.data_ranks, 1.0), size)
    sharded = np.where((zero >= 1.0) & (zero < 3.0), split.shards, 1.0)
    scatter = measured.exchange("reduce_scatter", sharded, size)
    gather = measured.exchange("all_gather", sharded, elements * numerics.parameter)
    replicas = np.where(zero >= 1.0, split.dp_replicate, 1.0)
    across = measured.exchange("all_reduce", replicas, size / split.shards)
    copies = np.maximum(split.data_ranks / split.ep, 1.0)
    experts = measured.exchange("all_reduce", copies, expert_elements * numerics.reduced)
    times = np.where((split.reduce_every > 0) & (zero < 3.0), split.n_micro_batches, 1.0)
    return ((whole + scatter + across + experts) * times + gather) * split.trains_weights


def _updated(split: Split, elements: Column, expert_elements: Column) -> Column:
    """Elements that one rank updates."""
    shards = np.where(split.zero >= 1.0, split.shards, 1.0)
    expert_shards = np.where(split.zero >= 1.0, np.maximum(split.shards / split.ep, 1.0), 1.0)
    return (elements / shards + expert_elements / expert_shards) * split.trains_weights
