"""One pool of Gloo workers for the whole test session: processes are started once and given functions to run.

    def job(mesh, scale):                    # a module-level function of an importable test module
        return mesh.group("tp").all_reduce_(torch.ones(2) * scale).tolist()

    def test_sum(workers):
        assert workers.run(job, Layout(tp=2), 3.0) == [[6.0, 6.0]] * 2

`run` gives the function a `Mesh` of the layout, on the first `layout.world_size` workers, and returns what it
returned on each rank. An exception on any rank fails the test with that rank's traceback, and the pool is started
anew for the next test. Workers compute with one thread, with warnings as errors, and are killed when a job takes
longer than `timeout` seconds: a hang is a failure, not a wait. All are forked from one process that has imported
what they need (`forked`), since eight that each import torch would keep the machine busy for half a minute.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# What most jobs import, torch first of all. Only imported there, never used, so that the process stays one thread.
_IMPORTED = ["torch", "torch._dynamo", "torch.utils.tensorboard.summary", "pytest", "hypothesis",
             "modelworks.cli.train", "modelworks.cli.train_rank", "modelworks.report", "modelworks.train.job",
             "modelworks.verify.verdict"]  # fmt: skip


class WorkerFailed(AssertionError):
    """A rank raised, died or hung; the message says which and how."""


class WorkerPool:
    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []
        self._store: Any = None
        self._jobs = 0

    def run(
        self, function: Callable[..., Any], layout: Any, *arguments: Any, timeout: float = 120.0, **more: Any
    ) -> list[Any]:
        """`function(mesh, *arguments, **more)` on every rank of `layout`; the results by rank.

        more: `n_kv_heads` is passed to the mesh instead.
        """
        n_kv_heads = more.pop("n_kv_heads", None)
        self._start(layout.world_size)
        self._jobs += 1
        used = self._workers[: layout.world_size]
        for rank, (_, pipe) in enumerate(used):
            pipe.send(
                (self._jobs, rank, layout, n_kv_heads, function.__module__, function.__qualname__, arguments, more)
            )
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while len(results) + len(failures) < len(used):
            pending = {
                pipe: rank for rank, (_, pipe) in enumerate(used) if rank not in results and rank not in failures
            }
            # Once a rank has failed the others may wait for it for ever: they get a moment to tell their own story.
            ready = wait(list(pending), timeout=2.0 if failures else timeout)
            if not ready:
                for rank in pending.values():
                    failures.setdefault(rank, "did not finish (waiting for another rank?)")
            for pipe in ready:
                rank = pending[pipe]  # type: ignore[index]
                try:
                    good, value = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    good, value = False, "died"
                (results if good else failures)[rank] = value
        if failures:
            self.stop()
            raise WorkerFailed("\n".join(f"--- rank {rank}:\n{text}" for rank, text in sorted(failures.items())))
        return [results[rank] for rank in range(len(used))]

    def stop(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers = []

    def _start(self, count: int) -> None:
        import torch.distributed as dist

        if self._store is None:
            # Port 0: the system picks a free one, so that test sessions cannot collide.
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        if not all(process.is_alive() for process, _ in self._workers):
            self.stop()  # something killed one between two jobs
        while len(self._workers) < count:
            ours, theirs = multiprocessing.Pipe()
            self._workers.append((forked(_serve, theirs, self._store.port), ours))
            theirs.close()


def forked(target: Callable[..., Any], *arguments: Any, daemon: bool = True) -> Any:
    """A process that runs `target(*arguments)`, a copy of one that has done nothing but import."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    process = context.Process(target=target, args=arguments, daemon=daemon)
    process.start()
    return process


@dataclass(frozen=True)
class Ended:
    """code: negative where a signal ended it. output: stdout and stderr."""

    code: int
    output: str


def run_warm(target: Callable[..., Any], *arguments: Any, where: Path, timeout: float = 240.0) -> Ended:
    """`target(*arguments)` in a process of its own in the directory `where`, as `python -c` would and without its two
    seconds of imports. What it raises, `SystemExit` included, ends it as it would end Python."""
    with tempfile.NamedTemporaryFile() as file:
        process = forked(redirected, file.name, str(where), dict(os.environ), target, arguments, daemon=False)
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
        ended = Ended(process.exitcode, Path(file.name).read_text(encoding="utf-8", errors="replace"))
        process.close()
    return ended


def redirected(
    file: str, where: str, environment: dict[str, str], target: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.chdir(where)
    os.environ.clear()
    os.environ.update(environment)
    written = os.open(file, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(written, stream)
    target(*arguments)


def _serve(pipe: Connection, port: int) -> None:
    """A worker's life: a job at a time, each in a process group of its own."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch
    import torch.distributed as dist

    from modelworks.parallel.mesh import build_mesh

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    # Connected once: torch asks the name server for the other side's name each time, and some take seconds to answer.
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    modules = 0
    while True:
        try:
            number, rank, layout, n_kv_heads, module, name, arguments, more = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            function: Any = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            if len(sys.modules) > modules:
                # Between jobs nothing lives but modules: hundreds of thousands of objects that need not be looked at
                # again and again.
                modules = len(sys.modules)
                gc.freeze()
            if layout.world_size > 1:
                prefixed = dist.PrefixStore(f"job{number}", store)
                dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=layout.world_size)
            try:
                mesh = build_mesh(layout, torch.device("cpu"), n_kv_heads=n_kv_heads)
                if layout.world_size > 1:
                    dist.barrier()  # a rank that is done at once would leave while others still connect to it
                result = function(mesh, *arguments, **more)
            finally:
                mesh: Any = None
                with contextlib.suppress(Exception):
                    if dist.is_initialized():
                        dist.destroy_process_group()
                # Hooks and modules hold each other, and with them groups whose threads go on polling: with hundreds
                # of jobs behind it a worker would do nothing else.
                gc.collect()
            pipe.send((True, result))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
