"""Saving while training goes on: when, what is said about it, and what is recorded.

A save that begins is not yet a checkpoint: its outcome is known steps later, when the ranks agree that it is complete
(`Saver`). So each step boundary asks for the outcome of a save in flight, and costs nothing while there is none.

A save that fails (a full disk) is a warning: training goes on and the last good checkpoint stays. `failed` says whether
the last attempt did, so that a run which lost its end does not exit as a success.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from modelworks.checkpoint import Outcome, Retention, Saver, Storage, complete_checkpoints, step_number
from modelworks.config import describe_seconds, failure_rate
from modelworks.data import Dataset
from modelworks.train.derivation import Decision, Derived
from modelworks.train.loop import StepDone
from modelworks.train.one_rank import on_rank_0
from modelworks.train.pace import EveryInterval, EverySteps, Pace
from modelworks.train.recording import RunLog
from modelworks.train.resuming import Found
from modelworks.train.state import TrainState
from modelworks.train.terminal import Terminal

_WORTH_SAYING = 0.05  # seconds of waiting


@dataclass
class Checkpoints:
    """Saves on an interval, at steps to be kept for good, at the best evaluation so far and at the end.

    latest: the newest complete checkpoint, as a path or URL, and latest_step its step; None while there is none.
    """

    log: RunLog
    terminal: Terminal
    derived: Derived
    saver: Saver | None
    pace: Pace
    dataset: Dataset
    storage: Storage | None  # None: nothing is ever saved
    retention: Retention | None
    latest: str | None = None
    latest_step: int | None = None
    failed: bool = False
    _saved_step: int = -1  # of the newest save that began and has not failed
    _failed_step: int = -1  # of the newest save that failed
    _seconds: float | None = None  # that a save takes on the slowest rank, as last measured
    _staging: int = 0  # bytes of host memory held for copies

    def after_step(self, state: TrainState, done: StepDone) -> None:
        if self.saver is None:
            return
        if self.saver.in_flight:
            self._take(state, self.saver.poll())
        due = self.pace.is_due(done.step)
        if done.undone or (done.stopping and not done.last):
            return  # `stop` decides whether there is time to save
        keep_every = self.derived.keep_every
        milestone = keep_every is not None and done.step % keep_every == 0
        if self._improved(state) or milestone or done.last:
            self.begin(state)
        elif due:
            self.begin(state, may_skip=True)

    def catch_up(self, state: TrainState) -> None:
        """Save what an evaluation before the first step found to be the best, with that evaluation."""
        if self._improved(state):
            self._saved_step = -1
            self.begin(state)

    def begin(self, state: TrainState, *, may_skip: bool = False) -> None:
        """Begin to save unless this very step is saved already. may_skip: `checkpoint.when_busy` decides what happens
        where the save before is still being written; otherwise it is waited for."""
        if self.saver is None or self._saved_step == state.step:
            return
        if self.saver.in_flight:
            before = f"the save of step {self._saved_step} is still being written"
            if may_skip and self.derived.config.checkpoint.when_busy == "skip":
                self._tell(state, f"{before}: this step is not saved (checkpoint.when_busy is skip)")
                self.log.figure(state.step, "checkpoint/skipped", 1)
                return
            started = time.monotonic()
            self._take(state, self.saver.wait())
            waited = time.monotonic() - started
            if waited >= _WORTH_SAYING:
                self._tell(state, f"{before}: waited {waited:.1f} s for it")
            self.log.figure(state.step, "checkpoint/waited_seconds", waited, "s")
        self.pace.began()
        self._saved_step = state.step
        if self.retention:
            self.retention.back_to = _earliest_needed(state)
        begun = self.saver.begin(state.step, state.shards, state.identity(self.derived.config, self.dataset))
        self._staging = begun.buffer
        if not self.derived.config.checkpoint.async_:
            self._take(state, self.saver.wait())

    def went_back(self, state: TrainState) -> None:
        """The run goes on from `state.step`: what was saved behind it is of steps that did not happen, and is removed.
        All ranks call it, with no save in flight."""
        storage = self.storage
        if storage is None:
            return
        self.pace.went_back(state.step)
        problem, left = on_rank_0(state.model.mesh, lambda: _forget_after(storage, state.step))
        if problem:
            self._warn(state, state.step, problem)
        self.latest = storage.folder(left).label if left else None
        self.latest_step = step_number(left) if left else None
        self._saved_step = -1 if self.latest_step is None else self.latest_step
        self._failed_step = -1

    def finish(self, state: TrainState) -> None:
        """Wait for the save in flight, if there is one."""
        if self.saver is not None and self.saver.in_flight:
            self._take(state, self.saver.wait())

    def stop(self, state: TrainState, deadline: Callable[[], float | None] = lambda: None) -> None:
        """Save where the run ends, unless that was done or has just failed; every rank must call it. deadline: when, of
        `time.monotonic`, this process may be killed, asked late, since a signal may come while a save is waited for; a
        save that would then not be complete is not begun."""
        self.finish(state)  # what is nearly complete comes first
        if state.step in (self._saved_step, self._failed_step):
            return
        world, until = state.model.mesh.group("world"), deadline()
        left = min(world.gather_objects(math.inf if until is None else until - time.monotonic()))
        if self.latest and self._seconds is not None and self._seconds > left:
            times = f"a save takes {self._seconds:.1f} s, and of checkpoint.grace {max(left, 0.0):.1f} s are left"
            self._tell(state, f"{times}: this step is not saved; {self.kept()}")
            return
        self.begin(state)
        self.finish(state)

    def kept(self) -> str:
        """In words, what a reader can go back to."""
        return f"the last good checkpoint is {_name(self.latest)}" if self.latest else "there is no checkpoint yet"

    def kept_until(self, state: TrainState, step: int) -> str:
        """In words, the newest checkpoint of that step or an earlier one, and which are newer. All ranks call it."""
        storage = self.storage
        names = on_rank_0(state.model.mesh, lambda: list(complete_checkpoints(storage))) if storage else []
        good = [name for name in names if step_number(name) <= step]
        newer = [name for name in names if name not in good]
        text = f"the last good checkpoint is {good[-1]}" if good else f"there is no checkpoint of step {step} or before"
        return f"{text}; what came after may be ruined ({', '.join(newer)})" if newer else text

    def _take(self, state: TrainState, outcome: Outcome | None) -> None:
        """Say and record how a save ended; None: it has not."""
        if outcome is None:
            return
        if outcome.warning:
            self._warn(state, outcome.step, outcome.warning)
        if outcome.where is None:
            self.failed, self._saved_step, self._failed_step = True, -1, outcome.step
            self._warn(state, outcome.step, f"the checkpoint could not be written ({outcome.error}); {self.kept()}")
            return
        self.failed, self.latest, self.latest_step = False, outcome.where, outcome.step
        took = state.model.mesh.group("world").gather_objects((outcome.stall_seconds, outcome.write_seconds))
        stall, write = max(stall for stall, _ in took), max(write for _, write in took)
        self._record(outcome, stall, write)
        self._seconds = stall + write
        interval = self.pace.learn(stall, stall + write)
        if interval is not None:
            decision = Decision("checkpoint.every", describe_seconds(interval.seconds), interval.reason)
            self.log.event(state.step, "decision", asdict(decision))
            self.terminal.say(f"step {state.step}: saving every {decision.value}: {decision.reason}")

    def _record(self, outcome: Outcome, stall: float, write: float) -> None:
        self.log.event(outcome.step, "checkpoint", str(outcome.where))
        self.log.figure(outcome.step, "checkpoint/stall_seconds", stall, "s")
        self.log.figure(outcome.step, "checkpoint/write_seconds", write, "s")
        self.log.figure(outcome.step, "checkpoint/bytes", outcome.total_bytes, "bytes")
        if write > 0:
            self.log.figure(outcome.step, "checkpoint/bandwidth", outcome.total_bytes / write, "bytes/s")
        self.log.figure(outcome.step, "checkpoint/staging", self._staging, "bytes")

    def _warn(self, state: TrainState, step: int, text: str) -> None:
        text = f"step {step}: {text}"
        self.log.event(state.step, "warning", text)
        goes_on = "; training goes on" if state.step < self.derived.total_steps else ""
        self.terminal.say(f"warning: {text}{goes_on}")

    def _tell(self, state: TrainState, text: str) -> None:
        self.log.event(state.step, "remark", text)
        self.terminal.say(f"step {state.step}: {text}")

    def _improved(self, state: TrainState) -> bool:
        """Whether this step's evaluation is the best so far; remembers it."""
        settings = self.derived.config.evaluate
        value = state.metrics.get(settings.best_metric)
        if value is None or not math.isfinite(value):
            return False
        sign = 1 if settings.best_mode == "min" else -1
        if state.best is not None and sign * value >= sign * state.best[0]:
            return False
        state.best = (value, state.step)
        return True


