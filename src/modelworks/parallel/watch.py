"""Noticing that a rank is gone or that nobody goes on, and saying who and where.

A thread on every rank reports the rank's state through the store every second (oftener where `timeout` is short). It
also looks at how long this rank has waited for others; past `timeout` it reads all states and, if they still say the
same a moment later, writes one verdict (hangs.py), upon which every rank ends with exit code 1. A rank that is busy by
itself is never called hung, however long it takes, unless others wait for it longer than `timeout`.

The main thread of a hung rank sits in a call that does not return, so ranks end by `os._exit`. Under `launch` the
verdict goes to the parent by file, which says it; under torchrun the rank that found it says it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from modelworks.parallel.failures import is_lost_connection
from modelworks.parallel.hangs import State, explain_hang, state_of
from modelworks.parallel.labels import LABELS_FILE, VERDICT_FILE, Labels
from modelworks.parallel.world import World, initialize_process_group

_SPARE = 30.0  # seconds by which the backend's own limit is later than ours, which can say more
_SILENCE = 5.0  # seconds without a report after which a rank counts as gone


class RankLost(Exception):
    """Another rank is gone; says which and what it was last doing."""


@contextlib.contextmanager
def process_group(world: World, device: torch.device, timeout: float) -> Iterator[Labels]:
    """torch.distributed for the length of the block, watched; gives the labels to pass to `build_mesh`.

    timeout: seconds that a rank may wait for others. Raises `RankLost` in place of a backend's error where another
    rank's end was the reason (under `launch` the backend's error stays: the parent knows better who ended and how).
    """
    initialize_process_group(world, device, timeout + _SPARE)
    labels = Labels(world.rank, world.files / LABELS_FILE if world.files else None)
    watcher = Watcher(world, labels, timeout)
    watcher.start()
    try:
        yield labels
    except BaseException as error:
        lost = is_lost_connection(error)
        if lost and world.files is None:
            told = watcher.who_is_lost()
            watcher.stop("lost contact with another rank")
            if told:
                raise RankLost(told) from error
        watcher.stop("lost contact with another rank" if lost else f"{type(error).__name__}: {error}")
        raise
    watcher.stop("done")
    dist.destroy_process_group()


class Watcher(threading.Thread):
    """The thread of one rank. timeout: seconds."""

    def __init__(self, world: World, labels: Labels, timeout: float) -> None:
        super().__init__(name="watcher", daemon=True)
        self._world, self._labels, self._timeout = world, labels, timeout
        self._store, self._own_store = world.store("watch"), world.store("watch")  # a thread each
        self._period = min(1.0, max(0.1, timeout / 10))
        self._beat = 0
        self._ended = threading.Event()
        self._suspicion: _Suspicion | None = None

    def run(self) -> None:
        # Where the store is gone so is the process that held it; the next collective fails, and that is told.
        with contextlib.suppress(RuntimeError):
            while not self._ended.is_set():
                self._report(self._store)
                if self._store.check(["verdict"]):
                    self._end_all()
                self._look()
                self._ended.wait(self._period)

    def stop(self, how: str) -> None:
        """No more watching; the others learn how this rank ended."""
        self._ended.set()
        self.join(_SILENCE)
        with contextlib.suppress(RuntimeError):
            self._report(self._own_store, how)

    def who_is_lost(self) -> str | None:
        """Which rank's end broke a connection, from the reports of some seconds. Called by the main thread."""
        limit = time.monotonic() + max(_SILENCE, 5 * self._period)
        try:
            before = self._states(self._own_store)
            while time.monotonic() < limit:
                states = self._states(self._own_store)
                for rank, state in states.items():
                    if rank != self._world.rank and state.ended not in (None, "done", "lost contact with another rank"):
                        return f"rank {rank} failed: {state.ended}; it was last doing: {_label(state)}"
                time.sleep(self._period)
            states = self._states(self._own_store)
        except RuntimeError:
            return f"the process that held the ranks' store at {self._world.address}:{self._world.port} is gone"
        silent = [
            rank for rank, beat in _beats(before).items() if states[rank].ended is None and states[rank].beat == beat
        ]
        parts = [
            f"rank {rank} was lost (killed, or its machine is); it last reported: {_label(states[rank])}"
            for rank in silent
        ]
        return "; ".join(parts) or None

    def _look(self) -> None:
        """A verdict is given when the same finding holds some reports later, so that no old report accuses anyone."""
        waited = self._labels.waited()
        if waited is None or waited[1] < self._timeout:
            self._suspicion = None
            return
        states = self._states(self._store)
        if self._suspicion is None:
            self._suspicion = _Suspicion(None, _beats(states), time.monotonic() + max(1.0, 4 * self._period))
        if time.monotonic() < self._suspicion.until:
            return
        silent = [rank for rank, beat in _beats(states).items() if beat == self._suspicion.beats.get(rank)]
        found = explain_hang(self._world.rank, states, [rank for rank in silent if rank != self._world.rank])
        if found != self._suspicion.found:
            self._suspicion = _Suspicion(found, _beats(states), time.monotonic() + max(1.0, 4 * self._period))
        elif found and self._store.add("verdicts", 1) == 1:
            self._say(f"{found} (after {waited[1]:.0f} s; parallel.timeout is {self._timeout:g} s)")
            self._store.set("verdict", found)

    def _say(self, verdict: str) -> None:
        if self._world.files:
            draft = self._world.files / f"{VERDICT_FILE}.draft"
            draft.write_text(verdict, encoding="utf-8")
            draft.replace(self._world.files / VERDICT_FILE)
        else:
            print(f"error: {verdict}", file=sys.stderr, flush=True)

    def _end_all(self) -> None:
        """Rank 0 may hold the store, so it lets the others read the verdict first."""
        if self._world.hosts and self._world.rank == 0:
            time.sleep(4 * self._period)
        sys.stderr.flush()
        os._exit(1)

    def _report(self, store: Store, ended: str | None = None) -> None:
        self._beat += 1
        store.set(f"state{self._world.rank}", state_of(self._labels, self._world.rank, self._beat, ended).to_json())

    def _states(self, store: Store) -> dict[int, State]:
        """Of every rank that has reported."""
        reported = [rank for rank in range(self._world.size) if store.check([f"state{rank}"])]
        texts: Sequence[bytes] = store.multi_get([f"state{rank}" for rank in reported]) if reported else []
        return {rank: State.from_json(text) for rank, text in zip(reported, texts, strict=True)}


@dataclass(frozen=True)
class _Suspicion:
    """What was found and how often each rank had reported then; to be looked at again from `until` on."""

    found: str | None
    beats: dict[int, int]
    until: float


def _beats(states: dict[int, State]) -> dict[int, int]:
    return {rank: state.beat for rank, state in states.items()}


def _label(state: State) -> str:
    return state.doing if state.step is None else f"step {state.step}: {state.doing}"
