"""`HealthRecords`: a hook that writes down what a run's health was, for the report.

    spike                      event   what was seen, what was done, the samples and documents of the batch
    outlier                    event   a gradient norm far from usual that is no spike, with the same
    divergence                 event   a loss that has risen over many steps, and what was done

and of measured steps what `measurements` writes; docs/health.md lists it.
"""

from __future__ import annotations

import math
from typing import Any

from modelworks.data import TrainLoader
from modelworks.parallel import Mesh
from modelworks.train.health.layers import LayerFigures
from modelworks.train.health.measurements import Measurements
from modelworks.train.health.monitor import Judgement
from modelworks.train.loop import StepDone
from modelworks.train.recording import RunLog
from modelworks.train.state import TrainState
from modelworks.train.step import NonFiniteStep
from modelworks.train.terminal import Terminal

DOCUMENTS = 64  # named of one batch, those of the rows with the highest loss first
_DONE = {
    None: "nothing was done",
    "skip": "its update was left out",
    "clip": "its update was left out, and clipping is tighter for a while",
    "slow": "its update was left out, and clipping is tighter and the rate lower for a while",
    "rollback": "the run goes back to an earlier state",
    "stop": "its update was left out, and the run stops",
}
_DONE_AGAINST = {
    None: "nothing was done",
    "clip": "clipping is tighter for a while",
    "slow": "clipping is tighter and the rate lower for a while",
    "rollback": "the run goes back to before the rise, and on at a lower rate for a while",
    "stop": "the run stops",
}


class HealthRecords:
    def __init__(self, log: RunLog, terminal: Terminal, loader: TrainLoader, mesh: Mesh) -> None:
        self._log, self._terminal, self._loader = log, terminal, loader
        self._measurements = Measurements(log, terminal, mesh)

    @property
    def layers(self) -> LayerFigures | None:
        """Figures of the layers at the last step, where they were measured."""
        return self._measurements.layers

    def after_step(self, state: TrainState, done: StepDone) -> None:
        assert state.watch is not None
        if judgement := done.result.judgement:
            self._tell(done, judgement)
        self._measurements.after_step(state.watch, done)

    def _tell(self, done: StepDone, judgement: Judgement) -> None:
        step = done.step
        values = {"loss": str(done.result.loss), "grad_norm": str(done.result.grad_norm)}
        if judgement.outlier:
            fields: dict[str, Any] = {"curves": [judgement.outlier.curve], **values, "reason": str(judgement.outlier)}
            self._event(step, "outlier", fields, done.result.rows)
        if judgement.spikes:
            fields = {
                "curves": [spike.curve for spike in judgement.spikes],
                **values,
                "reason": judgement.reason,
                "answer": "new level" if judgement.new_level else judgement.answer or "none",
            }
            suspects = self._event(step, "spike", fields, done.result.rows)
            done_about_it = "" if judgement.new_level else f": {_DONE[judgement.answer]}"
            where = f" (highest loss in samples {suspects[0]} to {suspects[1]})" if suspects else ""
            self._terminal.say(f"warning: step {step}: spike, {judgement.reason}{where}{done_about_it}")
        if judgement.drift:
            now, lowest = judgement.drift
            text = f"the loss has risen to {now:.4g} from {lowest:.4g}, the lowest level so far"
            answer = judgement.against or "none"
            self._log.event(step, "divergence", {"loss": now, "lowest": lowest, "text": text, "answer": answer})
            done_about_it = _DONE_AGAINST[judgement.against]
            self._terminal.say(f"warning: step {step}: {text}: the run diverges; {done_about_it}")

    def tell_failed(self, step: int, bad: NonFiniteStep) -> None:
        """Of a step that was not finite where nothing answers that: the run ends there."""
        values = {"loss": bad.loss, "gradient_norm": bad.grad_norm}
        curves = [name for name, value in values.items() if not math.isfinite(value)]
        reason = "; ".join(f"{name.replace('_', ' ')} {values[name]}" for name in curves)
        fields = {"curves": curves, "loss": str(bad.loss), "grad_norm": str(bad.grad_norm), "reason": reason}
        self._event(step, "spike", {**fields, "answer": "stop"}, bad.rows)

    def _event(self, step: int, name: str, fields: dict[str, Any], rows: tuple[int, int] | None) -> list[int] | None:
        """rows: (first, end) of the batch's with the highest loss. Returns them as samples (first, last)."""
        first, batch = self._loader.first_sample(step - 1), self._loader.batches.rows(step - 1)
        suspects = None if rows is None else [first + rows[0], first + rows[1] - 1]
        order = [*range(*rows), *(row for row in range(batch) if not rows[0] <= row < rows[1])] if rows else None
        documents = self._loader.documents(step - 1, order)
        where = {
            "samples": [first, first + batch - 1],
            "highest_loss": suspects,
            "documents": documents[:DOCUMENTS],
            "documents_left_out": max(0, len(documents) - DOCUMENTS),
        }
        self._log.event(step, name, {**fields, **where})
        return suspects
