"""What a worker of the pool does in the tests of split runs: `train` on its rank, with one thing changed."""

from __future__ import annotations

import errno
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from modelworks.checkpoint import open_checkpoint
from modelworks.checkpoint.faults import at_each_point
from modelworks.config import RunConfig, UserError, parse_run_config
from modelworks.hardware import Machine, facts
from modelworks.models import routing_state
from modelworks.parallel import Mesh, RankLost
from modelworks.train import TrainingFailed, derive, loop, train
from modelworks.train.experts import whole_model
from modelworks.train.one_rank import on_rank_0
from modelworks.train.reading import CarefulReader
from modelworks.train.start import build_state

MACHINE = Machine(facts(), "cpu", "", 1, {"fp32": 1e11, "bf16": 1e11, "fp16": 1e9}, 1e10, "", 0.0)


def run(mesh: Mesh, config: str, run_dir: str, **flags: Any) -> dict[str, Any]:
    """The result of this rank."""
    return asdict(train(_read(config), Path(run_dir), machine=MACHINE, mesh=mesh, **flags))


def stopped(mesh: Mesh, config: str, run_dir: str, step: int) -> dict[str, Any]:
    """Only the last rank gets a signal, before its update number `step`."""

    def action() -> None:
        if mesh.rank == mesh.layout.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with _before_step(step, action):
        return run(mesh, config, run_dir)


def on_a_full_disk(mesh: Mesh, config: str, run_dir: str, saves: int) -> dict[str, Any]:
    """After so many saves the disk of the last rank is full, in the middle of a file."""
    files = 0

    def hook(point: str) -> None:
        nonlocal files
        files += point == "before a shard file"
        if point == "between two tensors" and files > saves and mesh.rank == mesh.layout.world_size - 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    with at_each_point(hook):
        return run(mesh, config, run_dir)


def broken(mesh: Mesh, config: str, run_dir: str, step: int) -> str:
    """What `train` raises where the loss weights of the last data rank's last row are not finite at `step`."""
    real = loop.train_step

    def train_step(model: Any, optimizer: Any, batch: Any, *arguments: Any, **named: Any) -> Any:
        if named["step"] == step and mesh.place("dp") == mesh.size("dp") - 1:
            batch.loss_weights[-1] = torch.nan
        return real(model, optimizer, batch, *arguments, **named)

    with patch.object(loop, "train_step", train_step):
        try:
            run(mesh, config, run_dir)
        except TrainingFailed as error:
            return str(error)
    return ""


def without_memory(mesh: Mesh, config: str, run_dir: str) -> str:
    """What the last rank says where it runs out of memory in its second step; the others never come so far."""

    def action() -> None:
        if mesh.rank == mesh.layout.world_size - 1:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:1] . DefaultCPUAllocator: can't allocate memory: 9 bytes"
            )
        raise _Elsewhere

    with _before_step(1, action):
        try:
            run(mesh, config, run_dir)
        except TrainingFailed as error:
            return str(error)
        except _Elsewhere:
            pass
    return ""


def compiled(mesh: Mesh, config: str, run_dir: str) -> dict[str, Any]:
    """As `run`, while torch's compiler may warn about its own doings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run(mesh, config, run_dir)


def whole_biases(mesh: Mesh, config: str, run_dir: str, checkpoint: str) -> dict[str, list[float]] | None:
    """Biases of the routers in the model that samples are drawn from, where the ranks restored a checkpoint."""
    derived = derive(_read(config), MACHINE)
    reader = CarefulReader(open_checkpoint(Path(checkpoint)))
    found = build_state(derived, mesh, reader, scratch=Path(run_dir))
    found.restore(reader)
    model = whole_model(found.model)
    return None if model is None else {name: bias.tolist() for name, bias in routing_state(model).items()}


def patient(mesh: Mesh) -> tuple[str, ...]:
    """What each rank gets of rank 0's work: a result, a mistake of the user, another failure."""

    def fail(error: Exception) -> str:
        raise error

    told = [on_rank_0(mesh, lambda: "built")]
    for error in (UserError("no such file"), OSError("disk")):
        try:
            on_rank_0(mesh, lambda error=error: fail(error))
        except UserError as mistake:
            told.append(str(mistake))
        except (OSError, RankLost) as failure:
            told.append(type(failure).__name__)
    return tuple(told)


class _Elsewhere(Exception):
    """Ends a rank whose partner is gone, which would wait for it."""


@contextmanager
def _before_step(number: int, action: Any) -> Iterator[None]:
    real = loop.train_step

    def train_step(*arguments: Any, step: int, **named: Any) -> Any:
        if step == number:
            action()
        return real(*arguments, step=step, **named)

    with patch.object(loop, "train_step", train_step):
        yield


def _read(config: str) -> RunConfig:
    return parse_run_config(config, "test")