def build_checkpoints(
    derived: Derived,
    state: TrainState,
    dataset: Dataset,
    log: RunLog,
    terminal: Terminal,
    storage: Storage | None,
    resumed: Found | None,
) -> Checkpoints:
    """storage: where this run's checkpoints go; None: nowhere. resumed: the one that it goes on from, which is never
    removed."""
    config, mesh = derived.config, state.model.mesh
    if storage is None:
        return Checkpoints(log, terminal, derived, None, _pace(derived, state), dataset, None, None)
    settings = config.checkpoint
    goes_on_here = resumed is not None and storage.folder(resumed.candidate.name).label == resumed.checkpoint.label
    retention = Retention(
        storage,
        keep_last=settings.keep_last,
        keep_every=derived.keep_every,
        best=(config.evaluate.best_metric, config.evaluate.best_mode),
        protect=[resumed.candidate.name] if resumed and goes_on_here else [],
    )
    _ = state.shards  # worked out here and not in the first save: for hundreds of ranks that takes seconds
    saver = Saver(mesh, storage, background=settings.async_, staging_limit=settings.staging, retention=retention)
    checkpoints = Checkpoints(log, terminal, derived, saver, _pace(derived, state), dataset, storage, retention)
    if resumed:
        checkpoints.latest, checkpoints.latest_step = resumed.checkpoint.label, resumed.checkpoint.step
        if goes_on_here:
            checkpoints._saved_step = resumed.checkpoint.step
    return checkpoints


