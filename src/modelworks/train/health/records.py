"""`HealthRecords`: a hook that writes down what a run's health was, for the report.

    spike                      event   what was seen, what was done, the samples and documents of the batch
    divergence                 event   a loss that has risen over many steps
    health/layers              event   every `layers_every` steps: figures of every layer (`layers.LayerFigures`)
    health/clipped             share of the steps since the last such row whose gradients were clipped
    health/rank_busy           tags rank: seconds a step, without waiting for other ranks, mean since the last row
    health/straggler           the rank that was busy longest
    health/imbalance           its seconds over the mean of all ranks, less 1

A rank that waits is not slow: all ranks take as long as the slowest, and the seconds that each spends outside of
collectives tell which that is. On a device that runs beside its process these are the process's seconds.
"""

from __future__ import annotations

from dataclasses import asdict

import torch

from modelworks.data import TrainLoader
from modelworks.parallel import Mesh
from modelworks.records import Record
from modelworks.train.health.monitor import Judgement
from modelworks.train.loop import StepDone
from modelworks.train.recording import RunLog
from modelworks.train.state import TrainState
from modelworks.train.terminal import Terminal

DOCUMENTS = 64  # named of one batch, those of the rows with the highest loss first
_DONE = {
    None: "nothing was done",
    "skip": "its update was left out",
    "clip": "its update was left out, and clipping is tighter for a while",
    "slow": "its update was left out, and clipping is tighter and the rate lower for a while",
    "stop": "its update was left out, and the run stops",
}


class HealthRecords:
    def __init__(self, log: RunLog, terminal: Terminal, loader: TrainLoader, mesh: Mesh) -> None:
        self._log, self._terminal, self._loader, self._mesh = log, terminal, loader, mesh
        self._steps = self._clipped = 0
        self._busy = 0.0

    def after_step(self, state: TrainState, done: StepDone) -> None:
        watch = state.watch
        assert watch is not None
        self._steps += 1
        self._busy += done.seconds - done.waited
        limit = watch.clip_at
        self._clipped += limit is not None and done.result.grad_norm > limit
        if judgement := done.result.judgement:
            self._tell(done, judgement)
        if watch.measures:
            self._measure(state, done)
            self._steps, self._clipped, self._busy = 0, 0, 0.0

    def _tell(self, done: StepDone, judgement: Judgement) -> None:
        step = done.step
        if judgement.spikes:
            rows, batch = done.result.rows, self._loader.global_batch
            first = (step - 1) * batch
            suspects = None if rows is None else [first + rows[0], first + rows[1] - 1]
            order = [*range(*rows), *(row for row in range(batch) if not rows[0] <= row < rows[1])] if rows else None
            documents = self._loader.documents(step - 1, order)
            self._log.event(
                step,
                "spike",
                {
                    "curves": [spike.curve for spike in judgement.spikes],
                    "loss": str(done.result.loss),
                    "grad_norm": str(done.result.grad_norm),
                    "reason": judgement.reason,
                    "answer": "new level" if judgement.new_level else judgement.answer or "none",
                    "samples": [first, first + batch - 1],
                    "highest_loss": suspects,
                    "documents": documents[:DOCUMENTS],
                    "documents_left_out": max(0, len(documents) - DOCUMENTS),
                },
            )
            done_about_it = "" if judgement.new_level else f": {_DONE[judgement.answer]}"
            where = f" (highest loss in samples {suspects[0]} to {suspects[1]})" if suspects else ""
            self._terminal.say(f"warning: step {step}: spike, {judgement.reason}{where}{done_about_it}")
        if judgement.drift:
            now, lowest = judgement.drift
            text = f"the loss has risen to {now:.4g} from {lowest:.4g}, the lowest level so far"
            self._log.event(step, "divergence", {"loss": now, "lowest": lowest, "text": text})
            self._terminal.say(f"warning: step {step}: {text}: the run diverges")

    def _measure(self, state: TrainState, done: StepDone) -> None:
        """One all-reduce: four numbers a layer, and one a rank."""
        watch, mesh = state.watch, self._mesh
        assert watch is not None
        assert watch.layers is not None
        sums, world = watch.layers.sums, mesh.layout.world_size
        busy = torch.zeros(world, dtype=torch.float64)
        busy[mesh.rank] = self._busy / self._steps
        total = mesh.group("world").all_reduce_(torch.cat([sums.flatten(), busy]).to(mesh.device)).cpu()
        figures = watch.layers.figures(total[: sums.numel()].view_as(sums))
        log, step = self._log, done.step
        rounded = {
            key: values if key == "layers" else [float(f"{value:.4g}") for value in values]
            for key, values in asdict(figures).items()
        }
        if not done.result.applied:
            del rounded["weight_norm"], rounded["update_ratio"]  # there was no update
        log.event(step, "health/layers", rounded)
        log.figure(step, "health/clipped", self._clipped / self._steps)
        if world > 1:
            seconds = total[sums.numel() :].tolist()
            log.write(
                *(Record(step, "health/rank_busy", each, "s", tags={"rank": rank}) for rank, each in enumerate(seconds))
            )
            slowest = max(range(world), key=seconds.__getitem__)
            log.figure(step, "health/straggler", slowest)
            log.figure(step, "health/imbalance", seconds[slowest] * world / sum(seconds) - 1 if sum(seconds) else 0.0)
