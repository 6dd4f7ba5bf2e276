"""`Probes`: everything that is measured inside of a step, together, and what all ranks found.

In a measured step, in this order: `before_passes`, `before_clipping`, and if there is an update `before_update` and
`after_update`; then `collect`, on every rank, outside of what is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelworks.data.batch import Batch
from modelworks.parallel import SplitModel
from modelworks.train.health.layers import LayerFigures, LayerProbe, squared_norms
from modelworks.train.health.micro_gradients import Disagreement, MicroGradients
from modelworks.train.health.noise import NoiseEstimate, estimate_noise


@dataclass(frozen=True)
class StepFigures:
    """Of one measured step, the same on every rank. noise: None where the step is one part. busy: seconds by rank."""

    layers: LayerFigures
    noise: NoiseEstimate | None
    disagreement: Disagreement | None
    busy: list[float]


class Probes:
    def __init__(self, model: SplitModel) -> None:
        self._model = model
        self.layers, self.micro = LayerProbe(model.split), MicroGradients(model)
        self._targets, self._sequences = 0.0, 0

    def before_passes(
        self, step: int, parts: Sequence[Batch], targets: float, scale: float
    ) -> Callable[[str, int, Tensor], None]:
        """What is to see each gradient of the passes that come. parts: this rank's micro-batches, whole rows. targets:
        target weight of the global batch. scale: of the losses."""
        self._targets = targets
        self._sequences = sum(part.n_rows for part in parts) * self._model.mesh.size("dp")
        self.micro.begin(step, [float(part.target_weight()) / targets for part in parts], scale)
        return self.micro.see

    def before_clipping(self, gradients: Mapping[str, Tensor]) -> None:
        """gradients: of this rank's shards, unscaled."""
        squares = squared_norms({name: gradients[name] for name in self.layers.counted if name in gradients})
        self.layers.gradients(squares)
        self.micro.end(squares)

    def before_update(self, weights: Mapping[str, Tensor]) -> None:
        self.layers.before(weights)

    def after_update(self, weights: Mapping[str, Tensor]) -> None:
        self.layers.after(weights)

    def collect(self, busy: float) -> StepFigures:
        """busy: of this rank, seconds. One all-reduce over all ranks; before it one over each group of ranks that hold
        summands of the same gradients, where there are such."""
        mesh = self._model.mesh
        seconds = torch.zeros(mesh.layout.world_size, dtype=torch.float64)
        seconds[mesh.rank] = busy
        own = [self.layers.sums, self.micro.sums(), seconds]
        total = mesh.group("world").all_reduce_(torch.cat([one.flatten() for one in own]).to(mesh.device)).cpu()
        layers, micro, seconds = torch.split(total, [one.numel() for one in own])
        groups, disagreement = self.micro.read(micro)
        return StepFigures(
            self.layers.figures(layers.view_as(own[0])),
            estimate_noise(groups, sequences=self._sequences, targets=self._targets),
            disagreement,
            seconds.tolist(),
        )
