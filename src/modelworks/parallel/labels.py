"""What a rank is doing, in words that outlive it.

    labels.step(12)                      # from now on: step 12
    labels.doing("data")                 # something that is no collective
    operation = labels.begin("all_reduce dp", (0, 1, 2, 3))
    with labels.waiting(operation): ...  # this rank now depends on others

Every label is also written into a memory-mapped file, a slot for each rank: microseconds a write, and readable by
another process after SIGKILL, since the pages belong to the file and not to the writer. A slot holds two texts and a
selector; a text is written beside the valid one and then selected, so a rank killed in between leaves a whole label.

Operations of one group of ranks are numbered in the order in which this rank begins them. All ranks of a group begin
the same operations in the same order (torch.distributed demands it), so equal numbers are the same operation: that is
how a hang report knows who never came. Imports no torch.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# What `launch` shares with its ranks: a directory, named to them in the environment, and two files there.
DIRECTORY_VARIABLE = "MODELWORKS_RANK_FILES"
LABELS_FILE, VERDICT_FILE = "labels", "verdict"
_TEXT = 254  # bytes of a label, a length before it
_SLOT = 1 + 2 * (1 + _TEXT)


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation that this rank began. ranks: who takes part, by global number; number: its place in the order of
    this group's operations, from 1, and 0 for point-to-point ones; awaits: the other ends of a point-to-point one."""

    name: str
    ranks: tuple[int, ...]
    number: int
    step: int | None = None
    awaits: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} #{self.number}" if self.number else self.name


class Labels:
    """The current label of this rank, and what it waits for. file: slots made by `create_slots`, or None."""

    def __init__(self, rank: int = 0, file: Path | None = None) -> None:
        self.current_step: int | None = None
        self.text = "start"
        self.begun: dict[tuple[int, ...], Operation] = {}  # the last operation of each group
        self.waited_seconds = 0.0  # that this rank has waited in all
        self._waits: dict[int, tuple[Operation, float]] = {}
        self._unfinished: dict[int, tuple[Operation, float, Callable[[], bool]]] = {}
        self._slot = _Slot(file, rank) if file else None
        self._write()

    def step(self, number: int) -> None:
        """Labels from here on belong to this step."""
        self.current_step = number
        self._write()

    def doing(self, text: str) -> None:
        """What is no operation with other ranks: "data", "evaluate", "save"."""
        self.text = text
        self._write()

    def begin(self, name: str, ranks: tuple[int, ...], awaits: tuple[int, ...] = ()) -> Operation:
        """An operation starts. awaits: of point-to-point ones, which have no common order, the other ends."""
        before = self.begun.get(ranks)
        number = 0 if awaits else (before.number if before else 0) + 1
        operation = Operation(name, ranks, number, self.current_step, awaits)
        if not awaits:
            self.begun[ranks] = operation
        self.text = str(operation)
        self._write()
        return operation

    @contextmanager
    def waiting(self, operation: Operation) -> Iterator[None]:
        """For the length of the block this rank can only go on when others do their part."""
        key = id(operation)
        started = time.monotonic()
        self._waits[key] = (operation, started)
        try:
            yield
        finally:
            del self._waits[key]
            self.waited_seconds += time.monotonic() - started

    def unfinished(self, operation: Operation, finished: Callable[[], bool]) -> None:
        """An operation that runs on a device while this process goes on; it counts as awaited until `finished()`."""
        self._forget_finished()
        self._unfinished[id(operation)] = (operation, time.monotonic(), finished)

    def waited(self) -> tuple[Operation, float] | None:
        """The operation that this rank has waited for longest, and for how many seconds. Called by another thread."""
        self._forget_finished()
        starts = [*self._waits.copy().values(), *((o, since) for o, since, _ in self._unfinished.copy().values())]
        if not starts:
            return None
        operation, since = min(starts, key=lambda wait: wait[1])
        return operation, time.monotonic() - since

    def _forget_finished(self) -> None:
        """A device does them in order, so the first that is not done ends the search."""
        for key, (_, _, finished) in self._unfinished.copy().items():
            if not finished():
                break
            self._unfinished.pop(key, None)  # the other thread may have been faster

    def __str__(self) -> str:
        return self.text if self.current_step is None else f"step {self.current_step}: {self.text}"

    def _write(self) -> None:
        if self._slot:
            self._slot.write(str(self))


def create_slots(file: Path, world_size: int) -> None:
    """An empty slot for each rank."""
    file.write_bytes(bytes(_SLOT * world_size))


def read_slot(file: Path, rank: int) -> str:
    """The last label of a rank, alive or not; empty where it never wrote one."""
    with file.open("rb") as stream:
        stream.seek(rank * _SLOT)
        slot = stream.read(_SLOT)
    start = 1 + slot[0] * (1 + _TEXT)
    return slot[start + 1 : start + 1 + slot[start]].decode("utf-8", "replace")


class _Slot:
    def __init__(self, file: Path, rank: int) -> None:
        with file.open("r+b") as stream:
            self._map = mmap.mmap(stream.fileno(), 0)
        self._start = rank * _SLOT

    def write(self, label: str) -> None:
        text = label.encode()[:_TEXT]
        other = 1 - self._map[self._start]
        start = self._start + 1 + other * (1 + _TEXT)
        self._map[start : start + 1 + len(text)] = bytes([len(text)]) + text
        self._map[self._start] = other
