"""What the processes of a run reach on one machine while all of them work: the measured part of a `Device`.

A machine whose cores, caches and memory several ranks share has no one rate: two processes with one thread each are
not two halves of one with two. So there is a `Rates` for each number of ranks that was measured, each rank measured
while the others do the same. Written by `modelworks plan --calibrate`, read by `modelworks.plan.measured`.

A product of (m, k) with (k, n) takes, with coefficients that are not negative and fitted to the measured rows,

    seconds = c + f m n k + r m n + i m k + w n k     (a call; multiplying; writing the result; reading both operands)

and an exchange of S bytes  latency + S / bandwidth  (Hockney 1994), measured between computations, so that what ranks
wait for each other is in it. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import combinations
from typing import Annotated, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

Figure = Annotated[float, Field(gt=0.0)]
Cost = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(gt=0)]
ProductRow = tuple[Count, Count, Count, Figure, Figure, Figure]
ExchangeRow = tuple[Count, Figure]
MeasuredDtype = Literal["fp32", "bf16", "fp16"]
MeasuredPrecision = Literal["fp32", "bf16", "bf16-autocast"]
ExchangeKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
AttentionRow = tuple[Count, Figure, Figure]  # (length, seconds a causal FLOP forward, backward)
# (length, seconds a FLOP of a causal block forward, backward, of one that sees half as many keys, all of them)
BlockRow = tuple[Count, Figure, Figure, Figure, Figure]
Operation = Literal[
    "rmsnorm",
    "layernorm",
    "residual",
    "rotation",
    "swiglu",
    "geglu",
    "gelu",
    "gelu_tanh",
    "relu",
    "joined",
    "alone",
    "accumulate",
]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)


class Entry(BaseModel):
    """A part of a catalogue: unknown keys are errors, since a misspelt one would be ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Both(Entry):
    """Seconds of a forward and of a backward pass."""

    forward: Cost
    backward: Cost


class Costs(Entry):
    """Seconds of what the trainer does besides products, attention and `Rates.operations`, by what they are counted in.

    layer: a layer and micro-batch, whatever its size: calls of operations. expert: the same for each expert of a rank.
    element: an element of an operation between products (`plan.compute` counts them). routed: an element of a row that
    is carried to an expert. weight: a weight and micro-batch. logit: a logit of the loss, besides its products; a
    split_logit: the same beyond it where ranks share the vocabulary. token: a token and channel outside the layers:
    embedding, final norm. update: an element of a parameter, once a step. step, micro_batch: each, whatever is in it.
    watched: a layer and micro-batch under selective recomputation, beyond what runs again. unit, gathered: what ZeRO-3
    gathers or reduces at once (a layer), and each element of it, beyond the exchange.
    """

    layer: Both
    expert: Both
    element: Both
    routed: Both
    weight: Both
    logit: Cost
    token: Both
    update: Cost
    step: Cost
    micro_batch: Cost
    split_logit: Cost = 0.0
    watched: Cost = 0.0
    unit: Cost = 0.0
    gathered: Cost = 0.0

    def scaled(self, factor: float) -> Costs:
        """Everything that grows with the amount of work takes `factor` times as long; calls of operations do not."""
        both = {
            name: Both(forward=factor * each.forward, backward=factor * each.backward)
            for name in ("element", "routed", "weight", "token")
            if (each := getattr(self, name))
        }
        single = {name: factor * getattr(self, name) for name in ("logit", "split_logit", "update", "gathered")}
        return self.model_copy(update=both | single)


