"""`HealthRecords`: a hook that writes down what a run's health was, for the report.

    spike                      event   what was seen, what was done, the samples and documents of the batch
    divergence                 event   a loss that has risen over many steps

and of measured steps what `measurements` writes; docs/health.md lists it.
"""

from __future__ import annotations

from modelworks.data import TrainLoader
from modelworks.parallel import Mesh
from modelworks.train.health.measurements import Measurements
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
        self._log, self._terminal, self._loader = log, terminal, loader
        self._measurements = Measurements(log, terminal, mesh)

    def after_step(self, state: TrainState, done: StepDone) -> None:
        assert state.watch is not None
        if judgement := done.result.judgement:
            self._tell(done, judgement)
        self._measurements.after_step(state.watch, done)

    def _tell(self, done: StepDone, judgement: Judgement) -> None:
        step = done.step
        if judgement.spikes:
            rows, batch = done.result.rows, self._loader.batches.rows(step - 1)
            first = self._loader.batches.first_sample(step - 1)
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
