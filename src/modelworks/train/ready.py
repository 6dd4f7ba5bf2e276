"""Ready for the first step: what was prepared, and the state, initial or from the newest sound checkpoint."""

from __future__ import annotations

import gc
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from modelworks.checkpoint import CorruptedCheckpoint
from modelworks.config import RunConfig
from modelworks.hardware import Machine
from modelworks.parallel import Mesh
from modelworks.train.out_of_memory import OutOfMemory
from modelworks.train.preparation import Prepared, prepare
from modelworks.train.reading import CarefulReader
from modelworks.train.recording import MemoryMeter
from modelworks.train.resuming import Candidate
from modelworks.train.start import build_state
from modelworks.train.state import TrainState


@dataclass
class Start:
    """From a configuration to a state that is ready for the first step, or for the one after a checkpoint."""

    config: RunConfig
    run_dir: Path
    mesh: Mesh
    console: Console
    resume: bool
    machine: Machine | None
    held: ExitStack

    def begin(self) -> tuple[Prepared, TrainState, MemoryMeter, OutOfMemory]:
        """A checkpoint whose bytes turn out to be damaged gives way to the next older one, and all that follows from it
        is worked out anew."""
        unusable: list[Candidate] = []
        self.held.callback(shutil.rmtree, self.run_dir / "offload", ignore_errors=True)
        while True:
            prepared = prepare(
                self.config,
                self.run_dir,
                self.mesh,
                self.console,
                resume=self.resume,
                machine=self.machine,
                unusable=unusable,
            )
            memory = MemoryMeter(prepared.derived.device)
            memory.reset()
            report = self.held.enter_context(OutOfMemory(prepared.derived, self.mesh, prepared.ranks_here))
            try:
                report.state = state = self._build(prepared)
            except CorruptedCheckpoint as error:
                assert prepared.resumed is not None
                unusable.append(prepared.resumed.candidate)
                self.console.print(f"warning: {unusable[-1].name} is not used: {error}", markup=False)
            else:
                return prepared, state, memory, report
            gc.collect()  # the state that was given up, before another is built

    def _build(self, prepared: Prepared) -> TrainState:
        reader = CarefulReader(prepared.resumed.checkpoint) if prepared.resumed else None
        state = build_state(prepared.derived, self.mesh, reader, scratch=self.run_dir / "offload")
        if reader:
            state.restore(reader)
            if _measure_of_best(reader.checkpoint.config) != _measure_of_best(self.config):
                state.best = None  # of another measure: nothing to compare with
        return state


def _measure_of_best(config: RunConfig) -> tuple[str, str]:
    return config.evaluate.best_metric, config.evaluate.best_mode
