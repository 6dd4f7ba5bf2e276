"""How long the operations of a transformer take on one device: FLOPs, rates, and bytes where memory binds.

A product of (m, k) with (k, n), e bytes an element, takes the longer of

    2 m n k / (rate x utilisation)       rate: the best product of the device, as it keeps it up
    (m k + k n + m n) e / bandwidth      roofline (Williams et al. 2009)

with utilisation = tiles x waves x depth: what rounding up to whole tiles of the result leaves, what the last wave of
tiles over the units leaves (NVIDIA, Matrix multiplication background user's guide), and k / (k + constant) for filling
and draining each tile's pipeline. A backward pass does each product twice, with k and n exchanged (gradient of the
inputs) and with m inside (of the weights).

Causal attention is counted as such: (s + 1) / 2 keys a query. A flash kernel skips what is masked, in blocks; unfused
attention multiplies all s keys and moves the scores through memory. Everything between the products (norms, residual
sums, activations, rotations, dropout) is bound by memory and counted in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from modelworks.plan.columns import Column, Shape, Split
from modelworks.plan.constants import CONSTANTS, Constants
from modelworks.plan.elements import layer_elements
from modelworks.plan.machine import Machine, Numerics
from modelworks.plan.software import Software


class Product(NamedTuple):
    """`count` products of (m, k) with (k, n) in one forward pass."""

    m: Column
    n: Column
    k: Column
    count: Column = 1.0


class Passes(NamedTuple):
    """Seconds: of a forward pass, and of the two halves of its backward pass."""

    forward: Column
    backward_input: Column
    backward_weight: Column

    def __add__(self, other: Passes) -> Passes:  # type: ignore[override]  # sums parts instead of joining tuples
        return Passes(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def times(self, factor: Column) -> Passes:
        return Passes(*(part * factor for part in self))

    @property
    def total(self) -> Column:
        return self.forward + self.backward_input + self.backward_weight


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer (the mean over dense and sparse ones) for one micro-batch on one rank, by kind of work.

    core: what selective recomputation does again: unfused attention, or with flash attention all that is not a product.
    """

    linear: Passes
    experts: Passes
    attention: Passes
    elementwise: Passes
    core: Column

    @property
    def passes(self) -> Passes:
        return self.linear + self.experts + self.attention + self.elementwise


@dataclass(frozen=True)
class Work:
    """What every formula here needs: a model, its split, the device, the numbers' widths, the software."""

    shape: Shape
    split: Split
    machine: Machine
    numerics: Numerics
    software: Software
    constants: Constants = CONSTANTS


def product_seconds(work: Work, product: Product, itemsize: Column, rate: Column) -> Column:
    """Of all `count` products."""
    m, n, k, count = product
    constants = work.constants
    seconds = (
        2.0 * m * n * k / (rate * work.machine.sustained * constants.sustained * utilisation(work, m, n, k, count))
    )
    seconds = seconds / alignment(work, n, k, itemsize)
    moved = (m * k + k * n + m * n) * itemsize / (work.machine.bandwidth * constants.memory)
    return count * np.maximum(seconds, moved)


def utilisation(work: Work, m: Column, n: Column, k: Column, count: Column = 1.0) -> Column:
    """The part of the best rate that a product of this shape reaches, before memory's limit."""
    constants = work.constants
    rows, columns = (np.ceil(size / constants.tile) for size in (m, n))
    filled = m * n / (rows * columns * constants.tile**2)
    waves = rows * columns * count / np.maximum(work.machine.units, 1.0)
    last = np.where((work.machine.units > 0) & (waves > 0), waves / np.maximum(np.ceil(waves), 1.0), 1.0)
    return filled * (1.0 - constants.wave * (1.0 - last)) * k / (k + constants.depth)


def alignment(work: Work, n: Column, k: Column, itemsize: Column) -> Column:
    """What is left of the rate where rows of the operands do not begin at whole lines of memory."""
    constants = work.constants
    lines = np.mod(n * itemsize, 128) + np.mod(k * itemsize, 128)
    words = np.mod(n * itemsize, 16) + np.mod(k * itemsize, 16)
    return np.where(words > 0, constants.unaligned, np.where(lines > 0, constants.off_line, 1.0))


