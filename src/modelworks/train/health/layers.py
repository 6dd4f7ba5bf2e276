"""Figures of every layer in one step: norm of its weights, and how far the update moved them.

    weights     || w ||             before the update, all elements
    update      || w' - w || / || w ||, estimated from at most `SAMPLE` elements of each tensor: a copy of all weights
                would be what a step cannot spare

A layer is a block (`blocks.3`) or what stands outside of them (`embedding`). Sums are over the *logical* tensor: a rank
adds what it counts (`ShardSpec.counted`), sampled elements are chosen by their place in the whole tensor, and one
all-reduce of three numbers a layer makes them every rank's. So figures do not depend on the layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from modelworks.config import layer_of
from modelworks.optim import Split, norm_powers
from modelworks.train.health.elements import Elements

SAMPLE = 4096  # elements of one tensor
_WEIGHT, _SAMPLED_WEIGHT, _SAMPLED_UPDATE = range(3)


@dataclass(frozen=True)
class LayerFigures:
    """By layer, in the model's order. grad_norm: before clipping, see `gradient_norms`. update_ratio: 0 where a layer's
    weights are all zero."""

    layers: list[str]
    grad_norm: list[float]
    weight_norm: list[float]
    update_ratio: list[float]


class LayerProbe:
    """Of one rank. split: how the parameters lie in the whole model. Within one step, on every rank, call `begin`,
    and if there is an update `before` and `after` it; then `sums` holds this rank's contribution.

    counted: the names whose elements this rank counts."""

    def __init__(self, split: Split) -> None:
        self.layers = list(dict.fromkeys(map(layer_of, split.shapes)))
        places = {layer: place for place, layer in enumerate(self.layers)}
        self._place = {name: places[layer_of(name)] for name in split.shapes}
        self.counted = [name for name, spec in split.specs.items() if spec.counted and spec.n_local]
        self._samples = {name: Elements(split.specs[name], SAMPLE) for name in self.counted}
        self._kept: dict[str, Tensor] = {}
        self.sums = self._zeros()

    def begin(self) -> None:
        self.sums = self._zeros()

    @torch.no_grad()
    def before(self, weights: Mapping[str, Tensor]) -> None:
        """weights: what the optimiser updates, by parameter name."""
        held = [name for name in self.counted if name in weights]
        squares = norm_powers([weights[name] for name in held]).tolist()  # one transfer from a device for all
        for name, square in zip(held, squares, strict=True):
            self.sums[self._place[name], _WEIGHT] += square
        self._kept = {name: sample.of(weights[name]) for name, sample in self._samples.items() if name in weights}

    @torch.no_grad()
    def after(self, weights: Mapping[str, Tensor]) -> None:
        for name, kept in self._kept.items():
            sample, place = self._samples[name], self._place[name]
            moved = sample.of(weights[name]) - kept
            self.sums[place, _SAMPLED_WEIGHT] += sample.weight * float(kept.square().sum())
            self.sums[place, _SAMPLED_UPDATE] += sample.weight * float(moved.square().sum())
        self._kept = {}

    def figures(self, sums: Tensor, grad_norms: list[float]) -> LayerFigures:
        """sums: over all ranks. (layers, 3), float64."""
        columns = sums.cpu().T.tolist()
        moved = zip(columns[_SAMPLED_UPDATE], columns[_SAMPLED_WEIGHT], strict=True)
        return LayerFigures(
            self.layers,
            grad_norms,
            [math.sqrt(total) for total in columns[_WEIGHT]],
            [math.sqrt(update / weight) if weight else 0.0 for update, weight in moved],
        )

    def _zeros(self) -> Tensor:
        return torch.zeros(len(self.layers), 3, dtype=torch.float64)
