"""Trials in processes of this machine, so many at a time.

A trial that dies is an outcome (failed, with the reason), and its output is kept. Whatever ends this process ends its
trials: an exception kills them here, and the kernel does where there was no time for one.
"""

from __future__ import annotations

import os
import re
import selectors
import shutil
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelworks.config import RunConfig, UserError, dump_yaml
from modelworks.hardware import facts
from modelworks.parallel import Child, kernel_kills, start_child
from modelworks.tune.setup import Setup, machine_row
from modelworks.tune.trial_process import TARGET
from modelworks.tune.trials import Outcome, Trial

_LONGEST_REASON = 300
_FAREWELL = 30.0  # seconds for a process that has given its outcome to leave


@dataclass
class LocalRunner:
    """directory: for what trials write while they run, and the output of those that failed. jobs: trials at a time."""

    setup: Setup
    directory: Path
    jobs: int = 1

    def __post_init__(self) -> None:
        """Raises `UserError` where this machine has too few devices for so many trials at a time."""
        self._devices = _devices(self.setup, self.jobs)
        shutil.rmtree(self.directory / "trials", ignore_errors=True)  # what a kill left

    def run(self, trials: Sequence[Trial]) -> Generator[Outcome]:
        """Outcomes as they come. Raises `UserError` for what a trial says the user can fix."""
        waiting, free = list(trials), list(range(self.jobs))
        running: list[_Running] = []
        with selectors.DefaultSelector() as selector:
            try:
                while waiting or running:
                    while waiting and free:
                        started = self._start(waiting.pop(0), free.pop(0))
                        running.append(started)
                        selector.register(started.child.control, selectors.EVENT_READ, started)
                    for key, _ in selector.select():
                        ended: _Running = key.data
                        ended.child.listen()
                        if ended.child.outcome is not None:
                            selector.unregister(ended.child.control)
                            running.remove(ended)
                            free.append(ended.slot)
                            yield ended.outcome()
            finally:
                for each in running:
                    each.abandon()
                shutil.rmtree(self.directory / "trials", ignore_errors=True)

    def _start(self, trial: Trial, slot: int) -> _Running:
        place = self.directory / "trials" / f"{trial.rate!r}-{trial.seed}"
        environment = dict(os.environ)
        if self.jobs > 1:
            each = max(1, facts().cores // (self.jobs * self.setup.world_size))
            environment.setdefault("OMP_NUM_THREADS", str(each))
        if self._devices:
            environment["CUDA_VISIBLE_DEVICES"] = self._devices[slot]
        log = self.directory / f"failed-{trial.rate!r}-{trial.seed}.log"
        return start_trial(self.setup.of(trial), trial, place, machine_row(self.setup.machine), environment, log, slot)


@dataclass
class _Running:
    trial: Trial
    child: Child
    directory: Path
    log: Path
    slot: int
    kills: int

    def outcome(self) -> Outcome:
        """Of the process that ended; removes what it wrote."""
        said = self.child.outcome or {}
        if said["kind"] == "result":
            self._clear()
            return Outcome.from_row({**said["result"], "rate": self.trial.rate, "seed": self.trial.seed})
        reason = _reason(said) or f"its process {self.child.describe_end(kernel_kills() > self.kills)}"
        self._clear()
        if said["kind"] == "user error":
            raise UserError(reason)
        if self.log.exists():
            reason += f"; its output is in {self.log}"
        return Outcome(self.trial, "failed", None, None, 0, 0.0, reason)

    def abandon(self) -> None:
        self.child.process.kill()
        self._clear()

    def _clear(self) -> None:
        """The output stays where something was said and no outcome came of it."""
        self.child.end(_FAREWELL)
        succeeded = self.child.outcome is None or self.child.outcome["kind"] in ("result", "user error")
        if self.log.exists() and (succeeded or not self.log.stat().st_size):
            self.log.unlink()
        shutil.rmtree(self.directory, ignore_errors=True)


def start_trial(
    config: RunConfig,
    trial: Trial,
    directory: Path,
    machine: dict[str, Any] | None,
    environment: dict[str, str],
    log: Path,
    slot: int = 0,
) -> _Running:
    """A process that makes the trial in a directory of its own; it lives no longer than the thread that calls this."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    child = start_child(environment, log)
    child.tell(TARGET, {"config": dump_yaml(config), "directory": str(directory), "machine": machine}, {})
    return _Running(trial, child, directory, log, slot, kernel_kills())


def _reason(said: dict[str, Any]) -> str | None:
    """Of an outcome that is no result; None where the process ended without a word."""
    if said["kind"] == "exit":
        return f"its process ended with exit code {said['code']}"
    if "text" not in said:
        return None
    text = re.sub(r"\s+", " ", said["text"])[:_LONGEST_REASON]
    return f"{said['type']}: {text}" if said.get("type") not in (None, "TrainingFailed") else text


def _devices(setup: Setup, jobs: int) -> list[str]:
    """Of CUDA, those that each job may see; empty on CPU, and where one job may see all."""
    if setup.config.train.device != "cuda" or jobs == 1:
        return []
    import torch

    count, each = torch.cuda.device_count(), setup.world_size
    if count < jobs * each:
        raise UserError(
            f"--jobs: {jobs} trials at a time need {jobs * each} CUDA devices, and this machine shows {count}"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    return [",".join(names[slot * each : (slot + 1) * each]) for slot in range(jobs)]
