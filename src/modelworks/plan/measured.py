"""What a machine that was measured takes for the parts of a step: no datasheet, no constants, the rates of `Rates`.

Made for CPUs, where the formulas of `compute` do not hold: products run at rates of their own by shape, operations
between them live in caches and cost a call each, several ranks share cores and memory, and an exchange hides behind
nothing since the cores that carry it are the ones that compute. Seconds of one rank while all ranks work:

    product      the fit to measured products (`hardware.rates`), forward and both halves backward
    attention    causal FLOPs at the measured rate of the sequence's length; over a ring, of its blocks
    between      norms, activations, rotations, sums, casts of weights: elements (`Counts`) at the rate of each
    the rest     counts times the fitted costs of whole steps (`calibrate`)
    exchange     latency and bytes on the wire at the measured rate of its kind, waits for other ranks included
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from modelworks.config import UserError
from modelworks.hardware import Both, Costs, Device, Rates
from modelworks.hardware.rates import ExchangeKind, MeasuredDtype
from modelworks.plan.columns import ACTIVATIONS, Column, Shape, Split
from modelworks.plan.constants import Constants
from modelworks.plan.elements import layer_elements

Half = Literal["forward", "backward"]
HALVES: tuple[Half, Half] = ("forward", "backward")
_DTYPES: dict[str, MeasuredDtype] = {"fp32": "fp32", "bf16": "bf16", "bf16-autocast": "bf16"}


@dataclass(frozen=True)
class Counts:
    """What a layer and micro-batch on one rank is made of, besides products and attention: `hardware.Costs` and, from
    stream on, `hardware.Rates.operations`. norms, activation: which ones, as `Shape` has them."""

    expert: Column
    element: Column
    routed: Column
    weight: Column
    stream: Column
    rotated: Column
    hidden: Column
    joined: Column
    alone: Column
    accumulated: Column
    norms: Column
    activation: Column

    @classmethod
    def of(cls, shape: Shape, split: Split) -> Counts:
        """Of the mean layer. element: of the operands of norms, residual sums, activations and rotations."""
        dense, sparse = shape.dense_share, 1.0 - shape.dense_share
        stream = split.tokens * shape.d_model / split.stream_split
        rows = split.tokens * shape.experts_per_token * sparse
        hidden = (split.tokens * shape.d_ff * dense + rows * shape.d_expert) / split.tp
        rotated = split.tokens * (shape.d_attention + shape.d_kv) / split.tp * shape.rotary
        weight = layer_elements(shape, split)
        # q, k and v are one product, and gate and up of a dense layer another
        keys = np.maximum(shape.d_kv / split.tp, shape.head_dim)
        gated = (shape.matrices > 2.0) * dense * 2.0 * shape.d_ff / split.tp
        joined = shape.d_model * (shape.d_attention / split.tp + 2.0 * keys + gated)
        m = split.n_micro_batches
        return cls(
            expert=sparse * np.maximum(shape.n_experts / split.ep, 1.0),
            element=10.0 * stream + shape.matrices * hidden + 2.0 * rotated,
            routed=rows * shape.d_model * np.where(split.ep > 1.0, 2.0, 1.0),  # sorted again where they arrive
            weight=weight,
            stream=stream,
            rotated=rotated,
            hidden=hidden,
            joined=joined,
            alone=weight - joined,
            accumulated=weight * (m - 1.0) / m * split.trains_weights,
            norms=shape.norms,
            activation=shape.activation,
        )


@dataclass(frozen=True)
class Measured:
    """The rates of one rank of several. slowdown: how much longer all takes where ranks outnumber the measured ones."""

    rates: Rates
    dtype: MeasuredDtype
    costs: Costs
    operations: Mapping[str, Both]
    ranks: int
    slowdown: float

    @classmethod
    def of(cls, device: Device, precision: str, ranks: int) -> Measured:
        """Of `ranks` processes on the device. Raises UserError for a precision that was not measured."""
        dtype = _DTYPES.get(precision)
        rates = next((each for each in device.measured if each.ranks >= ranks), device.measured[-1])
        costs = {str(name): each for name, each in rates.costs.items()}.get(precision)
        operations = {str(name): each for name, each in rates.operations.items()}.get(precision)
        if dtype is None or costs is None or operations is None:
            known = ", ".join(rates.costs)
            raise UserError(f"precision {precision} was not measured on {device.name}; measured: {known}")
        return cls(
            rates,
            dtype,
            costs,
            {str(name): each for name, each in operations.items()},
            ranks,
            max(1.0, ranks / rates.ranks),
        )

    def constants(self, others: Constants) -> Constants:
        """What the formulas of memory take: no driver's context and no buffers of a device's libraries."""
        return replace(others, context=0.0, communicator=0.0, slack=0.0)

    def product(self, m: Column, n: Column, k: Column, count: Column, half: int) -> Column:
        """Seconds of `count` products. half: 0 forward, 1 the inputs' gradient, 2 the weights'."""
        call, multiply, result, inputs, weights = self.rates.product_fits[self.dtype][half]
        each = call + multiply * m * n * k + result * m * n + inputs * m * k + weights * n * k
        return self.slowdown * count * each

    def attention(self, length: Column, flops: Column, backward: int) -> Column:
        """Seconds of a layer's attention of so many causal FLOPs. backward: 0, or 1 with twice the forward FLOPs."""
        rate = self._at_length(self.rates.attention, length, 1 + backward)
        return self.slowdown * rate * flops * (1 + backward)

    def ring(self, length: Column, causal: Column, others: Column, backward: int) -> Column:
        """Seconds of ring attention's computation: FLOPs of the rank's own block of `length`, and of those that it sees
        half of. backward: as above."""
        if not self.rates.blocks:
            raise UserError("attention over a ring (cp) was not measured on this machine; calibrate again")
        own, half = (self._at_length(self.rates.blocks, length, column + backward) for column in (1, 3))
        return self.slowdown * (own * causal + half * others) * (1 + backward)

    def _at_length(
        self, by_dtype: Mapping[MeasuredDtype, Sequence[tuple[float, ...]]], length: Column, at: int
    ) -> Column:
        rows = by_dtype[self.dtype]
        return np.interp(np.log(length), np.log([row[0] for row in rows]), [row[at] for row in rows])

    def between(self, counts: Counts, half: Half) -> Column:
        """Seconds of what lies between a layer's products."""
        costs = self.costs
        layer, expert, element, routed, weight = (
            getattr(each, half) for each in (costs.layer, costs.expert, costs.element, costs.routed, costs.weight)
        )
        seconds = layer + expert * counts.expert + element * counts.element
        seconds = seconds + routed * counts.routed + weight * counts.weight
        return self.slowdown * (seconds + self._operations(counts, half))

    def _operations(self, counts: Counts, half: Half) -> Column:
        """Of what was measured by itself: two norms, the sums of the stream (and of its gradients), and so on."""
        each = {name: float(getattr(both, half)) for name, both in self.operations.items()}
        norm = np.where(counts.norms > 1.0, each["layernorm"], each["rmsnorm"])
        activation = np.array([each[name] for name in ACTIVATIONS])[np.asarray(counts.activation, dtype=np.intp)]
        # forward the operation has both sums of a layer, backward one of the two sums of gradients
        sums = each["residual"] * (2.0 if half == "backward" else 1.0)
        return (
            (2.0 * norm + sums) * counts.stream
            + each["rotation"] * counts.rotated
            + activation * counts.hidden
            + each["joined"] * counts.joined
            + each["alone"] * counts.alone
            + each["accumulate"] * counts.accumulated
        )

    def outside(self, shape: Shape, split: Split) -> tuple[Column, Column]:
        """Seconds of a micro-batch outside the layers: of the embedding and final norm, forward and backward; and of
        the loss besides its products. The ends' weights have gradients too."""
        stream = split.tokens * shape.d_model / split.stream_split
        costs, ends = self.costs, shape.vocab_size * shape.d_model / split.tp
        around = (costs.token.forward + costs.token.backward) * stream + costs.weight.backward * ends
        logit = costs.logit + np.where(split.tp > 1.0, costs.split_logit, 0.0)
        loss = logit * split.tokens * shape.vocab_size / split.tp + costs.weight.backward * ends
        return self.slowdown * around, self.slowdown * loss

    def exchange(self, kind: ExchangeKind, n: Column, size: Column, calls: Column = 1.0) -> Column:
        """Seconds of `calls` exchanges of `size` bytes (of the whole tensor) each among n ranks; 0 for one rank."""
        if kind not in self.rates.exchange_fits:
            if np.any(np.asarray(n) > 1.0):
                raise UserError(f"exchanges ({kind}) were not measured on this machine; calibrate again")
            return 0.0 * size
        latency, each = self.rates.exchange_fits[kind]
        measured = float(self.rates.ranks)
        if kind == "send":
            seconds = latency + each * size
        else:
            wire = (n - 1.0) / n / ((measured - 1.0) / measured)
            steps = np.log2(np.maximum(n, 2.0)) / np.log2(measured)
            seconds = latency * steps + each * size * wire
        return np.where(n > 1.0, self.slowdown * calls * seconds, 0.0)

    def unit(self, elements: Column) -> Column:
        """Seconds that ZeRO-3 takes to gather or reduce so many elements at once, beyond the exchange."""
        return self.slowdown * (self.costs.unit + self.costs.gathered * elements)

    def copy(self, size: Column) -> Column:
        """Seconds of a copy of so many bytes, which are read and written."""
        return self.slowdown * 2.0 * size / (self.rates.memory_bandwidth_gb_s * 1e9)
