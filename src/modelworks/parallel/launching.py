"""Starting the ranks of a run on this machine, waiting for them, and ending them all when one fails.

    results = launch("package.module:function", 4, {"path": "…"}, directory=run_dir / "ranks")

Each rank is a process of its own that calls the function with the arguments; it joins the others with
`world.joined()`. They meet in a store that this process holds on a port that the system picks, so runs side by side
cannot collide. Rank 0 writes to this process's terminal, the others to `directory/rank-<r>.log`.

Whatever ends the run ends every rank: the first failure that is not merely the loss of another rank is the one that
is told, with the rank's last label. Ctrl-C and SIGTERM are passed on once, and the ranks are expected to agree
(`world.agree`), save and end together; a second Ctrl-C ends them at once. Ranks are in process groups of their own,
or the terminal would give them Ctrl-C as well.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelworks.config import UserError
from modelworks.parallel.child import Child, start_child
from modelworks.parallel.failures import kernel_kills
from modelworks.parallel.labels import DIRECTORY_VARIABLE, LABELS_FILE, VERDICT_FILE, create_slots, read_slot

_GRACE = 5.0  # seconds that the other ranks have to end by themselves once one has failed
_FAREWELL = 30.0  # seconds for a rank that has given its result to leave


class RankFailed(Exception):
    """A rank failed, was killed or never came; the text names it and what it was last doing.

    rank: which; None for a hang, which is nobody's alone. error: type and text of what it raised, if it did; trace:
    its traceback.
    """

    def __init__(
        self, message: str, rank: int | None, error: tuple[str, str] | None = None, trace: str | None = None
    ) -> None:
        super().__init__(message)
        self.rank, self.error, self.trace = rank, error, trace


def launch(
    target: str,
    world_size: int,
    arguments: Mapping[str, Any],
    *,
    directory: Path,
    device: str = "cpu",
    threads: int | None = None,
) -> list[Any]:
    """`module:function` called with `arguments` on every rank; what it returned, by rank.

    arguments, results: what JSON can hold. directory: for the ranks' output and labels; made where it is not there.
    device: "cpu" or "cuda" (one device a rank). threads: to divide among the ranks; None: the cores that this process
    may use. Where OMP_NUM_THREADS is set, each rank has that many.

    Raises a rank's `UserError` once; `SystemExit` with the code that ranks ended with (75: preempted), or 143 where
    SIGTERM came before they could save; `KeyboardInterrupt`; `RankFailed` for everything else.
    """
    check_devices(device, world_size)
    directory.mkdir(parents=True, exist_ok=True)
    labels, verdict = directory / LABELS_FILE, directory / VERDICT_FILE
    create_slots(labels, world_size)
    verdict.unlink(missing_ok=True)
    kills = kernel_kills()
    ranks: list[Rank] = []
    with _passing_on_signals(ranks) as stop:
        try:
            environment = rank_environment(world_size, threads)
            ranks.extend(start_rank(number, directory, environment) for number in range(world_size))
            store = open_store()  # while the ranks import what they need
            stop.ranks_are_told = True
            for rank in ranks:
                rank.child.tell(target, arguments, rank_place(rank.number, world_size, store.port, directory))
            _wait_for_all(ranks)
        finally:
            _end_all(ranks)
    return _results(ranks, verdict, labels, stop, kernel_kills() > kills)


@dataclass
class Rank:
    number: int
    child: Child

    @property
    def outcome(self) -> dict[str, Any] | None:
        return self.child.outcome

    @property
    def failed(self) -> bool:
        return self.child.failed


@dataclass
class _Stop:
    """The signal that this process was sent, if any."""

    signal: int | None = None
    ranks_are_told: bool = False  # before that they have nothing to save


@contextmanager
def _passing_on_signals(ranks: list[Rank]) -> Iterator[_Stop]:
    """SIGINT and SIGTERM go to every rank once. Python has handlers in the main thread only; elsewhere none is set."""
    stop = _Stop()

    def pass_on(number: int, frame: object) -> None:
        if not stop.ranks_are_told:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        if stop.signal is None:
            stop.signal = number
            for rank in ranks:
                rank.child.process.send_signal(number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_devices(device: str, world_size: int) -> None:
    if device != "cuda":
        return
    import torch

    if torch.cuda.device_count() < world_size:
        raise UserError(
            f"parallel asks for {world_size} ranks, one CUDA device each, and this machine shows "
            f"{torch.cuda.device_count()}: use fewer ranks, train.device=cpu, or torchrun over several machines"
        )


def rank_environment(world_size: int, threads: int | None) -> dict[str, str]:
    """Threads are divided, since as many for each rank as there are cores would fight over them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    each = max(1, (threads or cores) // world_size)
    environment = {"OMP_NUM_THREADS": str(each), **os.environ}
    if world_size * int(environment["OMP_NUM_THREADS"].partition(",")[0]) > cores:
        # Idle OpenMP threads of a rank that waits would spin on the cores that other ranks need.
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return environment


def rank_place(rank: int, world_size: int, port: int, directory: Path) -> dict[str, str]:
    """What torchrun would set, and where the shared files are."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        DIRECTORY_VARIABLE: str(directory.absolute()),
    }


def open_store() -> Any:
    from torch._C._distributed_c10d import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def start_rank(number: int, directory: Path, environment: dict[str, str]) -> Rank:
    return Rank(number, start_child(environment, directory / f"rank-{number}.log" if number else None))


def _wait_for_all(ranks: list[Rank]) -> None:
    """Until each rank has an outcome, or for a while after the first failure."""
    limit: float | None = None
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.child.control, selectors.EVENT_READ, rank)
        while selector.get_map():
            ready = selector.select(None if limit is None else max(0.0, limit - time.monotonic()))
            if not ready and limit is not None and time.monotonic() >= limit:
                return
            for key, _ in ready:
                rank = key.data
                rank.child.listen()
                if rank.outcome is not None:
                    selector.unregister(rank.child.control)
                if rank.failed and limit is None:
                    limit = time.monotonic() + _GRACE


def _end_all(ranks: list[Rank]) -> None:
    """Ranks that gave a result leave by themselves; the others are killed."""
    limit = time.monotonic() + _FAREWELL
    for rank in ranks:
        if rank.outcome is None or rank.failed:
            rank.child.process.kill()
    for rank in ranks:
        rank.child.end(max(0.0, limit - time.monotonic()))
    if any(rank.outcome is None or rank.failed for rank in ranks) and sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # a progress bar that was killed had hidden the cursor
        sys.stderr.flush()


def _results(ranks: list[Rank], verdict: Path, labels: Path, stop: _Stop, memory_ran_out: bool) -> list[Any]:
    if verdict.exists():
        raise RankFailed(verdict.read_text(encoding="utf-8"), None)
    failures = [rank for rank in ranks if rank.failed]
    if not failures:
        outcomes = [rank.outcome or {} for rank in ranks]
        code = max(outcome.get("code", 0) for outcome in outcomes)
        if code:
            raise SystemExit(code)
        return [outcome.get("result") for outcome in outcomes]
    # What is merely the loss of another rank is told only where nothing else is known.
    causes = [rank for rank in failures if not (rank.outcome or {}).get("lost")] or failures
    first = min(causes, key=lambda rank: (rank.outcome or {})["when"])
    raise _failure(first, labels, stop, memory_ran_out)


def _failure(rank: Rank, labels: Path, stop: _Stop, memory_ran_out: bool) -> BaseException:
    outcome = rank.outcome or {}
    kind, text = outcome["kind"], outcome.get("text", "")
    if kind == "user error":
        return UserError(text)
    if kind == "interrupted" or (kind == "killed" and outcome["code"] == -signal.SIGINT and stop.signal):
        return KeyboardInterrupt()
    if kind == "killed" and stop.signal == -outcome["code"]:
        return SystemExit(128 - int(outcome["code"]))
    last = f"it was last doing: {read_slot(labels, rank.number) or 'start'}"
    log = rank.child.log
    more = f"; its output is in {log}" if log and log.stat().st_size else ""
    if kind == "failure":
        message = f"rank {rank.number} failed: {outcome['type']}: {text} (at {outcome['place']}); {last}{more}"
        return RankFailed(message, rank.number, (outcome["type"], text), outcome["trace"])
    return RankFailed(f"rank {rank.number} {rank.child.describe_end(memory_ran_out)}; {last}{more}", rank.number)