def layer_time(work: Work) -> LayerTime:
    """Of one layer and one micro-batch; nothing is recomputed in it."""
    shape = work.shape
    dense = shape.dense_share
    linear = _passes(work, attention_products(work)) + _passes(work, feed_forward_products(work)).times(dense)
    experts = _passes(work, expert_products(work)).times(1.0 - dense)
    attention, core = _attention(work)
    elementwise = _elementwise(work)
    accumulation = Passes(0.0, 0.0, _accumulation(work))
    selective = np.where(work.software.flash > 0, elementwise.forward, core)
    return LayerTime(linear, experts, attention, elementwise + accumulation, selective)


def _accumulation(work: Work) -> Column:
    """Adding a micro-batch's gradients to those before: read, read, written, unless the products do it."""
    split, numerics = work.split, work.numerics
    held = np.where((split.zero >= 2.0) & (split.reduce_every > 0), split.shards, 1.0)
    moved = layer_elements(work.shape, split) / held * (numerics.compute + 2.0 * numerics.gradient)
    later = (split.n_micro_batches - 1.0) / split.n_micro_batches * split.trains_weights
    apart = 1.0 - work.software.fused_accumulation
    return apart * later * moved / (work.machine.bandwidth * work.constants.memory)


def head_time(work: Work) -> Passes:
    """The output projection and the loss: the logits pass through memory a few times, in float32 once."""
    shape, split, machine, constants = work.shape, work.split, work.machine, work.constants
    columns = shape.vocab_size / split.tp
    product = Product(split.tokens, columns, shape.d_model)
    passes = _passes(work, [product], wide=True)
    logits = constants.logit_bytes * split.tokens * columns / (machine.bandwidth * constants.memory)
    return passes + Passes(logits, logits, 0.0)


def attention_products(work: Work) -> list[Product]:
    """Queries, keys and values as one product, and the output projection, on one tensor-parallel rank."""
    shape, split = work.shape, work.split
    keys = np.maximum(shape.d_kv / split.tp, shape.head_dim)  # copied where there are fewer heads than ranks
    return [
        Product(split.tokens, shape.d_attention / split.tp + 2 * keys, shape.d_model),
        Product(split.tokens, shape.d_model, shape.d_attention / split.tp),
    ]


def feed_forward_products(work: Work) -> list[Product]:
    """Of a dense layer: gate and up as one product, and down."""
    shape, split = work.shape, work.split
    width = shape.d_ff / split.tp
    return [
        Product(split.tokens, (shape.matrices - 1) * width, shape.d_model),
        Product(split.tokens, shape.d_model, width),
    ]


def expert_products(work: Work) -> list[Product]:
    """Of a sparse layer whose tokens are spread evenly: one product for each expert of the rank, and the router's."""
    shape, split = work.shape, work.split
    local = np.maximum(shape.n_experts / split.ep, 1.0)
    rows = split.tokens * shape.experts_per_token / local
    width = shape.d_expert / split.tp
    has = shape.n_experts > 0
    router = Product(split.tokens, np.maximum(shape.n_experts, 1.0), shape.d_model, np.where(has, 1.0, 0.0))
    counts = np.where(has, local, 0.0)
    rows = np.maximum(rows, 1.0)
    return [
        Product(rows, (shape.matrices - 1) * np.maximum(width, 1.0), shape.d_model, counts),
        Product(rows, shape.d_model, np.maximum(width, 1.0), counts),
        router,
    ]


def attended_keys(work: Work) -> Column:
    """Mean keys that a query sees: causal, within its document, within the window."""
    length = np.minimum(work.split.seq_len, work.split.document_length)
    causal = (length + 1.0) / 2.0
    window = np.minimum(work.shape.window, length)
    return np.where(window < length, window - window * (window - 1.0) / (2.0 * length), causal)


def model_flops(work: Work) -> tuple[Column, Column]:
    """FLOPs per token of training (three forward passes): attention counted causally, and in full."""
    shape, split = work.shape, work.split
    dense = shape.n_layers * shape.attention_weights + (shape.n_layers - shape.n_sparse) * shape.feed_forward_weights
    expert = shape.matrices * shape.d_model * shape.d_expert
    sparse = shape.n_sparse * (shape.experts_per_token * expert + shape.n_experts * shape.d_model)
    rest = 2.0 * (dense + sparse + shape.vocab_size * shape.d_model)
    pair = 4.0 * shape.n_layers * shape.d_attention
    return 3.0 * (rest + pair * attended_keys(work)), 3.0 * (rest + pair * split.seq_len)


