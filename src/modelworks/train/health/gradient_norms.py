"""Norms of every layer's gradient in every step, at no pass over the gradients and no message of their own.

Clipping needs the square of each tensor's norm, and one all-reduce of their sum. Here the squares are taken once for
both, and the layers' sums go along with that all-reduce: a few numbers more in the same message. Only a clipping norm
of another order than 2 makes them cost a pass and a message.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from modelworks.config import layer_of
from modelworks.optim import Reduce, Split, norm_powers


class GradientNorms:
    """Of one rank. In a step `see` its gradients; then clip with `powers` and `reduce`, behind which `layers` has what
    all ranks found."""

    def __init__(self, split: Split, p: float) -> None:
        """p: order of the norm that is clipped."""
        self.names = list(dict.fromkeys(map(layer_of, split.shapes)))
        places = {layer: place for place, layer in enumerate(self.names)}
        self._place = {name: places[layer_of(name)] for name in split.shapes}
        self._counted = {name for name, spec in split.specs.items() if spec.counted and spec.n_local}
        self._p = p
        self._seen: list[str] = []
        self._layer_of_seen = torch.zeros(0, dtype=torch.int64)
        self._squares = self._own = torch.zeros(0, dtype=torch.float64)
        self._total: Tensor | None = None

    def see(self, gradients: Mapping[str, Tensor]) -> None:
        """gradients: of this rank's shards, unscaled, before they are clipped."""
        counted = {name: each for name, each in gradients.items() if name in self._counted and each.numel()}
        self._squares = norm_powers(list(counted.values()))
        device = self._squares.device
        if self._seen != list(counted):  # as a rule in the first step only
            self._seen = list(counted)
            places = [self._place[name] for name in counted]
            self._layer_of_seen = torch.tensor(places, dtype=torch.int64, device=device)
        own = torch.zeros(len(self.names), dtype=torch.float64, device=device)
        self._own, self._total = own.index_add_(0, self._layer_of_seen, self._squares), None

    @property
    def powers(self) -> Tensor | None:
        """For `clip_gradients`, where its norm is of these squares."""
        return self._squares if self._p == 2.0 else None

    def squares(self) -> dict[str, float]:
        """Of the gradients that this rank counts, by name. Waits for the device."""
        return dict(zip(self._seen, self._squares.tolist(), strict=True))

    def reduce(self, over_ranks: Reduce | None) -> Reduce:
        """over_ranks: None where this rank holds everything."""

        def reduced(value: Tensor, how: Literal["sum", "max"]) -> Tensor:
            if self._total is not None:
                return over_ranks(value, how) if over_ranks else value
            if over_ranks is None:
                self._total = self._own
                return value
            if how != "sum":
                self._total = over_ranks(self._own, "sum")
                return over_ranks(value, how)
            both = over_ranks(torch.cat([value.reshape(1), self._own.to(value.device)]), "sum")
            self._total = both[1:]
            return both[0]

        return reduced

    def layers(self) -> list[float]:
        """Norms by layer, the model's, in the order of `names`; the same on every rank."""
        assert self._total is not None
        return [math.sqrt(square) for square in self._total.tolist()]
