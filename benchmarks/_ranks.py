"""Processes for benchmarks of parallel runs: one function on every rank of a Gloo world, its results by rank."""

from __future__ import annotations

import os
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from modelworks.parallel import Labels
from modelworks.parallel.labels import Operation


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(rank, *arguments)` in a process group of fresh processes with one thread each."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve, args=(rank, world_size, store.port, theirs, function, arguments), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    results = []
    for rank, pipe in enumerate(pipes):
        try:
            good, value = pipe.recv()
        except EOFError:
            good, value = False, "died"
        if not good:
            for process in processes:
                process.kill()
            raise RuntimeError(f"rank {rank}: {value}")
        results.append(value)
    for process in processes:
        process.join()
    return results


class WaitingLabels(Labels):
    """Adds up the seconds in which this rank could only go on when others did their part, by axis."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def waiting(self, operation: Operation) -> Iterator[None]:
        started = time.perf_counter()
        with super().waiting(operation):
            yield
        # Names are "all_reduce tp", "send pp to rank 1", …: the second word is the axis.
        self.seconds[operation.name.split()[1]] += time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """Since the last call."""
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken


def _serve(rank: int, world_size: int, port: int, pipe: Any, function: Callable[..., Any], arguments: Any) -> None:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        pipe.send((True, function(rank, *arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        raise
    finally:
        dist.destroy_process_group()
