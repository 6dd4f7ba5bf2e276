"""Bytes of tensors that one rank of our own trainer on a CPU holds, as the most of the moments of its step.

`memory` adds up categories, which suits a GPU's allocator that keeps what it once had. A CPU's gives memory back, so
what counts is what lives at the same time. Parameters and optimiser state always do; with these come, in turn,

    loss       all that the forward passes keep, gradients of the micro-batches before, and the loss at work: head and
               hidden states' gradients, a chunk of logits, a product's result (`modelworks.train.loss`)
    turn       the same without the chunk, both gradients once more while they are scaled
    backward   before each layer: gradients of the layers behind it, what the layers before it keep, what is run
               again of it, and the gradients between its operations; under ZeRO-3 the gathered layers
    sending    the last gradients leave: buckets on their way, and what the layers before keep
    update     whole gradients, or shards; afterwards the buckets that gather what was updated

Gradients of one micro-batch exist only in so far as the backward pass has made them; several micro-batches' are whole
and float32 from the first to the last. All sizes follow from shapes; nothing here was fitted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from modelworks.layout.loss_chunks import CHUNK_BYTES, LEAST_TOKENS
from modelworks.plan.compute import Work
from modelworks.plan.elements import layer_elements
from modelworks.plan.memory import copied_weights, kept_of_layer
from modelworks.plan.stored import Stored

BLOCKWISE = 512  # tokens of a sequence up to which attention on a CPU keeps its weights, in blocks of
BLOCK = 64  # queries
SOFTMAX = 2 * 2**20  # bytes of wide logits at a time, where they are narrow
GATHERED = 2  # buckets of parameters on their way at once


@dataclass(frozen=True)
class Held:
    """What a rank along the pipeline has. layers: of it; held: layers times micro-batches that it keeps at once;
    stages: of it. ends: copies of the embedding, the head being one. first: whether tokens are looked up there."""

    layers: float
    held: float
    stages: float
    ends: float
    first: bool
    has_loss: bool


def most_bytes(work: Work, rank: Held, stored: Stored, bucket: float) -> dict[str, float]:
    """Of the fullest moment, by the names of `Memory`. work: of one row. bucket: bytes of gradients reduced at once."""
    return max(_Moments(work, rank, stored, bucket).all(), key=lambda moment: sum(moment.values()))


def kept_bytes(work: Work, rank: Held, stored: Stored) -> float:
    """Of activations, between the forward passes that keep `rank.held` and the backward passes."""
    return _Moments(work, rank, stored, 0.0)._activations(0.0)


class _Moments:
    """All moments of one rank. Bytes throughout."""

    def __init__(self, work: Work, rank: Held, stored: Stored, bucket: float) -> None:
        self.work, self.rank, self.stored = work, rank, stored
        shape, split, numerics = work.shape, work.split, work.numerics
        self.whole = float(split.tokens * shape.d_model)  # elements of the stream of one micro-batch
        self.stream = self.whole / float(split.stream_split)
        self.compute, self.wide = float(numerics.compute), max(float(numerics.gradient), 4.0)
        self.layer_elements = float(layer_elements(shape, split))
        self.end_elements = float(shape.vocab_size * shape.d_model / split.tp)
        self.elements = rank.layers * self.layer_elements + rank.ends * self.end_elements
        self.elements += float(shape.position_rows * shape.d_model) * rank.first
        self.several = float(split.n_micro_batches) > 1.0
        self.shards = float(split.shards)
        self.zero = float(split.zero) if self.shards > 1.0 else 0.0
        self.every = float(split.reduce_every) > 0.0 and float(split.data_ranks) > 1.0
        self.layer = _kept(work)
        self.bucket = min(self.elements * self.wide, bucket)

    def all(self) -> list[dict[str, float]]:
        backward = [self._backward(done) for done in range(int(self.rank.layers))]
        return [*(self._loss() if self.rank.has_loss else []), *backward, *self._sending(), self._update()]

    def _loss(self) -> list[dict[str, float]]:
        shape, split = self.work.shape, self.work.split
        stream = float(self.work.numerics.stream)
        columns = float(shape.vocab_size / split.tp)
        chunk = min(float(split.tokens), max(LEAST_TOKENS, CHUNK_BYTES // (self.compute * np.ceil(columns))))
        hidden_gradient, head_gradient = self.whole * stream, self.end_elements * 4.0
        logits = chunk * columns * self.compute
        # the head cast, the last chunk's product, and that in float32 as it is added; in float32 added in place
        narrow = self.compute < 4.0
        cast = float(self.work.numerics.parameter) > self.compute
        head = self.end_elements * self.compute * cast
        if narrow:
            rows = chunk * float(shape.d_model) * self.compute if stream > self.compute else 0.0
            softmax = chunk * columns * 4.0  # at once where ranks share it, else a few tokens at a time
            softmax = softmax if float(split.tp) > 1.0 else min(softmax, SOFTMAX)
            product = max(self.end_elements * (self.compute + 4.0), softmax) + rows
        else:
            product = chunk * float(shape.d_model) * self.compute
        result = self.stream * stream + (self.whole * stream if float(split.stream_split) > 1.0 else 0.0)
        working = hidden_gradient + head_gradient + logits + head + product
        parameter = self.end_elements * float(self.work.numerics.parameter)
        scaled = 2.0 * (hidden_gradient + head_gradient) + (parameter if parameter < head_gradient else 0.0)
        gather = self.end_elements * self.rank.ends * float(self.work.numerics.gathered) if self.zero >= 3.0 else 0.0
        kept = self._activations(0.0)
        before = self._accumulated()
        return [
            self._moment(activations=kept + result, loss=working, gradients=before, gather=gather),
            self._moment(activations=kept, loss=scaled, gradients=before, gather=gather),
        ]

    def _backward(self, done: int) -> dict[str, float]:
        """At work in a layer, so many behind it being done."""
        work, numerics = self.work, self.work.numerics
        shape, split = work.shape, work.split
        hidden = float(shape.dense_share * split.tokens * shape.d_ff)
        hidden += float((1.0 - shape.dense_share) * split.tokens * shape.experts_per_token * shape.d_expert)
        # beside what the layer keeps: two more gradients of hidden width, the stream's, and a product's
        between = 2.0 * hidden / float(split.tp) * self.compute
        between += self.stream * float(numerics.stream) + self.whole * self.compute
        again = 0.0
        if float(split.recompute) > 0.0:
            again = float(kept_of_layer(work, "none")) + _attention_weights(work) + _routers(work) - self.layer
            again += float(copied_weights(work, kept=True))
        made = done * self.layer_elements + self.end_elements * self.rank.has_loss
        if self.several:
            gradients, gather = self._accumulated(), 0.0
        else:
            gradients, gather = made * float(numerics.gradient) / (self.shards if self.zero >= 3.0 else 1.0), 0.0
        if self.zero >= 3.0:
            each = self.layer_elements * float(numerics.gathered)
            outside = self.rank.ends * self.end_elements * float(numerics.gathered)
            # the layer at work, and the one before it as it arrives: its shard, gloo's copy, the whole
            gather = outside + each * (3.0 + 1.0 / self.shards)
            gradients += self.layer_elements * self.wide * (2.0 + 1.0 / self.shards) * (done > 0)
        return self._moment(
            activations=self._activations(float(done)), working=again + between, gradients=gradients, gather=gather
        )

    def _sending(self) -> list[dict[str, float]]:
        """As each bucket of the last gradients leaves: those that left before have not arrived, since the cores that
        carry them compute; its own gradients are held until it is packed.

        A bucket that is scattered is there twice (gloo copies it) with the shard that comes of it.
        """
        if float(self.work.split.data_ranks) <= 1.0 or self.zero >= 3.0:
            return []
        times = 2.0 + 1.0 / self.shards if self.zero >= 1.0 else 1.0
        before, moments = self._accumulated(), []
        made = sent = filling = 0.0
        pieces = self._pieces()
        for place, (done, elements) in enumerate(pieces):
            made, filling = made + elements * self.wide, filling + elements * self.wide
            if filling < self.bucket and place + 1 < len(pieces):
                continue
            whole = max(before, made)
            gradients = whole - sent
            sent, filling = sent + filling, 0.0
            kept = self._activations(done) if done < self.rank.layers else self.stream
            moments.append(self._moment(activations=kept, gradients=gradients, buffers=sent * times))
        return moments

    def _pieces(self) -> list[tuple[float, float]]:
        """(layers behind it, elements) of parameters, in the order in which a backward pass reaches them."""
        shape, tp = self.work.shape, float(self.work.split.tp)
        rank, pieces = self.rank, list[tuple[float, float]]()
        attention = [
            float(shape.d_model * n / tp) for n in (shape.d_attention, shape.d_kv, shape.d_kv, shape.d_attention)
        ]
        rest = (self.layer_elements - sum(attention)) / float(shape.matrices)
        tied = rank.ends < float(rank.has_loss) + float(rank.first)
        if rank.has_loss and not tied:
            pieces.append((0.0, self.end_elements))
        for layer in range(int(rank.layers)):
            pieces += [(layer + 1.0, each) for each in [rest] * int(shape.matrices) + attention]
        return pieces + ([(rank.layers, self.end_elements)] if rank.first or tied else [])

    def _update(self) -> dict[str, float]:
        gradients = self.elements * self.wide / (self.shards if self.zero >= 2.0 else 1.0)
        bucket = self.bucket / self.wide * float(self.work.numerics.parameter)
        buffers = bucket * (2.0 + 1.0 / self.shards) * GATHERED if 1.0 <= self.zero < 3.0 else 0.0
        return self._moment(gradients=gradients, buffers=buffers)

    def _accumulated(self) -> float:
        """Gradients of the micro-batches before the last one."""
        if not self.several:
            return 0.0
        return self.elements * self.wide / (self.shards if self.every and self.zero >= 1.0 else 1.0)

    def _activations(self, done: float) -> float:
        """Of all layers but so many of one micro-batch; of each stage's ends; of the final norm."""
        work, rank, numerics = self.work, self.rank, self.work.numerics
        kept = (rank.held - done) * (self.layer + float(copied_weights(work)))
        # a stage's result is the input of the final norm, or is kept until its gradient comes
        stages_held = rank.stages * rank.held / max(rank.layers, 1.0)
        ends = stages_held * self.stream * float(numerics.stream)
        rotations = float(work.shape.rotary * work.split.tokens * work.shape.head_dim) * self.compute
        ends += stages_held * rotations / rank.stages
        if rank.has_loss and not done:
            narrow = 4.0 if float(numerics.stream) < 4.0 else 0.0
            ends += self.stream * (4.0 + narrow) * float(work.shape.norms == 1.0)
        return kept + ends

    def _moment(self, **parts: float) -> dict[str, float]:
        always = {"parameters": float(self.stored.parameters), "optimizer": float(self.stored.optimizer)}
        names = ("gradients", "activations", "working", "loss", "gather", "buffers", "slack", "context")
        return always | {name: float(parts.get(name, 0.0)) for name in names}


