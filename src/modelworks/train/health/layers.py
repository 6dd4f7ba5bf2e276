"""Figures of every layer in one step: norm of its gradient, norm of its weights, and how far the update moved them.

    gradient    || g ||             before clipping, all elements
    weights     || w ||             before the update, all elements
    update      || w' - w || / || w ||, estimated from at most `SAMPLE` elements of each tensor: a copy of all weights
                would be what a step cannot spare

A layer is a block (`blocks.3`) or what stands outside of them (`embedding`). Sums are over the *logical* tensor: a rank
adds what it counts (`ShardSpec.counted`), sampled elements are chosen by their place in the whole tensor, and one
all-reduce of four numbers a layer makes them every rank's. So figures do not depend on the layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from modelworks.optim import Split
from modelworks.train.health.elements import Elements

SAMPLE = 4096  # elements of one tensor
_GRADIENT, _WEIGHT, _SAMPLED_WEIGHT, _SAMPLED_UPDATE = range(4)


@dataclass(frozen=True)
class LayerFigures:
    """By layer, in the model's order. update_ratio: 0 where a layer's weights are all zero."""

    layers: list[str]
    grad_norm: list[float]
    weight_norm: list[float]
    update_ratio: list[float]


class LayerProbe:
    """Of one rank. split: how the parameters lie in the whole model. Call in this order within one step, on every rank:
    `gradients`, and if there is an update `before` and `after` it; then `sums` holds this rank's contribution.

    counted: the names whose elements this rank counts."""

    def __init__(self, split: Split) -> None:
        self.layers = list(dict.fromkeys(map(layer_of, split.shapes)))
        places = {layer: place for place, layer in enumerate(self.layers)}
        self._place = {name: places[layer_of(name)] for name in split.shapes}
        self.counted = [name for name, spec in split.specs.items() if spec.counted and spec.n_local]
        self._samples = {name: Elements(split.specs[name], SAMPLE) for name in self.counted}
        self._kept: dict[str, Tensor] = {}
        self.sums = self._zeros()

    def gradients(self, squares: Mapping[str, float]) -> None:
        """squares: `squared_norms` of the gradients of this rank's shards, before they are clipped."""
        self.sums = self._zeros()
        self._add(squares, _GRADIENT)

    @torch.no_grad()
    def before(self, weights: Mapping[str, Tensor]) -> None:
        """weights: what the optimiser updates, by parameter name."""
        self._add(squared_norms({name: weights[name] for name in self.counted if name in weights}), _WEIGHT)
        self._kept = {name: sample.of(weights[name]) for name, sample in self._samples.items() if name in weights}

    @torch.no_grad()
    def after(self, weights: Mapping[str, Tensor]) -> None:
        for name, kept in self._kept.items():
            sample, place = self._samples[name], self._place[name]
            moved = sample.of(weights[name]) - kept
            self.sums[place, _SAMPLED_WEIGHT] += sample.weight * float(kept.square().sum())
            self.sums[place, _SAMPLED_UPDATE] += sample.weight * float(moved.square().sum())
        self._kept = {}

    def figures(self, sums: Tensor) -> LayerFigures:
        """sums: over all ranks. (layers, 4), float64."""
        columns = sums.cpu().T.tolist()
        moved = zip(columns[_SAMPLED_UPDATE], columns[_SAMPLED_WEIGHT], strict=True)
        return LayerFigures(
            self.layers,
            [math.sqrt(total) for total in columns[_GRADIENT]],
            [math.sqrt(total) for total in columns[_WEIGHT]],
            [math.sqrt(update / weight) if weight else 0.0 for update, weight in moved],
        )

    def _add(self, squares: Mapping[str, float], column: int) -> None:
        for name, square in squares.items():
            self.sums[self._place[name], column] += square

    def _zeros(self) -> Tensor:
        return torch.zeros(len(self.layers), 4, dtype=torch.float64)


def layer_of(name: str) -> str:
    """`blocks.3` of blocks.3.attention.query.weight, `embedding` of embedding.weight."""
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "blocks" else first


def squared_norms(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Of each tensor, summed in at least float32; one transfer from a device for all."""
    if not tensors:
        return {}
    wide = torch.promote_types(next(iter(tensors.values())).dtype, torch.float32)
    norms = torch.stack([torch.linalg.vector_norm(tensor, dtype=wide) for tensor in tensors.values()])
    return dict(zip(tensors, norms.double().square().tolist(), strict=True))
