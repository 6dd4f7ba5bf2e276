"""`Saver`: a checkpoint written by all ranks of a run, in two phases, while training goes on.

    opening   every rank copies its shards into staging memory, and rank 0 makes room in the storage
    writing   every rank writes its shard files and its part file, each durable
    ending    where all have: rank 0 writes the manifest, makes the checkpoint visible, moves `latest` and removes what
              is not kept any more. Where one failed: rank 0 removes the attempt, and nothing older

The work of each phase is done by a thread; threads never communicate. The ranks agree that a phase has ended in `poll`
and `wait`, which all call on their main threads: one small all-reduce, and an exchange of words where a phase ends.
A rank whose storage hangs keeps nobody from training: the others learn at each step that it has not finished.

The invariant: a checkpoint is visible only after every rank has written all of its part, and an outcome is the same on
every rank.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from modelworks.checkpoint.commit import Identity, commit
from modelworks.checkpoint.faults import reached
from modelworks.checkpoint.names import step_name
from modelworks.checkpoint.owners import Shard
from modelworks.checkpoint.part import Cancelled, PartWriter
from modelworks.checkpoint.retention import Retention
from modelworks.checkpoint.staging import Staging, Taken
from modelworks.checkpoint.storage import Storage
from modelworks.config import UserError
from modelworks.parallel import Mesh

_PERIOD = 1.0  # seconds between meetings of ranks that wait


@dataclass(frozen=True)
class Begun:
    """stall_seconds: for which training stood still. staged: bytes copied, live: bytes written before `begin` returned,
    buffer: bytes of staging memory held; all of this rank."""

    stall_seconds: float
    staged: int
    live: int
    buffer: int


@dataclass(frozen=True)
class Outcome:
    """How a save ended; all but the figures of this rank is the same on every rank.

    where: path or URL of the checkpoint, None where it failed; error: why, which rank's first. warning: what went wrong
    after it was complete. removed: names of the checkpoints that are not kept any more.
    stall_seconds, write_seconds, bytes: of this rank; total_bytes: of all files of shards.
    """

    step: int
    where: str | None
    error: str | None
    warning: str | None
    stall_seconds: float
    write_seconds: float
    bytes: int
    total_bytes: int
    removed: list[str]


class Saver:
    """All ranks make one with the same settings and call its methods at the same points of their main threads.

    background: `begin` returns once the shards are copied; otherwise when the checkpoint is written. staging_limit:
    bytes of host memory that a rank copies into; what does not fit is written before `begin` returns.
    retention: what is kept; rank 0 removes the rest after each save, in its thread.
    """

    def __init__(
        self,
        mesh: Mesh,
        storage: Storage,
        *,
        background: bool,
        staging_limit: int | None = None,
        retention: Retention | None = None,
    ) -> None:
        self._mesh, self._world, self._storage = mesh, mesh.group("world"), storage
        self._background, self._retention = background, retention
        self._may_hold = not background or staging_limit is not None
        self._staging = Staging(mesh.device, staging_limit)
        self._flight: _Flight | None = None
        self._ended: Outcome | None = None

    @property
    def in_flight(self) -> bool:
        """Whether a save has begun whose outcome nobody was told yet."""
        return self._flight is not None or self._ended is not None

    def begin(self, step: int, shards: Sequence[Shard], identity: Identity) -> Begun:
        """Save `shards`, what this rank writes (`Owners`), as the checkpoint of `step`. No failure is raised here: the
        outcome tells it. identity: rank 0's counts. Raises RuntimeError where a save is in flight."""
        if self.in_flight:
            raise RuntimeError("a save is in flight: its outcome has to be taken first, by poll() or wait()")
        started = time.perf_counter()
        flight = self._flight = _Flight(step, identity)
        try:
            flight.taken = self._staging.take(shards) if self._background else Taken([], list(shards))
        except (RuntimeError, MemoryError) as error:  # torch says so where there is not enough memory
            flight.error = f"no memory to copy the state into: {_words(error)}"
        if flight.taken.live and self._mesh.device.type == "cuda":
            torch.cuda.synchronize(self._mesh.device)  # a thread's copies do not wait for other streams
        if self._mesh.rank == 0:  # not before: the copy need not share the interpreter
            flight.start(lambda: self._open(flight))
        # Where all is copied no rank waits for another here: writing begins at the next meeting.
        while self._may_hold and self._flight is not None and self._meet(flight).held:
            flight.wait(_PERIOD)
        flight.stall_seconds = time.perf_counter() - started
        if self._ended is not None:
            self._ended = replace(self._ended, stall_seconds=flight.stall_seconds)
        staged, live = (sum(shard.bytes for shard in some) for some in (flight.taken.staged, flight.taken.live))
        return Begun(flight.stall_seconds, staged, live, self._staging.bytes)

    def poll(self) -> Outcome | None:
        """How the save in flight ended; None while it is being written, or where there is none. Does not wait."""
        if self._flight is not None:
            self._meet(self._flight)
        return self._take()

    def wait(self, limit: float | None = None) -> Outcome | None:
        """Until the save in flight has ended; None where there is none, or any rank's limit (seconds) has passed."""
        until = time.monotonic() + (float("inf") if limit is None else limit)
        while self._flight is not None:
            self._flight.wait(max(0.0, min(_PERIOD, until - time.monotonic())))
            if self._meet(self._flight, late=time.monotonic() >= until).late:
                break
        return self._take()

    def _take(self) -> Outcome | None:
        outcome, self._ended = self._ended, None
        return outcome

    def _meet(self, flight: _Flight, late: bool = False) -> _Agreed:
        """One agreement of all ranks; where all have ended a phase, the next one begins."""
        held = not self._background or flight.keeps_live
        said = torch.tensor([flight.is_busy, flight.error is not None, late, held], dtype=torch.float32)
        agreed = _Agreed(*map(bool, self._world.all_reduce_(said.to(self._mesh.device), "max").tolist()))
        if agreed.failed:
            flight.stop.set()
        if not agreed.busy:
            self._next_phase(flight)
        return agreed

    def _next_phase(self, flight: _Flight) -> None:
        told = self._world.gather_objects((flight.error, flight.attempt, flight.bytes, flight.end))
        error = _first_error([error for error, *_ in told])
        _, flight.attempt, _, end = told[0]
        if flight.phase == "ending":
            self._flight, self._ended = None, flight.outcome(end if error is None else replace(end, error=error))
        elif flight.phase == "opening" and error is None:
            flight.phase = "writing"
            flight.start(lambda: self._write(flight))
        else:
            flight.phase, flight.error = "ending", None
            flight.total_bytes = sum(size for _, _, size, _ in told)
            if self._mesh.rank == 0:
                flight.start(lambda: self._end(flight, error))

    def _open(self, flight: _Flight) -> None:
        reached("before the storage is opened")
        flight.attempt = self._storage.begin(step_name(flight.step))
        reached("storage opened")

    def _write(self, flight: _Flight) -> None:
        assert flight.attempt is not None
        started = time.perf_counter()
        writer = PartWriter(self._storage.writing(flight.attempt), self._mesh.rank, flight.stop)
        try:
            writer.add(flight.taken.live)
            flight.live_is_written()
            writer.add(flight.taken.staged)
            writer.finish()
        except Cancelled:
            pass
        except FileNotFoundError as error:
            shared = "" if self._mesh.rank == 0 else "; is it on a disk that all machines share?"
            raise UserError(f"{_words(error)}{shared}") from None
        finally:
            flight.bytes, flight.write_seconds = writer.bytes, time.perf_counter() - started

    def _end(self, flight: _Flight, error: str | None) -> None:
        if flight.attempt is None:
            flight.end = _End(error=error)
            return
        if error is None:
            try:
                folder = commit(self._storage, flight.attempt, flight.step, flight.identity, self._world.size)
            except Exception as failure:
                error = _first_error([_words(failure), *[None] * (self._world.size - 1)])
        if error is not None:
            reached("before the attempt is removed")
            self._storage.abort(flight.attempt)
            flight.end = _End(error=error)
            return
        removed, problems = list[str](), list[str]()
        try:
            self._storage.point_latest(step_name(flight.step))
        except Exception as failure:
            problems.append(f"`latest` could not be moved: {_words(failure)}")
        reached("latest moved")
        try:  # all the same: or the disk would fill up
            if self._retention is not None:
                removed = self._retention.remove(step_name(flight.step))
            reached("old ones removed")
        except Exception as failure:
            problems.append(f"older ones could not be removed: {_words(failure)}")
        warning = f"the checkpoint is complete, but {'; '.join(problems)}" if problems else None
        flight.end = _End(folder.label, None, warning, removed)


