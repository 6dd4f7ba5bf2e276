"""`Watch`: what looks at a step from inside it, between the backward pass and the update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from modelworks.config import RunConfig
from modelworks.data.batch import Batch
from modelworks.optim import Optimizer
from modelworks.parallel import SplitModel
from modelworks.train.health.gradient_norms import GradientNorms
from modelworks.train.health.judgements import Judge
from modelworks.train.health.monitor import Judgement, Monitor
from modelworks.train.health.noise import NoiseScale
from modelworks.train.health.probes import Probes


class Watch:
    """monitor: judges steps; None: nobody does. probes: what is measured; None where that is never wanted. noise: the
    average of what they found of the gradient's noise. run_judge: of the course of the run; None: nobody."""

    def __init__(self, config: RunConfig, model: SplitModel, optimizer: Optimizer, *, warmup_steps: int) -> None:
        health, grad_clip = config.health, config.train.grad_clip
        self.monitor: Monitor | None = None
        if health.spikes != "off":
            self.monitor = Monitor(health, warmup_steps=warmup_steps, grad_clip=grad_clip)
        self.probes = Probes(model) if health.layers_every else None
        self.noise = NoiseScale()
        self.run_judge = Judge(health, warmup_steps=warmup_steps) if health.judgements else None
        self._every, self._grad_clip = health.layers_every, grad_clip
        self._model, self._optimizer = model, optimizer
        self._updated: dict[str, Tensor] | None = None
        self.step = 0

    @property
    def ended(self) -> bool:
        """Whether the run is to end before its last step. A resumed run is told so at once."""
        return self.run_judge is not None and self.run_judge.ends

    def begin(self, step: int) -> None:
        """step: the one that comes, from 1."""
        self.step = step

    @property
    def rate_factor(self) -> float:
        return self.monitor.rate_factor(self.step) if self.monitor else 1.0

    @property
    def clip_at(self) -> float | None:
        """The norm at which this step's gradients are clipped."""
        return self.monitor.clip_at(self.step) if self.monitor else self._grad_clip

    @property
    def measures(self) -> Probes | None:
        """The probes, in a step that is measured."""
        return self.probes if self._every and self.step % self._every == 0 else None

    def before_passes(self, parts: Sequence[Batch], targets: float, scale: float) -> Probes | None:
        """What is to see the passes that come; see `Probes.before_passes`."""
        if probes := self.measures:
            probes.before_passes(self.step, parts, targets, scale)
        return probes

    def before_clipping(self, gradients: Mapping[str, Tensor]) -> GradientNorms | None:
        """What has seen the gradients' norms, for clipping to use; None where that is not wanted."""
        if self.probes:
            self.probes.norms.see(gradients)
        if probes := self.measures:
            probes.before_clipping(self.step, gradients)
        if self.probes and self._every and (self.step + 1) % self._every == 0:
            self.probes.cosine.keep(self.step, gradients)
        return self.probes.norms if self.probes else None

    def judge(self, loss: float, norm: float) -> Judgement | None:
        return self.monitor.judge(self.step, loss, norm) if self.monitor else None

    def before_update(self) -> None:
        if probes := self.measures:
            probes.before_update(self._weights)

    def after_update(self) -> None:
        if probes := self.measures:
            probes.after_update(self._weights)

    @property
    def _weights(self) -> dict[str, Tensor]:
        """What the optimiser updates: master copies where there are any. Updates change the tensors in place."""
        if self._updated is None:
            state = self._optimizer.named_state()
            masters = {name.removesuffix("/master"): tensor for name, tensor in state if name.endswith("/master")}
            stored = self._model.stored
            self._updated = {name: masters.get(name, tensor).detach() for name, tensor in stored.items()}
        return self._updated