def _earliest_needed(state: TrainState) -> int | None:
    """The earliest step that the run may yet go back to, or a reader of its stop report; None where that is no rung."""
    monitor = state.watch.monitor if state.watch else None
    if monitor is None or monitor.config.spikes not in ("rollback", "stop"):
        return None
    return monitor.good_course(state.step + 1)


def _forget_after(storage: Storage, step: int) -> tuple[str, str | None]:
    """(what went wrong, the newest complete one that is left)."""
    problem = ""
    try:
        for name in storage.checkpoints():
            if step_number(name) > step:
                storage.remove(name)
    except OSError as error:
        problem = f"checkpoints of undone steps could not be removed ({error.strerror or error})"
    left = [name for name in complete_checkpoints(storage) if step_number(name) <= step]
    if left and not problem:
        storage.point_latest(left[-1])
    return problem, left[-1] if left else None


def _pace(derived: Derived, state: TrainState) -> Pace:
    if derived.checkpoint_every is not None:
        return EverySteps(derived.checkpoint_every)
    assert derived.save_interval is not None
    mesh = state.model.mesh
    rate = failure_rate(mesh.layout.world_size, derived.config.checkpoint.mean_time_between_failures)
    return EveryInterval(mesh, derived.save_interval, rate, state.step)


def _name(where: str) -> str:
    return where.rstrip("/").rpartition("/")[2]