def _passes(work: Work, products: list[Product], *, wide: bool = False) -> Passes:
    machine, numerics = work.machine, work.numerics
    rate = machine.wide_product_rate if wide else machine.product_rate
    itemsize = numerics.compute if wide else numerics.linear
    totals = [0.0, 0.0, 0.0]
    for m, n, k, count in products:
        turned = Product(m, n, k, count), Product(m, k, n, count), Product(k, n, m, count)
        totals = [
            total + product_seconds(work, each, itemsize, rate) for total, each in zip(totals, turned, strict=True)
        ]
    return Passes(totals[0], totals[1], totals[2] * work.split.trains_weights)


def _attention(work: Work) -> tuple[Passes, Column]:
    """The scores and what is made of them; and the part that selective recomputation runs again."""
    flash, core = _flash_attention(work), _unfused_attention(work)
    is_flash = work.software.flash > 0
    chosen = Passes(*(np.where(is_flash, a, b) for a, b in zip(flash, core, strict=True)))
    return chosen, np.where(is_flash, 0.0, core.forward)


def _flash_attention(work: Work) -> Passes:
    shape, split, machine, constants = work.shape, work.split, work.machine, work.constants
    length = np.minimum(split.seq_len, split.document_length)
    keys = attended_keys(work) + np.minimum(constants.flash_block, length) / 2.0
    flops = 4.0 * split.tokens * keys * shape.d_attention / split.tp
    rate = machine.wide_product_rate * machine.sustained
    narrow = shape.head_dim / (shape.head_dim + 32.0) * 1.25  # heads of 64 fill the units less than those of 128
    forward = flops / (rate * machine.attention_forward * narrow)
    backward = constants.flash_backward * flops / (rate * machine.attention_backward * narrow)
    return Passes(forward, backward, 0.0)


def _unfused_attention(work: Work) -> Passes:
    """Two batched products over all keys; scale, mask and softmax in one kernel, dropout in another."""
    shape, split, machine, constants = work.shape, work.split, work.machine, work.constants
    heads = shape.n_heads / split.tp * split.micro_batch
    rows = split.seq_len / split.cp
    scores = Product(rows, split.seq_len, shape.head_dim, heads)
    values = Product(rows, shape.head_dim, split.seq_len, heads)
    itemsize = work.numerics.compute
    rate = machine.wide_product_rate
    products = product_seconds(work, scores, itemsize, rate) + product_seconds(work, values, itemsize, rate)
    pairs = heads * rows * split.seq_len
    forward_bytes = pairs * (4 * itemsize + 1)  # softmax and dropout read and write them; the mask is a byte
    backward_bytes = pairs * (5 * itemsize + 1)
    memory = machine.bandwidth * constants.memory
    return Passes(products + forward_bytes / memory, 2.0 * products + backward_bytes / memory, 0.0)


def _elementwise(work: Work) -> Passes:
    """Norms, residual sums and dropout on the stream; activation on the hidden width; rotation of queries and keys."""
    shape, split, numerics, constants = work.shape, work.split, work.numerics, work.constants
    stream = split.tokens * shape.d_model / split.stream_split
    hidden = split.tokens * shape.d_ff / split.tp * shape.dense_share
    routed = split.tokens * shape.experts_per_token * (1.0 - shape.dense_share)
    heads = split.tokens * (shape.d_attention + shape.d_kv) / split.tp
    # two norms (read, write), two sums (read, read, write); activation; rotation; experts' rows copied in and out
    elements = 10.0 * stream + shape.matrices * hidden + 2.0 * heads * shape.rotary
    elements = elements + routed * (shape.matrices * shape.d_expert / split.tp + 6.0 * shape.d_model)
    # operands of narrow products are read, cast and written with their transposes; backward the gradients are
    inputs = 2.0 * split.tokens * shape.d_model + hidden + split.tokens * shape.d_attention / split.tp
    cast = np.where(numerics.linear < numerics.compute, inputs * (numerics.compute + 2.0 * numerics.linear), 0.0)
    moved, rate = elements * numerics.compute, work.machine.bandwidth * constants.memory
    gaps = constants.kernel_gaps
    forward = (moved + cast) / rate + gaps
    return Passes(forward, (constants.elementwise_backward * moved + cast) / rate + 2.0 * gaps, 0.0)


def recomputed_seconds(work: Work, layer: LayerTime, exchanges: Column = 0.0) -> Column:
    """Seconds of a layer's backward pass that run its forward pass again. exchanges: of that forward pass, exposed."""
    mode = work.split.recompute
    full = layer.passes.forward + exchanges
    # 1 is selective; 1 to 2 recomputes all of some layers and selectively the rest
    return np.where(mode <= 1.0, mode * layer.core, layer.core + (mode - 1.0) * (full - layer.core))
