"""Ranks killed at any step of a save: the newest complete checkpoint is found and sound, and nothing complete is lost.

Each case forks the ranks from this process, which has everything imported, and kills one of them, or all, when a thread
of one reaches a point between two steps. The ranks use the real `Saver`; only their group is of pipes. A killed process
loses no page cache, so durability plays no part here and syncing would take most of the time.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsspec
import pytest
import torch
from saving_jobs import identity, saved_step, shards_of
from torch import Tensor

from modelworks.checkpoint import Retention, Saver
from modelworks.checkpoint.faults import at_each_point
from modelworks.checkpoint.names import step_name, step_number
from modelworks.checkpoint.retention import complete_checkpoints
from modelworks.checkpoint.storage import Storage, open_storage
from modelworks.checkpoint.url_storage import UrlStorage
from modelworks.layout import Layout
from modelworks.parallel import single_process

RANKS = 2
LAYOUT = Layout(dp_replicate=RANKS)
ENDED_WITHOUT_THE_OTHER = 3
CPU = torch.device("cpu")


class PipeGroup:
    """The ranks' group: every rank sends to the first, which answers all. One that is gone ends the others."""

    def __init__(self, links: list[Connection], rank: int) -> None:
        self.size, self._links, self._rank = RANKS, links, rank

    def gather_objects(self, value: Any) -> list[Any]:
        try:
            if self._rank:
                self._links[0].send(value)
                return list(self._links[0].recv())
            values = [value, *(link.recv() for link in self._links)]
            for link in self._links:
                link.send(values)
            return values
        except (EOFError, OSError):
            os._exit(ENDED_WITHOUT_THE_OTHER)

    def all_reduce_(self, x: Tensor, how: str) -> Tensor:
        assert how == "max"
        return torch.stack([torch.tensor(values) for values in self.gather_objects(x.tolist())]).amax(0)


@dataclass
class ForkedMesh:
    rank: int
    world: PipeGroup
    layout: Layout = LAYOUT
    device: torch.device = CPU

    def group(self, name: str) -> PipeGroup:
        return self.world


@dataclass(frozen=True)
class Case:
    """kind: of storage. step: what is saved where 1 and 2 are complete. Killed when `rank` reaches its point number
    `at`; never where that is negative. values: of which step the tensors are, where not of `step`."""

    kind: str
    step: int
    rank: int
    at: int
    kills_all: bool = False
    background: bool = True
    values: int | None = None


def storage_at(kind: str, directory: Path) -> Storage:
    if kind == "disk":
        return open_storage(directory)
    return UrlStorage(fsspec.filesystem("file"), str(directory), str(directory))


def save(mesh: Any, storage: Storage, step: int, values: int | None = None, background: bool = True) -> None:
    values = step if values is None else values
    saver = Saver(mesh, storage, background=background, retention=Retention(storage, keep_last=2))
    saver.begin(step, shards_of(mesh, values), identity(values))
    outcome = saver.wait()
    assert outcome is not None
    assert (outcome.error, outcome.warning) == (None, None)


def run(directory: Path, case: Case) -> tuple[list[int], list[list[str]]]:
    """Save on forked ranks, killing as the case says. Exit codes, and, where nobody is killed, points reached."""
    pipes = [Pipe() for _ in range(RANKS - 1)]
    may_start, starts = os.pipe()
    reports = [directory.with_name(f"{directory.name}-points-{rank}") for rank in range(RANKS)]
    children: list[int] = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            links = [own for own, _ in pipes] if rank == 0 else [pipes[rank - 1][1]]
            for link in (end for pair in pipes for end in pair):
                if link not in links:
                    link.close()
            os.close(starts)
            _be_a_rank(ForkedMesh(rank, PipeGroup(links, rank)), directory, case, may_start, reports[rank])
        children.append(child)
        os.setpgid(child, children[0])
    for end in (end for pair in pipes for end in pair):
        end.close()
    os.close(may_start)
    os.write(starts, b"x" * RANKS)
    os.close(starts)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return codes, [path.read_text().split("\n")[:-1] if path.exists() else [] for path in reports]


