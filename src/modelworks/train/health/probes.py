"""`Probes`: everything that is measured inside of a step, together, and what all ranks found.

`norms` sees every step. In a measured one, in this order: `before_passes`, `before_clipping`, and if there is an update
`before_update` and `after_update`; then `collect`, on every rank, outside of what is timed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelworks.data.batch import Batch
from modelworks.parallel import SplitModel
from modelworks.train.health.cosine import ConsecutiveCosine, cosine
from modelworks.train.health.forward_probe import ForwardProbe
from modelworks.train.health.gradient_norms import GradientNorms
from modelworks.train.health.layers import LayerFigures, LayerProbe
from modelworks.train.health.micro_gradients import Disagreement, MicroGradients
from modelworks.train.health.noise import NoiseEstimate, estimate_noise


@dataclass(frozen=True)
class StepFigures:
    """Of one measured step, the same on every rank. noise: None where the step is one part. cosine: with the gradient
    of the step before; None where there is none, or either is zero. busy, jitter, device_shares: by rank, seconds, how
    far they scatter, and how busy its device was. attention_logits, activations: by layer of the model, see
    `forward_probe`."""

    layers: LayerFigures
    noise: NoiseEstimate | None
    disagreement: Disagreement | None
    busy: list[float]
    jitter: list[float]
    cosine: float | None
    attention_logits: list[float]
    activations: list[float]
    device_shares: list[float]


class Probes:
    def __init__(self, model: SplitModel) -> None:
        self._model = model
        config, mesh = model.config, model.mesh
        self.layers, self.micro = LayerProbe(model.split), MicroGradients(model)
        self.forward = ForwardProbe(mesh, config.model.n_layers, config.parallel.cp_mode)
        self.norms = GradientNorms(model.split, float(config.train.grad_clip_norm))
        itemsize = min((tensor.dtype.itemsize for tensor in model.stored.values()), default=4)
        self.cosine = ConsecutiveCosine(model.split, itemsize)
        self._targets, self._sequences = 0.0, 0

    def before_passes(self, step: int, parts: Sequence[Batch], targets: float, scale: float) -> None:
        """`forward` and `micro.see` are then ready to see them. parts: this rank's micro-batches, whole rows. targets:
        target weight of the global batch. scale: of the losses."""
        self._targets = targets
        self._sequences = sum(part.n_rows for part in parts) * self._model.mesh.size("dp")
        self.micro.begin(step, [float(part.target_weight()) / targets for part in parts], scale)
        self.forward.begin()

    def before_clipping(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        """gradients: of this rank's shards, unscaled, which `norms` has seen."""
        self.layers.begin()
        self.micro.end(self.norms.squares())
        self.cosine.compare(step, gradients)

    def before_update(self, weights: Mapping[str, Tensor]) -> None:
        self.layers.before(weights)

    def after_update(self, weights: Mapping[str, Tensor]) -> None:
        self.layers.after(weights)

    def collect(self, busy: float, device_share: float = math.nan, jitter: float = 0.0) -> StepFigures:
        """busy: seconds of this rank. jitter: their deviation. device_share: how busy its device was, NaN where that is
        not known. Two all-reduces over all ranks; before them one over each group that holds summands of the same
        gradients."""
        mesh = self._model.mesh
        ranks = torch.zeros(3, mesh.layout.world_size, dtype=torch.float64)
        ranks[:, mesh.rank] = torch.tensor([busy, jitter, device_share], dtype=torch.float64)
        own = [self.layers.sums, self.micro.sums(), self.cosine.sketches, self.forward.squares.cpu(), ranks]
        world = mesh.group("world")
        total = world.all_reduce_(torch.cat([one.flatten() for one in own]).to(mesh.device)).cpu()
        largest = world.all_reduce_(self.forward.largest, "max")
        layers, micro, sketches, squares, ranks = torch.split(total, [one.numel() for one in own])
        groups, disagreement = self.micro.read(micro)
        busy_by_rank, jitters, shares = ranks.view_as(own[-1]).tolist()
        return StepFigures(
            self.layers.figures(layers.view_as(own[0]), self.norms.layers()),
            estimate_noise(groups, sequences=self._sequences, targets=self._targets),
            disagreement,
            busy_by_rank,
            jitters,
            cosine(sketches.view_as(self.cosine.sketches)),
            largest.tolist(),
            [math.sqrt(square / count) for square, count in squares.view(-1, 2).tolist()],
            shares,
        )
