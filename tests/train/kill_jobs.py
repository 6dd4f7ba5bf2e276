"""A whole `modelworks train` that is killed when it reaches a point of a save: `python kill_jobs.py ARGUMENTS`.

The arguments are those of `run`, as JSON. The same function is what each rank runs where there are several.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from run_files import assert_same_weights, series

from modelworks.checkpoint import CheckpointError, open_checkpoint
from modelworks.checkpoint.faults import at_each_point
from modelworks.checkpoint.names import LOCK
from modelworks.cli import main as command_line
from modelworks.cli.train_rank import run_rank
from modelworks.config import load_run_config
from modelworks.hardware import Machine, facts
from modelworks.layout import Layout
from modelworks.parallel import RankFailed, joined, launch
from modelworks.train import preparation

MACHINE = Machine(facts(), "cpu", "", 1, {"fp32": 1e11, "bf16": 1e11, "fp16": 1e9}, 1e10, "", 0.0)


@dataclass(frozen=True)
class Kill:
    """Rank `rank` is killed when it reaches `point` for the `count`-th time."""

    point: str
    count: int = 1
    rank: int = 0


NEVER = Kill("", 0)


def finish(config: Path, runs_dir: Path, *, resume: bool) -> None:
    """Train to the end."""
    assert not kill(config, runs_dir, NEVER, resume=resume)


def fresh(arguments: dict[str, Any]) -> tuple[int, str]:
    """`run` in a process that starts from nothing: how it ended, and what it said."""
    command = [sys.executable, __file__, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stderr


def kill(
    config: Path,
    runs_dir: Path,
    how: Kill,
    *,
    resume: bool = False,
    start: Callable[[dict[str, Any]], tuple[int, str]] = fresh,
) -> bool:
    """Train `config` in a process, or on its ranks, until it is killed. Whether it was: False where it ended first.

    start: what runs `run` in a process of its own, where one is enough.
    """
    run = load_run_config(config)
    layout = Layout.of(run.parallel)
    if layout.world_size == 1:
        arguments = {"config": str(config), "runs_dir": str(runs_dir), "resume": resume, **vars(how)}
        code, said = start(arguments)
        assert code in (0, -signal.SIGKILL), said
        return code != 0
    run_dir = runs_dir / run.name
    arguments = {"config": config.read_text(), "run_dir": str(run_dir), "resume": resume, **vars(how)}
    try:
        launch("kill_jobs:run_here", layout.world_size, arguments, directory=run_dir / "ranks", threads=1)
    except RankFailed as error:
        if error.rank != how.rank:
            raise
        return True
    return False


def run(config: str, runs_dir: str, resume: bool, point: str, count: int, rank: int) -> None:
    """The command line in this process."""
    more = ["--resume"] if resume else []
    with at_each_point(_killer(point, count)):
        preparation.measure_machine = lambda **_: MACHINE  # type: ignore[assignment]  # seconds, and not the subject
        sys.exit(command_line.main(["train", config, "--runs-dir", runs_dir, "--json", *more]))


def run_here(config: str, run_dir: str, resume: bool, point: str, count: int, rank: int) -> None:
    """One rank of several."""
    world = joined()
    assert world is not None
    preparation.measure_machine = lambda **_: MACHINE  # type: ignore[assignment]
    with at_each_point(_killer(point, count) if world.rank == rank else lambda _: None):
        run_rank(config, run_dir, json=True, resume=resume, overwrite=False, profile=False)


def same_run(run_dir: Path, reference: Path) -> bool:
    """Whether losses and all tensors of the last checkpoint are the same, bit for bit."""
    try:
        assert_same_weights(run_dir, reference)
    except AssertionError:
        return False
    return series(run_dir, "train/loss") == series(reference, "train/loss")


def complete_steps(directory: Path) -> list[int]:
    """Of the checkpoints that a reader takes for complete, with sound contents."""
    found = []
    for path in sorted(directory.glob("step-*")):
        try:
            checkpoint = open_checkpoint(path)
            checkpoint.verify()
        except CheckpointError:
            continue
        found.append(checkpoint.step)
    return found


def leftovers(directory: Path) -> list[str]:
    """Hidden names, which only work in progress may have; but for the lock, which nobody holds any more."""
    return [path.name for path in directory.iterdir() if path.name.startswith(".") and path.name != LOCK]


def _killer(point: str, count: int) -> Any:
    left = count

    def hook(name: str) -> None:
        nonlocal left
        left -= name == point
        if name == point and left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


if __name__ == "__main__":
    run(**json.loads(sys.argv[1]))
