"""Bytes on the fullest rank, by what they hold, over columns.

Activations of one layer, for T = s b / cp tokens of a micro-batch and e = 2 bytes, generalise Korthikanti et al. 2022
(2205.05198, equations 1 to 6), which they equal for a GPT layer with dropout (d_ff = 4 h, e = 2):

    none             s b h (10 + 24 / t + 5 a s / (h t))        with sequence parallelism  s b h / t (34 + 5 a s / h)
    selective        the same without 5 a s / h
    full             2 s b h, the layer's input; and one layer's worth while it is run again

Term by term, an element of the stream being `stream` bytes and one of a product's operand `compute` bytes:

    stream (split by sequence parallelism only)   two norms' inputs, the two inputs of the products that follow them,
                                                  two dropout masks of a byte
    heads (split by tp)                           q, k, v, and the input of the output projection
    hidden (split by tp)                          the activation's inputs (two where gated) and its output
    scores (split by tp)                          softmax's output, dropout's mask and output; flash attention keeps
                                                  one number a query and head instead
    experts                                       rows copied to the experts, their hidden widths, their results

Where operations are not fused (our own trainer), autograd keeps more: see `_eager`. Our selective recomputation keeps
the results of products and of attention, and computes what lies between them again.

Everything that a stage holds is there once for each micro-batch in flight (`pipeline.in_flight`).

Parameters, gradients and optimiser state here are closed forms, for searches: within a few rows' padding of
`modelworks.layout`, whose exact bytes `stored` gives for one candidate.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from modelworks.layout.loss_chunks import CHUNK_BYTES, LEAST_TOKENS
from modelworks.plan.columns import Column, Split
from modelworks.plan.compute import Work
from modelworks.plan.elements import layer_elements, layer_expert_elements
from modelworks.plan.pipeline import V_SHAPED, Stages, in_flight, stage_counts


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest rank; they sum to `total`.

    working: of the layer that is being recomputed. gather: parameters of ZeRO-3 while in use. buffers: of exchanges.
    slack: what the allocator holds and cannot use. context: of the device's driver, libraries and communicators.
    """

    parameters: Column
    gradients: Column
    optimizer: Column
    activations: Column
    working: Column
    loss: Column
    gather: Column
    buffers: Column
    slack: Column
    context: Column

    @property
    def total(self) -> Column:
        return sum(getattr(self, field.name) for field in fields(self))


def memory(work: Work, stages: Stages | None = None) -> Memory:
    """Of every row: the first or the last stage, whichever holds more. stages: layers of the ranks, where they are
    known; else balanced ones."""
    first, last = _stage(work, stages, last=False), _stage(work, stages, last=True)
    more = last.total > first.total
    return Memory(
        **{
            field.name: np.where(more, getattr(last, field.name), getattr(first, field.name))
            for field in fields(Memory)
        }
    )


def layer_activations(work: Work) -> Column:
    """Bytes that one layer (the mean over dense and sparse ones) keeps of one micro-batch, recomputation as chosen."""
    mode = work.split.recompute
    none, selective, full = (kept_of_layer(work, kind) for kind in ("none", "selective", "full"))
    return np.where(mode <= 1.0, none + mode * (selective - none), selective + (mode - 1.0) * (full - selective))


def kept_of_layer(work: Work, mode: str) -> Column:
    """Bytes of one micro-batch between its forward and its backward pass, if layers recomputed as `mode` says."""
    shape, split, numerics, software = work.shape, work.split, work.numerics, work.software
    tokens, tp = split.tokens, split.tp
    stream = tokens * shape.d_model / split.stream_split
    if mode == "full":
        return stream * numerics.stream
    masks = np.where(shape.dropout > 0, 2.0, 0.0)
    # a narrow product keeps its operand as it was cast; attention keeps its wide result besides
    operand = numerics.linear
    cast = np.where(operand < numerics.compute, operand, 0.0)
    kept = stream * (2.0 * numerics.stream + 2.0 * operand + masks)
    keys = np.maximum(shape.d_kv / tp, shape.head_dim)
    kept = kept + tokens * (
        numerics.compute * (2.0 * shape.d_attention / tp + 2.0 * keys) + cast * shape.d_attention / tp
    )
    hidden = (shape.matrices - 1.0) * numerics.compute + operand
    kept = kept + shape.dense_share * tokens * hidden * shape.d_ff / tp
    routed = (1.0 - shape.dense_share) * tokens * shape.experts_per_token
    kept = kept + routed * ((numerics.compute + operand) * shape.d_model + hidden * shape.d_expert / tp)
    flash = 4.0 * tokens * shape.n_heads / tp
    if mode == "selective":
        return np.where(software.flash > 0, _products(work) + flash, kept)
    kept = kept + np.where(software.eager > 0, _eager(work), 0.0)
    return kept + np.where(software.flash > 0, flash, _score_bytes(work))


