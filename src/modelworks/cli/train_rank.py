"""`modelworks train` on several processes: started here, or joined where torchrun started them.

Under torchrun every rank is a command line of its own. What all of them would say is said by the first that comes to
it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

from modelworks.cli.exit_codes import FAILED, USER_ERROR
from modelworks.cli.forecast import forecast
from modelworks.cli.output import Output
from modelworks.config import RunConfig, UserError, dump_yaml, parse_run_config
from modelworks.layout import Layout, check_layout, describe, shrink_layout
from modelworks.parallel import RankFailed, RankLost, World, joined, launch
from modelworks.train import (
    Result,
    TrainingFailed,
    check_references,
    joined_mesh,
    keep_freed_memory,
    run_device,
    run_directory,
    train,
)


def train_split(
    config: RunConfig, run_dir: Path, *, resume: bool, overwrite: bool, profile: bool, json: bool
) -> Result | None:
    """Train on all ranks of the layout. Under torchrun the process is one of them, and None is returned on all but
    rank 0; otherwise processes are started on this machine. Raises what `train` does, and `RankFailed`."""
    flags = {"resume": resume, "overwrite": overwrite, "profile": profile}
    world = joined()
    if world is not None:
        return _train_joined(config, run_dir, world, Output(json=json), **flags)
    run_directory.check_use(run_dir, resume=resume, overwrite=overwrite)  # rank 0 does, but in a while
    check_references(config)
    _remove_old_output(run_dir / "ranks")
    directory = run_dir / "ranks" / str(os.getpid())
    arguments = {"config": dump_yaml(config), "run_dir": str(run_dir), "json": json, **flags}
    try:
        results = launch(
            "modelworks.cli.train_rank:run_rank",
            Layout.of(config.parallel).world_size,
            arguments,
            directory=directory,
            device="cuda" if run_device(config).type == "cuda" else "cpu",
        )
    except RankFailed as error:
        if error.error is not None and error.error[0] == TrainingFailed.__name__:
            raise TrainingFailed(error.error[1]) from None  # it says by itself which rank, where that matters
        raise
    except UserError:
        _remove(directory)
        raise
    _remove(directory)
    return Result(**results[0])


def run_rank(
    config: str, run_dir: str, *, json: bool, resume: bool, overwrite: bool, profile: bool
) -> dict[str, Any] | None:
    """What each started process runs. Returns the result on rank 0."""
    world = joined()
    assert world is not None
    output = Output(json=json)
    parsed = parse_run_config(config, "the run's configuration")
    flags = {"resume": resume, "overwrite": overwrite, "profile": profile}
    result = _train_here(parsed, Path(run_dir), world, output, **flags)
    return asdict(result) if world.rank == 0 else None


def _train_joined(config: RunConfig, run_dir: Path, world: World, output: Output, **flags: bool) -> Result | None:
    """One of torchrun's processes; None on those that have nothing to say, or nothing to do."""
    try:
        if config.parallel.elastic and world.size < Layout.of(config.parallel).world_size:
            config, world = _shrunk(config, world, output)
            if world.rank >= world.size:
                return None
        check_layout(config, world.size)
        result = _train_here(config, run_dir, world, output, **flags)
    except UserError as error:
        if world.is_first_to_say(str(error)):
            raise
        raise SystemExit(USER_ERROR) from None
    except (TrainingFailed, RankLost) as error:
        if world.is_first_to_say(str(error)):
            raise
        raise SystemExit(FAILED) from None
    # The others leave with 0 whatever the result: torchrun would kill rank 0, which has yet to tell it, for any other.
    return result if world.rank == 0 else None


def _shrunk(config: RunConfig, world: World, output: Output) -> tuple[RunConfig, World]:
    """A layout for the processes that there are; some of them may be left over."""
    parallel = shrink_layout(config, world.size)
    used = Layout.of(parallel).world_size
    if world.rank == 0:
        needed = Layout.of(config.parallel).world_size
        idle = "" if used == world.size else f" ({world.size - used} of them idle)"
        output.print(
            f"elastic: {describe(config.parallel)} needs {needed} processes and there are {world.size}: going on with "
            f"{describe(parallel)}{idle}; the global batch stays {config.train.global_batch}"
        )
    return config.model_copy(update={"parallel": parallel}), replace(world, size=used)


def _train_here(config: RunConfig, run_dir: Path, world: World, output: Output, **flags: bool) -> Result:
    keep_freed_memory()
    with joined_mesh(config, world) as mesh:
        return train(
            config,
            run_dir,
            resume=flags["resume"],
            overwrite=flags["overwrite"],
            profile=flags["profile"],
            console=output.console if world.rank == 0 else None,
            mesh=mesh,
            forecaster=forecast,
        )


def _remove(directory: Path) -> None:
    """And the one around it, unless others have theirs there."""
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        directory.parent.rmdir()


def _remove_old_output(directory: Path) -> None:
    """What the processes of earlier runs left that failed: kept for reading until the next start."""
    for each in directory.glob("*"):
        if not (each.name.isdecimal() and psutil.pid_exists(int(each.name))):
            shutil.rmtree(each, ignore_errors=True)
