"""`Judging`: a hook that tells the judge what happened, and everybody what it found: events `judgement`.

After the evaluations and before the checkpoint, which saves what was said. All ranks are told the same numbers, so that
they end together where the run ends early.
"""

from __future__ import annotations

from modelworks.train.health.judgements import Finding
from modelworks.train.health.records import HealthRecords
from modelworks.train.loop import StepDone
from modelworks.train.recording import RunLog
from modelworks.train.state import TrainState
from modelworks.train.terminal import Terminal


class Judging:
    """records: what has measured the layers of this step, if anything has."""

    def __init__(self, log: RunLog, terminal: Terminal, records: HealthRecords) -> None:
        self._log, self._terminal, self._records = log, terminal, records

    def after_step(self, state: TrainState, done: StepDone) -> None:
        watch = state.watch
        assert watch is not None
        assert watch.run_judge is not None
        result, judge = done.result, watch.run_judge
        if done.undone:
            return
        if result.applied and not (result.judgement and result.judgement.spikes):
            self._tell(done.step, judge.step(done.step, result.loss, result.grad_norm))
        if figures := self._records.layers:
            moved = figures.update_ratio if result.applied else None
            self._tell(done.step, judge.layers(figures.layers, figures.grad_norm, moved))
        if state.metrics:
            self._tell(done.step, judge.evaluation(done.step, state.metrics))
        if watch.ended and not done.last:
            best = f"; the best evaluation was that of step {state.best[1]:,}" if state.best else ""
            text = f"the run ends early: it overfits, and health.overfitting is stop{best}"
            self._log.event(done.step, "remark", text)
            self._terminal.say(f"step {done.step}: {text}")

    def _tell(self, step: int, findings: list[Finding]) -> None:
        for finding in findings:
            numbers = {name: float(f"{value:.6g}") for name, value in finding.evidence.items()}
            fields = {"kind": finding.kind, "subject": finding.subject, "text": finding.text, "evidence": numbers}
            self._log.event(step, "judgement", fields)
            self._terminal.say(f"warning: step {step}: {finding.kind}: {finding.text}")
