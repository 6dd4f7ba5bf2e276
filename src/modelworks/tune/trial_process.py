"""One trial with the real trainer, in a process of its own, on as many ranks as the run's layout has.

A trial that dies takes nothing with it, begins with a clean memory, and cannot change what comes after it. A split
run's ranks are started below that process as `modelworks train` starts them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from modelworks.config import RunConfig, parse_run_config
from modelworks.hardware import Machine
from modelworks.layout import Layout
from modelworks.parallel import Mesh, RankFailed, joined, launch
from modelworks.train import (
    NonFiniteStep,
    StepDone,
    TrainingFailed,
    joined_mesh,
    keep_freed_memory,
    run_device,
    train,
)
from modelworks.train.state import TrainState
from modelworks.tune.divergence import Divergence
from modelworks.tune.trials import last_loss, thin

TARGET = f"{__name__}:run"


def run(config: str, directory: str, machine: dict[str, Any] | None) -> dict[str, Any]:
    """What a trial's process runs: the row of its outcome, without the trial itself.

    config: YAML. directory: for whatever the run writes. machine: its figures, None measures them.
    Raises `UserError`, and others where nothing was learnt about the rate.
    """
    keep_freed_memory()
    parsed = parse_run_config(config, "the configuration of a trial")
    world_size = Layout.of(parsed.parallel).world_size
    started = time.monotonic()
    if world_size == 1:
        row = train_trial(parsed, Path(directory), machine, None)
    else:
        arguments = {"config": config, "directory": directory, "machine": machine}
        kind = "cuda" if run_device(parsed).type == "cuda" else "cpu"
        ranks = Path(directory) / "ranks"
        try:
            row = launch(f"{__name__}:run_rank", world_size, arguments, directory=ranks, device=kind)[0]
        except RankFailed as error:
            if error.error is not None and error.error[0] == TrainingFailed.__name__:
                raise TrainingFailed(error.error[1]) from None
            raise
    return {**row, "seconds": time.monotonic() - started}


def run_rank(config: str, directory: str, machine: dict[str, Any] | None) -> dict[str, Any]:
    """What each rank of a split trial runs; all return the same."""
    world = joined()
    assert world is not None
    keep_freed_memory()
    parsed = parse_run_config(config, "the configuration of a trial")
    with joined_mesh(parsed, world) as mesh:
        return train_trial(parsed, Path(directory), machine, mesh)


def train_trial(
    config: RunConfig, directory: Path, machine: dict[str, Any] | None, mesh: Mesh | None
) -> dict[str, Any]:
    keep_freed_memory()
    watch = _Watch(int(config.train.duration.value))
    loss: float | None = None
    try:
        result = train(
            config,
            directory,
            machine=Machine.read(machine) if machine else None,
            mesh=mesh,
            further=[watch],
            trial=True,
        )
        if result.stopped_by:
            raise RuntimeError(f"stopped by {result.stopped_by}")
        assert result.val_loss is not None
        loss = result.val_loss
        reason = watch.divergence.at_end(loss)
    except _Diverged as error:
        reason = str(error)
    except TrainingFailed as error:
        reason = _not_finite(error)
        if reason is None:
            raise
    losses = watch.divergence.losses
    return {
        "status": "diverged" if reason else "finished",
        "loss": None if reason else loss,
        "train_loss": last_loss(losses),
        "steps": len(losses),
        "reason": reason or "",
        "curve": [list(point) for point in thin(losses)],
    }


class _Diverged(Exception):
    pass


class _Watch:
    """A hook that keeps the losses and ends the trial where they diverge. Losses are the same on all ranks."""

    def __init__(self, total_steps: int) -> None:
        self.divergence = Divergence(total_steps)

    def after_step(self, state: TrainState, done: StepDone) -> None:
        reason = self.divergence.add(done.result.loss, done.result.judgement)
        if reason:
            raise _Diverged(reason)


def _not_finite(error: TrainingFailed) -> str | None:
    """In words, where that is why the trainer gave up; None for other reasons, such as want of memory."""
    for cause in _causes(error):
        if isinstance(cause, NonFiniteStep):
            return f"{cause}"
        if isinstance(cause, FloatingPointError):  # fp16 whose loss scale cannot fall any lower
            return str(cause)
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
