"""Going back: to the state after an earlier step, and on from there with other data.

Which step that is, and what data is left out, is a function of the run alone (`health.Monitor`, `Skips`). Where the
state comes from is not: a snapshot in memory, or else a checkpoint. One that is older than asked for does as well: the
steps between are made again, with the data that they had. So a run that was killed and resumed anywhere, which has lost
its snapshots, ends bit for bit where it would have ended.

For that, a checkpoint old enough is always kept (`Retention.back_to`), that of step 0 at first. Checkpoints of steps
that are undone are removed; records of them stay, before the event `rollback`, which marks them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from modelworks.checkpoint import CorruptedCheckpoint
from modelworks.config import RunConfig
from modelworks.data import Skip, TrainLoader
from modelworks.train.derivation import Decision
from modelworks.train.health import Judgement, Monitor
from modelworks.train.loop import StepDone, TrainingFailed
from modelworks.train.one_rank import on_rank_0
from modelworks.train.reading import CarefulReader
from modelworks.train.recording import RunLog
from modelworks.train.resuming import Candidate, Found, candidates_until
from modelworks.train.saving import Checkpoints
from modelworks.train.snapshots import Snapshots
from modelworks.train.state import TrainState
from modelworks.train.terminal import Terminal


class Rollbacks:
    """A hook, that keeps states to go back to; the last one, since a state has its evaluation with it. place: where,
    as `choose_place` decided."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        loader: TrainLoader,
        checkpoints: Checkpoints,
        log: RunLog,
        terminal: Terminal,
        place: Decision,
    ) -> None:
        self._config, self._run_dir, self._loader = config, run_dir, loader
        self._checkpoints, self._log, self._terminal = checkpoints, log, terminal
        self._place = place
        self._snapshots = Snapshots() if place.value == "memory" else None

    def begin(self, state: TrainState) -> None:
        """Before the first step of this process."""
        self._log.event(state.step, "decision", asdict(self._place))
        self._terminal.say(f"{self._place.key}: {self._place.value} ({self._place.reason})")
        if state.step == 0:
            self._checkpoints.begin(state)
        self._keep(state)

    def after_step(self, state: TrainState, done: StepDone) -> None:
        if not done.undone:
            self._keep(state)

    def go_back(self, state: TrainState, judgement: Judgement) -> None:
        """Behind the step that was judged, the last one made. Raises TrainingFailed where no state is left."""
        assert judgement.good is not None
        good, spike, loader, monitor = judgement.good, state.step, self._loader, _monitor(state)
        # As far behind the spike as the good step lies before it, at least.
        end = loader.first_sample(spike + self._config.health.calm)
        skip = Skip(spike, good, loader.consumed(good), end)
        history, rollbacks, resumed_from = state.skips.state(), monitor.rollbacks, state.resumed_from
        self._checkpoints.finish(state)
        origin = self._restore(state, judgement, good)
        # What outlives going back: that it happened.
        state.skips.load_state(history)
        state.skips.add(skip)
        monitor.went_back(judgement, rollbacks)
        state.resumed_from = resumed_from
        self._checkpoints.went_back(state)
        self._tell(state, skip, origin)

    def _keep(self, state: TrainState) -> None:
        monitor = _monitor(state)
        if self._snapshots and state.step % self._config.health.calm == 0 and not monitor.in_a_row(state.step):
            self._snapshots.take(state, needed_from=monitor.good_before(state.step + 1))

    def _restore(self, state: TrainState, judgement: Judgement, good: int) -> str:
        """Returns in words where the state came from."""
        if self._snapshots and self._snapshots.newest(good) is not None:
            self._snapshots.restore(state)
            return "memory"
        for candidate in self._candidates(state, good):
            try:
                state.reload(CarefulReader(Found.open(candidate).checkpoint))
            except CorruptedCheckpoint as error:
                self._terminal.say(f"warning: {candidate.name} is not used: {error}")
            else:
                return candidate.name
        raise TrainingFailed(
            f"step {state.step}: {judgement.reason}; there is no state of step {good} or before to go back to, neither "
            "in memory nor in a checkpoint",
            judgement,
        )

    def _candidates(self, state: TrainState, good: int) -> Iterator[Candidate]:
        yield from on_rank_0(state.model.mesh, lambda: candidates_until(self._config, self._run_dir, good))

    def _tell(self, state: TrainState, skip: Skip, origin: str) -> None:
        number = len(state.skips.history)
        fields = {
            "number": number,
            "good": skip.good,
            "from": origin,
            "restarted": state.step,
            "samples": [skip.first, skip.end - 1],
        }
        self._log.event(skip.spike, "rollback", fields)
        self._log.went_back(state.step)
        again = f", from where the steps to {skip.good} are made again" if state.step < skip.good else ""
        self._terminal.say(
            f"step {skip.spike}: back to step {state.step} (from {origin}){again}; then on without samples "
            f"{skip.first:,} to {skip.end - 1:,}"
        )


def _monitor(state: TrainState) -> Monitor:
    assert state.watch is not None
    assert state.watch.monitor is not None
    return state.watch.monitor
