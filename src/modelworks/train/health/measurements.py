"""The records of measured steps. docs/health.md lists them with their units.

A rank that waits is not slow: all ranks take as long as the slowest, and the seconds that each spends outside of
collectives tell which that is. On a device that runs beside its process these are the process's seconds.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict
from typing import Any

from modelworks.parallel import Mesh
from modelworks.records import Record
from modelworks.train.health.device import DeviceMeter
from modelworks.train.health.layers import LayerFigures
from modelworks.train.health.noise import NoiseEstimate, NoiseScale
from modelworks.train.health.probes import StepFigures
from modelworks.train.health.watch import Watch
from modelworks.train.loop import StepDone
from modelworks.train.recording import RunLog
from modelworks.train.terminal import Terminal

_NO_NOISE = (
    "the gradient noise scale is not measured: a step is one micro-batch on one data-parallel rank, with nothing "
    "smaller to compare it with (a smaller train.micro_batch would give it parts)"
)


class Measurements:
    """One run's. Told of every step, it writes where one was measured."""

    def __init__(self, log: RunLog, terminal: Terminal, mesh: Mesh) -> None:
        self._log, self._terminal = log, terminal
        self._clipped = 0
        self._busy: list[float] = []  # seconds of each step since the last row
        self._device = DeviceMeter(mesh.device)
        self._told_of_no_noise = self._told_of_device = False
        self.layers: LayerFigures | None = None  # at the last step, where they were measured

    def after_step(self, watch: Watch, done: StepDone) -> None:
        self._busy.append(done.seconds - done.waited)
        limit = watch.clip_at
        self._clipped += limit is not None and done.result.grad_norm > limit
        probes, self.layers = watch.measures, None
        if done.undone:  # the next step is an earlier one
            self._clipped, self._busy = 0, []
            return
        if probes is None:
            if watch.probes:
                norms = [float(f"{norm:.4g}") for norm in watch.probes.norms.layers()]
                self._log.event(done.step, "health/grad_norms", {"grad_norm": norms})
            return
        busy, step = statistics.fmean(self._busy), done.step
        figures = probes.collect(busy, self._device.share(), statistics.pstdev(self._busy, busy))
        self.layers = figures.layers
        self._write_layers(step, figures, applied=done.result.applied)
        self._log.figure(step, "health/clipped", self._clipped / len(self._busy))
        self._write_noise(step, figures.noise, watch.noise)
        self._write_ranks(step, figures)
        self._write_devices(step, figures.device_shares)
        self._clipped, self._busy = 0, []

    def _write_layers(self, step: int, figures: StepFigures, *, applied: bool) -> None:
        rounded: dict[str, Any] = {
            key: values if key == "layers" else [float(f"{value:.4g}") for value in values]
            for key, values in asdict(figures.layers).items()
        }
        # By layer of the model; what stands outside of the blocks has neither.
        by_block = {"attention_logit_max": figures.attention_logits, "activation_rms": figures.activations}
        for key, values in by_block.items():
            places = [_block(layer) for layer in figures.layers.layers]
            rounded[key] = [None if place is None else float(f"{values[place]:.4g}") for place in places]
            self._log.figure(step, f"health/{key}", max(values))
        if figures.cosine is not None:
            self._log.figure(step, "health/gradient_cosine", figures.cosine)
        if not applied:
            del rounded["weight_norm"], rounded["update_ratio"]  # there was no update
        self._log.event(step, "health/layers", rounded)

    def _write_noise(self, step: int, found: NoiseEstimate | None, scale: NoiseScale) -> None:
        if found is None:
            if not self._told_of_no_noise:
                self._told_of_no_noise = True
                self._log.event(step, "remark", _NO_NOISE)
                self._terminal.say(_NO_NOISE)
            return
        if not found.is_finite:  # a spike, which is told where spikes are
            return
        scale.add(found)
        self._log.figure(step, "noise/trace", found.trace)
        self._log.figure(step, "noise/square", found.square)
        if scale.sequences is not None and scale.tokens is not None:
            self._log.figure(step, "noise/scale", scale.sequences, "sequences")
            self._log.figure(step, "noise/tokens", scale.tokens, "tokens")

    def _write_ranks(self, step: int, figures: StepFigures) -> None:
        log, world = self._log, len(figures.busy)
        if figures.disagreement:
            log.figure(step, "health/disagreement", figures.disagreement.mean)
            for rank, distance in enumerate(figures.disagreement.ranks):
                log.write(Record(step, "health/rank_disagreement", distance, tags={"data_rank": rank}))
        seconds = figures.busy
        log.write(
            *(
                Record(step, "health/rank_jitter", each, "s", tags={"rank": rank})
                for rank, each in enumerate(figures.jitter)
            )
        )
        if world == 1:
            return
        log.write(
            *(Record(step, "health/rank_busy", each, "s", tags={"rank": rank}) for rank, each in enumerate(seconds))
        )
        slowest = max(range(world), key=seconds.__getitem__)
        log.figure(step, "health/straggler", slowest)
        log.figure(step, "health/imbalance", seconds[slowest] * world / sum(seconds) - 1 if sum(seconds) else 0.0)

    def _write_devices(self, step: int, shares: list[float]) -> None:
        known = {rank: share for rank, share in enumerate(shares) if math.isfinite(share)}
        if self._device.reason and not self._told_of_device:
            self._told_of_device = True
            self._log.event(step, "remark", f"the device does not tell its utilization: {self._device.reason}")
        self._log.write(*(Record(step, self._device.name, share, tags={"rank": rank}) for rank, share in known.items()))
        if known:
            self._log.figure(step, self._device.name, sum(known.values()) / len(known))


def _block(layer: str) -> int | None:
    """5 of `blocks.5`, None of `embedding`."""
    name, _, place = layer.partition(".")
    return int(place) if name == "blocks" else None
