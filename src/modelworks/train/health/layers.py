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

from modelworks.layout import ShardSpec
from modelworks.optim import Split

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
    `gradients`, and if there is an update `before` and `after` it; then `sums` holds this rank's contribution."""

    def __init__(self, split: Split) -> None:
        self.layers = list(dict.fromkeys(map(layer_of, split.shapes)))
        places = {layer: place for place, layer in enumerate(self.layers)}
        self._place = {name: places[layer_of(name)] for name in split.shapes}
        self._samples = {name: _Sample(spec) for name, spec in split.specs.items() if spec.counted and spec.n_local}
        self._kept: dict[str, Tensor] = {}
        self.sums = self._zeros()

    def gradients(self, by_name: Mapping[str, Tensor]) -> None:
        """by_name: of this rank's shards, before they are clipped."""
        self.sums = self._zeros()
        self._add_squares(by_name, _GRADIENT)

    @torch.no_grad()
    def before(self, weights: Mapping[str, Tensor]) -> None:
        """weights: what the optimiser updates, by parameter name."""
        self._add_squares(weights, _WEIGHT)
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

    def _add_squares(self, tensors: Mapping[str, Tensor], column: int) -> None:
        own = {name: tensors[name] for name in self._samples if name in tensors}
        if not own:
            return
        for name, norm in zip(own, _norms(list(own.values())), strict=True):
            self.sums[self._place[name], column] += norm**2

    def _zeros(self) -> Tensor:
        return torch.zeros(len(self.layers), 4, dtype=torch.float64)


def layer_of(name: str) -> str:
    """`blocks.3` of blocks.3.attention.query.weight, `embedding` of embedding.weight."""
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "blocks" else first


class _Sample:
    """Elements on an even grid over the whole tensor, of which this rank has some. weight: elements for each one."""

    def __init__(self, spec: ShardSpec) -> None:
        dimensions = max(1, len(spec.shape))
        each = max(1, int(SAMPLE ** (1 / dimensions) + 1e-9))
        chosen = [_grid(size, each) for size in spec.shape]
        self.weight = math.prod(spec.shape) / math.prod(len(places) for places in chosen)
        own = [
            [place - start for place in places if start <= place < stop]
            for places, (start, stop) in zip(chosen, spec.bounds, strict=True)
        ]
        self._index = torch.meshgrid(*map(torch.tensor, own), indexing="ij") if own else ()

    def of(self, tensor: Tensor) -> Tensor:
        """A copy, in float64."""
        return tensor[tuple(index.long().to(tensor.device) for index in self._index)].double()


def _grid(size: int, count: int) -> list[int]:
    count = min(size, count)
    return [place * size // count for place in range(count)]


def _norms(tensors: list[Tensor]) -> list[float]:
    """Of each tensor, summed in at least float32; one transfer from a device for all."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack([torch.linalg.vector_norm(tensor, dtype=wide) for tensor in tensors]).tolist()