class Rates(Entry):
    """Of each of `ranks` processes with `threads` threads.

    memory_bandwidth_gb_s: read and written bytes. products: [rows m, columns n, inner k, seconds forward, seconds of
    the inputs' gradient, of the weights']. attention: `AttentionRow`s of whole rows; blocks: `BlockRow`s of a part of
    a row, whose other keys travel round a ring. operations: by precision, seconds an element of what lies between
    products (an element of the stream, of queries and keys, of the hidden width, of a weight) and of a gradient that is
    added to another. costs: by precision, all that is left. exchanges: [bytes of the whole tensor, seconds] by kind,
    over the ranks.
    """

    ranks: Count
    threads: Count
    memory_bandwidth_gb_s: Figure
    products: dict[MeasuredDtype, Annotated[list[ProductRow], Field(min_length=5)]]
    attention: dict[MeasuredDtype, Annotated[list[AttentionRow], Field(min_length=1)]]
    blocks: dict[MeasuredDtype, Annotated[list[BlockRow], Field(min_length=1)]] = {}
    operations: dict[MeasuredPrecision, dict[Operation, Both]]
    costs: dict[MeasuredPrecision, Costs]
    exchanges: dict[ExchangeKind, Annotated[list[ExchangeRow], Field(min_length=2)]] = {}

    @cached_property
    def product_fits(self) -> dict[str, tuple[NDArray[np.float64], ...]]:
        """dtype -> coefficients (c, f, r, i, w) of the forward product, of the inputs' gradient, of the weights'."""
        return {dtype: _fit_products(rows) for dtype, rows in self.products.items()}

    @cached_property
    def exchange_fits(self) -> dict[str, tuple[float, float]]:
        """kind -> (seconds, seconds a byte)."""
        return {kind: _fit_exchange(rows) for kind, rows in self.exchanges.items()}

    def scaled(self, factor: float, *, ranks: int, threads: int) -> Rates:
        """The same with every operation taking `factor` times as long; exchanges and steps as they are."""
        products = {
            dtype: [(m, n, k, *(factor * seconds for seconds in each)) for m, n, k, *each in rows]
            for dtype, rows in self.products.items()
        }
        attention = {
            dtype: [(length, factor * forward, factor * backward) for length, forward, backward in rows]
            for dtype, rows in self.attention.items()
        }
        blocks = {
            dtype: [(length, *(factor * each for each in rates)) for length, *rates in rows]
            for dtype, rows in self.blocks.items()
        }
        operations = {
            precision: {
                name: Both(forward=factor * each.forward, backward=factor * each.backward)
                for name, each in by_name.items()
            }
            for precision, by_name in self.operations.items()
        }
        return self.changed(
            ranks=ranks,
            threads=threads,
            memory_bandwidth_gb_s=self.memory_bandwidth_gb_s / factor,
            products=products,
            attention=attention,
            blocks=blocks,
            operations=operations,
            costs={name: costs.scaled(factor) for name, costs in self.costs.items()},
        )

    def changed(self, **figures: Any) -> Rates:
        """With other figures, and fits of its own: `model_copy` would take over the fits of the old ones."""
        return Rates(**{name: getattr(self, name) for name in Rates.model_fields} | figures)

    def best_product(self, dtype: MeasuredDtype) -> float:
        """FLOP/s of the fastest forward product that was measured."""
        return max(2.0 * m * n * k / forward for m, n, k, forward, _, _ in self.products[dtype])


def non_negative_fit(
    features: NDArray[np.float64], values: NDArray[np.float64], scale: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Coefficients x >= 0 of the least squares of (features @ x - values) / scale.

    features: (rows, few columns); values, scale: (rows,). Every subset of columns is tried, so it is exact for the
    dozen columns that there are at most.
    """
    relative, wanted = features / scale[:, None], values / scale
    best, least = np.zeros(features.shape[1]), np.inf
    columns = range(features.shape[1])
    for size in range(1, features.shape[1] + 1):
        for chosen in combinations(columns, size):
            part = relative[:, chosen]
            found, _, rank, _ = np.linalg.lstsq(part, wanted, rcond=None)
            if rank < size or (found < 0.0).any():
                continue
            error = float(np.sum((part @ found - wanted) ** 2))
            if error < least:
                best, least = np.zeros(features.shape[1]), error
                best[list(chosen)] = found
    return best


def product_features(m: object, n: object, k: object) -> list[object]:
    """What the coefficients of a product multiply: 1, mnk, mn, mk, nk. Numbers or arrays."""
    return [m * 0.0 + 1.0, m * n * k, m * n, m * k, n * k]  # type: ignore[operator]


def _fit_products(rows: Sequence[ProductRow]) -> tuple[NDArray[np.float64], ...]:
    table = np.array(rows, dtype=np.float64)
    features = np.stack([np.asarray(each) for each in product_features(table[:, 0], table[:, 1], table[:, 2])], axis=1)
    return tuple(non_negative_fit(features, table[:, column], table[:, column]) for column in (3, 4, 5))


def _fit_exchange(rows: Sequence[ExchangeRow]) -> tuple[float, float]:
    table = np.array(rows, dtype=np.float64)
    features = np.stack([np.ones(len(table)), table[:, 0]], axis=1)
    latency, each = non_negative_fit(features, table[:, 1], table[:, 1])
    return float(latency), float(each)