def _eager(work: Work) -> Column:
    """What autograd keeps besides where nothing is fused: normalised values in float32 (and what was cast from them),
    queries and keys before their rotation, and the gate after its activation."""
    shape, split, numerics = work.shape, work.split, work.numerics
    tokens, tp = split.tokens, split.tp
    stream = tokens * shape.d_model / split.stream_split
    narrow = np.where(numerics.stream < 4.0, 2.0, 0.0)
    kept = np.where(shape.norms == 1.0, 2.0 * stream * (4.0 + narrow), 0.0)
    heads = tokens * (shape.d_attention / tp + np.maximum(shape.d_kv / tp, shape.head_dim))
    kept = kept + heads * shape.rotary * numerics.compute
    kept = kept + heads * shape.qk_norm * np.where(numerics.compute < 4.0, 8.0, 4.0)
    gate = tokens / tp * (shape.matrices == 3.0) * numerics.compute
    sparse = 1.0 - shape.dense_share
    return kept + gate * (shape.dense_share * shape.d_ff + sparse * shape.experts_per_token * shape.d_expert)


def copied_weights(work: Work, *, kept: bool = False) -> Column:
    """Bytes of a layer's weights that a forward pass copies and keeps: cast, or put side by side for one product.
    kept: while it is recomputed too."""
    shape, split, numerics = work.shape, work.split, work.numerics
    queries_keys_values = shape.d_model * (shape.d_attention + 2.0 * shape.d_kv)
    gate_and_up = np.where(shape.matrices == 3.0, 2.0 * shape.d_model * shape.d_ff, 0.0) * shape.dense_share
    packed = queries_keys_values + gate_and_up
    everything = shape.attention_weights + shape.dense_share * shape.feed_forward_weights
    everything = everything + (1.0 - shape.dense_share) * shape.expert_weights / split.ep
    elements = np.where(numerics.parameter > numerics.compute, everything, packed) / split.tp
    keeps = np.where((work.split.recompute > 0.0) & (not kept), 0.0, 1.0) * work.software.eager
    return keeps * elements * numerics.compute


def _products(work: Work) -> Column:
    """The layer's input and the results of its products and of attention: what our selective mode keeps."""
    shape, split, numerics = work.shape, work.split, work.numerics
    tokens, tp = split.tokens, split.tp
    stream = tokens * shape.d_model / split.stream_split
    keys = np.maximum(shape.d_kv / tp, shape.head_dim)
    attention = 2.0 * shape.d_attention / tp + 2.0 * keys
    dense = shape.dense_share * (shape.matrices - 1.0) * shape.d_ff / tp
    experts = (shape.matrices - 1.0) * shape.d_expert / tp + shape.d_model
    routed = (1.0 - shape.dense_share) * shape.experts_per_token * experts
    results = tokens * (attention + dense + routed) + stream * (1.0 + shape.dense_share)
    return stream * numerics.stream + results * numerics.compute


def _score_bytes(work: Work) -> Column:
    shape, split, numerics = work.shape, work.split, work.numerics
    each = np.where(shape.dropout > 0, 2.0 * numerics.compute + 1.0, numerics.compute)
    return split.tokens * split.seq_len * shape.n_heads / split.tp * each