def _be_a_rank(mesh: ForkedMesh, directory: Path, case: Case, may_start: int, report: Path) -> None:
    try:
        signal.alarm(60)  # one that hangs fails the test
        os.read(may_start, 1)
        count = 0

        def kill(point: str) -> None:
            nonlocal count
            if case.at < 0:
                with report.open("a") as file:
                    file.write(f"{point}\n")
            elif mesh.rank == case.rank and count == case.at:
                os.killpg(0, signal.SIGKILL) if case.kills_all else os.kill(os.getpid(), signal.SIGKILL)
            count += 1

        with at_each_point(kill), no_waiting():
            save(mesh, storage_at(case.kind, directory), case.step, case.values, case.background)
    except BaseException:
        os._exit(1)
    os._exit(0)


@contextmanager
def no_waiting() -> Iterator[None]:
    with patch.object(os, "fsync", lambda descriptor: None):
        yield


OLDER = 20  # of which step the values are that checkpoint 2 has at first


@cache
def _template(kind: str, at: Path) -> Path:
    """Checkpoints of steps 1 and 2."""
    directory = at / f"template-{kind}" / "checkpoints"
    directory.mkdir(parents=True)
    for step, values in ((1, 1), (2, OLDER)):
        codes, _ = run(directory, Case(kind, step, 0, -1, values=values))
        assert codes == [0] * RANKS
    return directory


SCENES = [("disk", 3), ("disk", 2), ("url", 3), ("url", 2)]


def cases(at: Path) -> Iterator[Case]:
    """Each point of each rank in each scene (of one reached many times, the first and the last), the rest drawn."""
    draws = random.Random(0)
    for kind, step in SCENES:
        directory = at / f"dry-{kind}-{step}" / "checkpoints"
        shutil.copytree(_template(kind, at), directory)
        codes, points = run(directory, Case(kind, step, 0, -1))
        assert codes == [0] * RANKS
        for rank, names in enumerate(points):
            for index, name in enumerate(names):
                if name not in names[:index] or name not in names[index + 1 :]:
                    yield Case(kind, step, rank, index, draws.random() < 0.5, draws.random() < 0.5)


@pytest.mark.slow
def test_killed_between_any_two_steps(tmp_path: Path) -> None:
    n_cases, ends = 0, set()
    for case in cases(tmp_path):
        directory = tmp_path / f"case-{n_cases}" / "checkpoints"
        shutil.copytree(_template(case.kind, tmp_path), directory)
        codes, _ = run(directory, case)
        assert -signal.SIGKILL in codes, (case, codes)
        assert set(codes) <= {-signal.SIGKILL, ENDED_WITHOUT_THE_OTHER, 0}, (case, codes)
        storage = storage_at(case.kind, directory)
        ends.add((case.kind, case.step, _new_one_is_complete(case, storage)))
        with no_waiting():
            save(single_process(CPU), storage, 4)  # one process: what goes on need not have the layout of what ended
        assert saved_step(storage, step_name(4)) == 4, case
        _drop_empty_folders(directory)
        assert set(complete_checkpoints(storage)) == set(storage.checkpoints()), case
        assert sorted(path.name for path in directory.iterdir()) == ["latest", *storage.checkpoints()], case
        assert (directory / "latest").read_text() == f"{step_name(4)}\n"
        shutil.rmtree(directory.parent)
        n_cases += 1
    assert n_cases >= 100
    assert ends == {(*scene, complete) for scene in SCENES for complete in (False, True)}  # killed early and late


def _new_one_is_complete(case: Case, storage: Storage) -> bool:
    """Checks that what looks complete after a kill is sound, and that nothing is gone which was complete before."""
    found = {step_number(name): saved_step(storage, name) for name in complete_checkpoints(storage)}
    is_complete = found.get(case.step) == case.step
    if case.step == 2:
        assert found == {1: 1, 2: 2 if is_complete else OLDER}, case
    elif is_complete:
        assert found in ({1: 1, 2: OLDER, 3: 3}, {2: OLDER, 3: 3}), case  # two are kept
    else:
        assert found == {1: 1, 2: OLDER}, case
    return is_complete


def _drop_empty_folders(directory: Path) -> None:
    """In object storage there are none."""
    for path in sorted(directory.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