@dataclass(frozen=True)
class _End:
    """What rank 0 says of a save in the end."""

    where: str | None = None
    error: str | None = None
    warning: str | None = None
    removed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Agreed:
    """Whether any rank still works in this phase, has failed, is out of time, or cannot let training go on."""

    busy: bool
    failed: bool
    late: bool
    held: bool


class _Flight:
    """One save, as one rank sees it: its phase, the thread that does the phase's work, and what came of it."""

    def __init__(self, step: int, identity: Identity) -> None:
        self.step, self.identity = step, identity
        self.phase: Literal["opening", "writing", "ending"] = "opening"
        self.taken = Taken([], [])
        self.stop = threading.Event()  # some rank has failed
        self.attempt: str | None = None
        self.error: str | None = None
        self.end = _End()
        self.bytes = self.total_bytes = 0
        self.stall_seconds = self.write_seconds = 0.0
        self.is_busy = False
        self._has_live_written = False
        self._news = threading.Event()

    @property
    def keeps_live(self) -> bool:
        """Whether tensors that training would change have yet to be written."""
        return bool(self.taken.live) and not self._has_live_written and self.phase != "ending"

    def live_is_written(self) -> None:
        self._has_live_written = True
        self._news.set()

    def start(self, work: Callable[[], None]) -> None:
        """Do the work of a phase in a thread. A daemon: Ctrl-C ends the process in the middle of it, and storage that
        hangs does not keep it."""
        self.is_busy = True
        threading.Thread(target=self._run, args=(work,), name="checkpoint", daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Until there is something to tell the other ranks."""
        if self.is_busy:
            self._news.wait(seconds)
            self._news.clear()

    def outcome(self, end: _End) -> Outcome:
        return Outcome(
            self.step,
            end.where,
            end.error,
            end.warning,
            self.stall_seconds,
            self.write_seconds,
            self.bytes,
            self.total_bytes,
            end.removed,
        )

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self.error = _words(error)
        finally:
            self.is_busy = False
            self._news.set()


def _first_error(errors: Sequence[str | None]) -> str | None:
    """The failure of the first rank that has one, with its number where there are several ranks."""
    for rank, error in enumerate(errors):
        if error is not None:
            return f"rank {rank}: {error}" if len(errors) > 1 else error
    return None


def _words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return f"{os.strerror(error.errno)}: {error.filename}" if error.filename else os.strerror(error.errno)
    return str(error) if isinstance(error, OSError | UserError) else f"{type(error).__name__}: {error}"