def loss_bytes(work: Work) -> Column:
    """Logits of a chunk of tokens (ours works on chunks; other software on all at once), a wide copy, its gradient."""
    shape, split, numerics, software = work.shape, work.split, work.numerics, work.software
    columns = shape.vocab_size / split.tp
    chunk = np.maximum(LEAST_TOKENS, CHUNK_BYTES // (numerics.compute * np.ceil(columns)))
    tokens = np.where(software.chunked_loss > 0, np.minimum(split.tokens, chunk), split.tokens)
    wide = np.where(numerics.compute < 4.0, 4.0, 0.0)
    return tokens * columns * (numerics.compute + wide)


def stored_bytes(work: Work, layers: Column, ends: Column, first: Column) -> tuple[Column, Column, Column]:
    """(parameters, gradients, optimiser) of a rank with so many layers, and so many copies of the embedding. first: 1
    where tokens are looked up, and learned positions with them."""
    shape, split, numerics = work.shape, work.split, work.numerics
    experts = layers * layer_expert_elements(shape, split)
    outside = ends * shape.vocab_size * shape.d_model / split.tp + shape.norms * shape.d_model
    outside = outside + first * shape.position_rows * shape.d_model
    dense = layers * layer_elements(shape, split) - experts + outside
    expert_shards = np.maximum(split.shards / split.ep, 1.0)

    def bytes_of(each: Column, stage: float) -> Column:
        """Sharded from that stage of ZeRO on."""
        sharded = dense / split.shards + experts / expert_shards
        return each * np.where(split.zero >= stage, sharded, dense + experts)

    parameters, gradients = bytes_of(numerics.parameter, 3.0), bytes_of(numerics.gradient, 2.0)
    # ours: the table of `layout.data_memory`, G and G' being float32 as soon as something is added to them
    wide = np.maximum(numerics.gradient, 4.0)
    between = np.where(split.n_micro_batches > 1.0, wide, numerics.gradient) * (dense + experts)
    last = np.where(split.zero >= 2.0, np.maximum(between, bytes_of(wide, 2.0)), wide * (dense + experts))
    every = np.where((split.reduce_every > 0) & (split.zero >= 1.0), bytes_of(wide, 1.0), last)
    gradients = np.where(work.software.wide_gradients > 0, every, gradients)
    state = np.where(split.offload > 0, 0.0, bytes_of(numerics.state, 1.0))
    trained = split.trains_weights
    return parameters, gradients * trained, state * trained


def _stage(work: Work, stages: Stages | None, *, last: bool) -> Memory:
    shape, split = work.shape, work.split
    head = shape.vocab_size * shape.d_model / (layer_elements(shape, split) * split.tp)  # in layers, by their products
    stages = stages or stage_counts(shape, split, head)
    # a V's first rank holds the last stage too, and its last rank neither end
    single, v_shaped = split.pp <= 1.0, np.isin(split.schedule, V_SHAPED)
    if last:
        has_loss = np.where(single, 1.0, np.where(v_shaped, 0.0, 1.0))
        ends = np.where(single, 2.0 - shape.tied, has_loss)
    else:
        has_loss = np.where(single | v_shaped, 1.0, 0.0)
        ends = np.where(has_loss > 0, 2.0 - shape.tied, 1.0)
    layers = stages.last if last else stages.first
    first = np.where(single, 1.0, 0.0 if last else 1.0)
    return rank_memory(work, layers=layers, held=in_flight(split, last=last), ends=ends, first=first, has_loss=has_loss)


def rank_memory(
    work: Work,
    *,
    layers: Column,
    held: Column,
    ends: Column,
    first: Column,
    has_loss: Column,
    sparse: Column | None = None,
) -> Memory:
    """Of a rank with so many layers, each of which keeps `held` micro-batches.

    ends: copies of the embedding on it, the head counting as one. first: 1 where tokens are looked up. has_loss: 1
    where it computes the loss. sparse: of the layers, those with experts; None: as many as of any layers.
    """
    shape, split, numerics, constants = work.shape, work.split, work.numerics, work.constants
    mine = work
    if sparse is not None:
        mine = replace(work, shape=shape.with_(n_sparse=shape.n_layers * sparse / np.maximum(layers, 1.0)))
    parameters, gradients, optimizer = stored_bytes(mine, layers, ends, first)
    parameters = np.where(_parameters_wait(split), 0.0, parameters)
    layer = layer_activations(work)
    stream = split.tokens * shape.d_model / split.stream_split
    # outside the layers: the embedding's result, and the input of the final norm or of the head
    kept = layers * held
    # what waits in the host's memory leaves one layer's worth that is used and one that is fetched
    kept = np.where(split.offload_activations > 0, np.minimum(kept, 2.0), kept)
    activations = kept * layer + 2.0 * held * stream * numerics.stream + layers * copied_weights(work)
    partly = np.clip(split.recompute - 1.0, 0.0, 1.0) > 0
    working = np.where(
        partly, kept_of_layer(work, "none"), np.where(split.recompute > 0, kept_of_layer(work, "none") - layer, 0.0)
    )
    loss = has_loss * loss_bytes(work)
    gathered = 2.0 * layer_elements(shape, split) * (numerics.gathered + numerics.reduced)
    stage = layers * layer_elements(shape, split) + ends * shape.vocab_size * shape.d_model / split.tp
    whole = stage * numerics.gathered  # a pipeline's stage that is gathered once a step; else a layer is, and the next
    gathered = np.where((split.pp > 1.0) & (split.gather_every <= 0.0), np.maximum(whole, gathered), gathered)
    gather = np.where((split.zero >= 3.0) & (split.shards > 1), gathered, 0.0)
    buffers = np.where(split.data_ranks > 1, work.software.buffers, 0.0)
    slack = constants.slack * (activations + working + loss + gather)
    communicators = (split.tp > 1) * 1.0 + (split.pp > 1) + (split.data_ranks > 1)
    context = constants.context + communicators * constants.communicator
    return Memory(parameters, gradients, optimizer, activations, working, loss, gather, buffers, slack, context)


def _parameters_wait(split: Split) -> Column:
    return (split.offload_params > 0) & (split.zero >= 3.0)
