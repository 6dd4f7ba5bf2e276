"""The time of a step on a measured machine, put together from the rates of `measured` over columns.

The same parts as `step_time` has, with what differs on a CPU: nothing hides an exchange (the cores that carry it are
those that compute), and every exchange is taken at the measured rate of its own kind.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from modelworks.layout.loss_chunks import CHUNK_BYTES, LEAST_TOKENS
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
    attends_again = (split.seq_len <= LONGEST_BLOCKWISE) | (split.cp > 1.0)
    again = np.where(attends_again, attention.forward, 0.0) + between.forward
    full = linear.forward + attention.forward + between.forward
    recompute = np.where(mode <= 1.0, mode * again, again + (mode - 1.0) * (full - again))
    recompute = recompute + measured.slowdown * measured.costs.watched * np.where(mode <= 1.0, mode, 2.0 - mode)
    runs = 1.0 + np.minimum(mode, 1.0)  # forward exchanges are made again by both modes

    sums = 2.0 * tensor_pair(work, measured)
    context, context_forward = _context(work, measured, runs)
    rows = split.tokens * shape.experts_per_token * shape.d_model / split.stream_split
    sparse = 1.0 - shape.dense_share
    routed = 2.0 * sparse * measured.exchange("all_to_all", split.ep, rows * numerics.stream)
    counts_sent = sparse * measured.exchange("all_to_all", split.ep, 8.0 * shape.n_experts)
    gather, scatter = _gathers(work, measured, layer_elements(shape, split))
    return LayerSeconds(
        linear=linear,
        attention=attention,
        between=between,
        recompute=recompute,
        tensor=sums * (1.0 + runs),
        context=context,
        experts=routed * (1.0 + runs) + counts_sent * runs,
        gather=2.0 * gather + scatter,
        forward=sums + context_forward + routed + counts_sent + gather,
    )


def measured_head(work: Work, measured: Measured) -> Passes:
    """Of the output projection, the loss, the embedding and the final norm, as passes of the last stage."""
    shape, split = work.shape, work.split
    around, loss = measured.outside(shape, split)
    exchanged = 2.0 * tensor_pair(work, measured)  # after the embedding and before the head, and both on the way back
    exchanged = exchanged + _softmax_exchanges(work, measured)
    gather, scatter = _gathers(work, measured, (2.0 - shape.tied) * shape.vocab_size * shape.d_model / split.tp)
    exchanged = exchanged + gather + scatter  # one unit, which stays gathered until its gradients are reduced
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
    """Seconds of the attention of one layer and micro-batch: of whole rows, or of a rank's blocks of a ring."""
    shape, split = work.shape, work.split
    pair = 4.0 * split.tokens * shape.d_attention / split.tp  # FLOPs if each query saw one key
    whole = measured.attention(split.seq_len, pair * attended_keys(work), backward)
    ring = (split.cp > 1.0) & (split.ulysses <= 0)
    if not np.any(ring):
        return whole
    length = split.seq_len / split.cp
    blocks = measured.ring(length, pair * (length + 1.0) / 2.0, pair * (split.cp - 1.0) * length / 2.0, backward)
    return np.where(ring, blocks, whole)


def head_products(work: Work, measured: Measured) -> Column:
    """Seconds of the three products of the output projection, one micro-batch."""
    shape, split = work.shape, work.split
    columns = shape.vocab_size / split.tp
    return sum(measured.product(split.tokens, columns, shape.d_model, 1.0, half) for half in range(3))


def _context(work: Work, measured: Measured, runs: Column) -> tuple[Column, Column]:
    """Seconds of context parallelism's exchanges of a layer and micro-batch, and of them in the forward pass, which is
    made `runs` times."""
    shape, split, numerics = work.shape, work.split, work.numerics
    keys = split.tokens * np.maximum(shape.d_kv / split.tp, shape.head_dim)
    hops = split.cp - 1.0
    hop, wide = (measured.exchange("send", split.cp, 2.0 * keys * size) for size in (numerics.compute, 4.0))
    queries = split.tokens * shape.d_attention / split.tp
    turns = [(queries + 2.0 * keys) * numerics.compute, queries * numerics.compute]  # to some of the heads, and back
    turned = sum(measured.exchange("all_to_all", split.cp, size) + 2.0 * measured.copy(size) for size in turns)
    turned = np.where(split.cp > 1.0, turned, 0.0)
    forward = np.where(split.ulysses > 0, turned, hops * hop)
    return np.where(split.ulysses > 0, turned * (1.0 + runs), hops * (hop * (1.0 + runs) + wide)), forward


def _softmax_exchanges(work: Work, measured: Measured) -> Column:
    """Seconds of the loss's two sums over a vocabulary that ranks share: a number a token, and three."""
    split = work.split
    chunk = CHUNK_BYTES // (work.numerics.compute * np.ceil(work.shape.vocab_size / split.tp))
    chunk = np.minimum(np.maximum(chunk, LEAST_TOKENS), split.tokens)
    sums = (measured.exchange("all_reduce", split.tp, size * chunk) for size in (4.0, 12.0))
    return np.ceil(split.tokens / chunk) * sum(sums)


def _gathers(work: Work, measured: Measured, elements: Column) -> tuple[Column, Column]:
    """Seconds of ZeRO-3's gather of so many parameters at once, and of the reduction of their gradients, a
    micro-batch."""
    split, numerics = work.split, work.numerics
    shards = np.where(split.zero >= 3.0, split.shards, 1.0)
    gathers = np.where(split.gather_every > 0, 1.0, 1.0 / split.n_micro_batches)
    reduces = np.where(split.reduce_every > 0, 1.0, 1.0 / split.n_micro_batches)
    gather = measured.exchange("all_gather", shards, elements * numerics.gathered)
    scatter = measured.exchange("reduce_scatter", shards, elements * numerics.reduced)
    unit = np.where(shards > 1.0, measured.unit(elements), 0.0)
    return gathers * (gather + unit), reduces * (scatter + unit)


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