def _kept(work: Work) -> float:
    """Bytes that a layer keeps of one micro-batch, recomputation as chosen."""
    mode = ("none", "selective", "full")[int(work.split.recompute)]
    kept = float(kept_of_layer(work, mode))
    if mode == "none":
        return kept + _attention_weights(work) + _gathered(work) + _routers(work)
    if mode == "selective" and _blockwise(work):  # not among the operations whose results are kept
        shape, split = work.shape, work.split
        result = shape.d_attention / split.tp * work.numerics.compute + 4.0 * shape.n_heads / split.tp
        return kept - float(split.tokens * result)
    return kept


def _blockwise(work: Work) -> bool:
    return float(work.split.seq_len) <= BLOCKWISE and float(work.split.cp) <= 1.0


def _attention_weights(work: Work) -> float:
    """Beside a number for each query: softmax's results, each block of queries with all keys up to its last."""
    if not _blockwise(work):
        return 0.0
    shape, split = work.shape, work.split
    length = float(split.seq_len)
    keys = sum(min(end, length) for end in np.arange(BLOCK, length + BLOCK, BLOCK)) / np.ceil(length / BLOCK)
    heads = float(split.tokens * shape.n_heads / split.tp)
    return heads * (float(keys) * float(work.numerics.compute) - 4.0)


def _gathered(work: Work) -> float:
    """Where sequences are gathered before products, their operands are whole (dense layers: both; experts': one)."""
    split, shape = work.split, work.shape
    part = 1.0 - 1.0 / float(split.stream_split)
    return 2.0 * part * float(split.tokens * shape.d_model) * float(work.numerics.linear)


def _routers(work: Work) -> float:
    """A router computes in float32, and keeps its input so."""
    sparse = 1.0 - float(work.shape.dense_share)
    return sparse * float(work.split.tokens * work.shape.d_model) * max(0.0, 4.0 - float(work.numerics.compute))
