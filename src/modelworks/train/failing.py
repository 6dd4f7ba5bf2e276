"""What a run does when it cannot go on: keep what is worth it, and leave a report for whoever looks at it."""

from __future__ import annotations

from modelworks.parallel import agree
from modelworks.train.assembly import Hooks
from modelworks.train.health.stop_report import STOP_REPORT, write_stop_report
from modelworks.train.loop import TrainingFailed
from modelworks.train.preparation import Prepared
from modelworks.train.state import TrainState


def tell_failure(prepared: Prepared, state: TrainState, hooks: Hooks, error: TrainingFailed) -> str:
    """Save what is worth it, and write the stop report. Returns in words what there is to go back to."""
    log, checkpoints = hooks.log, hooks.checkpoints
    log.event(state.step, "warning", str(error))
    if error.judgement:
        assert state.watch is not None
        assert state.watch.monitor is not None
        checkpoints.finish(state)  # and no more: its weights may be ruined
        monitor = state.watch.monitor
        good = monitor.good_course if error.judgement.against else monitor.good_before
        kept = checkpoints.kept_until(state, good(state.step))
    else:
        checkpoints.stop(state)
        kept = checkpoints.kept()
    if hooks.health and error.bad:
        hooks.health.tell_failed(state.step + 1, error.bad)
    if not (error.judgement or error.bad):
        return kept
    mesh, written = state.model.mesh, False
    path = hooks.run_dir / STOP_REPORT
    if mesh.is_main:
        try:
            write_stop_report(hooks.run_dir, state.step, str(error), kept, prepared.dataset)
            written = True
        except OSError as problem:
            log.event(state.step, "warning", f"{problem.filename}: cannot be written ({problem.strerror})")
    if agree(written, mesh):  # all ranks fail with the same words
        kept += f"; the batches, their documents and what to do: {path}"
    return kept
