"""Running kernels in C++ over tensors: whether they can, in stretches, on as many threads as torch has.

An update is bound by memory. A formula of several operations goes several times through memory in torch; a kernel reads
and writes each number once. The kernels (`kernels/*.cpp`) are built when they are first needed
(`modelworks.native`).

Stretches have a fixed length and each leaves its own partial sums, which are added up in order: results do not depend
on the number of threads. No kernel starts threads: they are those of this file, one pool for a process, a forked one
its own.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelworks.native import Unavailable, load
from modelworks.optim.pieces import Piece

STRETCH = 1 << 19  # elements: well over what calling a kernel costs, and enough of them for many threads

_SOURCES = tuple(sorted((Path(__file__).parent / "kernels").iterdir()))
# No multiplication is contracted with an addition: codes of 8 bits must not depend on how a loop was vectorised.
_FLAGS = ("-ffp-contract=off", "-fno-trapping-math", "-fopenmp-simd")


More = Sequence["Job"] | None


class Job:
    """One call of a kernel. Returns the jobs that it makes possible, if any, to be done next."""

    def __init__(
        self,
        kernel: Any,
        addresses: Sequence[int],
        sizes: ctypes.Array[ctypes.c_int64],
        numbers: ctypes.Array[ctypes.c_double],
        keeps: object = None,
    ) -> None:
        """keeps: whatever owns memory at the addresses and nobody else holds."""
        self._kernel, self._keeps, self.numbers = kernel, keeps, numbers
        self._arguments = ((ctypes.c_void_p * len(addresses))(*addresses), sizes, numbers)
        self.after: Callable[[], More] | None = None

    def __call__(self) -> More:
        self._kernel(*self._arguments)
        return self.after() if self.after else None


class Kernels:
    """Those for one dtype."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._library, self._suffix = library, str(dtype).removeprefix("torch.")

    def job(self, name: str, tensors: Sequence[Tensor], sizes: Sequence[int], numbers: Sequence[float] = ()) -> Job:
        """tensors: contiguous ones."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        return Job(self._kernel(name), addresses, _sizes(*sizes), _numbers(numbers), tensors)

    def in_stretches(
        self, name: str, piece: Piece, columns: Sequence[str], numbers: Sequence[float], *, backwards: bool = False
    ) -> list[Job]:
        """A kernel of (stretches of the columns; elements; numbers) over all of a piece.

        columns: "value", "gradient" or a state's kind. backwards: from the last stretch to the first: what a pass
        before this one touched last is still in the cache. The jobs share one array of `numbers`.
        """
        kernel, same = self._kernel(name), _numbers(numbers)
        jobs = [Job(kernel, addresses, _sizes(size), same) for addresses, size in _stretches(piece, columns)]
        return jobs[::-1] if backwards else jobs

    def sums_in_stretches(
        self,
        name: str,
        piece: Piece,
        columns: Sequence[str],
        n_sums: int,
        numbers: Sequence[float],
        then: Callable[[list[float]], More],
    ) -> list[Job]:
        """As `in_stretches` with a kernel that takes, after the columns, an array of `n_sums` float64 and leaves its
        sums in it. The job that ends last calls `then` with the sums over all of the piece."""
        kernel, same, stretches = self._kernel(name), _numbers(numbers), list(_stretches(piece, columns))
        partial = torch.empty(len(stretches), n_sums, dtype=torch.float64)
        sums, width = partial.data_ptr(), n_sums * partial.element_size()
        jobs = [
            Job(kernel, [*addresses, sums + row * width], _sizes(size), same, partial)
            for row, (addresses, size) in enumerate(stretches)
        ]
        last = _Last(len(jobs), lambda: then([sum(column) for column in zip(*partial.tolist(), strict=True)]))
        for job in jobs:
            job.after = last
        return jobs

    def _kernel(self, name: str) -> Any:
        kernel = getattr(self._library, f"{name}_{self._suffix}")
        kernel.restype = None
        return kernel


def kernels_for(tensor: Tensor) -> Kernels | None:
    """The kernels that can update tensors like this one: float32 or float64 on a CPU. None where torch's own operations
    must do; where that is for want of a compiler, a line says so, once."""
    if tensor.device.type != "cpu" or tensor.dtype not in (torch.float32, torch.float64):
        return None
    return _kernels(tensor.dtype)


def run(jobs: Sequence[Callable[[], More]]) -> None:
    """Do each, in order, on as many threads as torch has here; jobs that one returns before any other."""
    queue = _Queue(jobs)
    n_threads = min(torch.get_num_threads(), len(jobs))
    if n_threads <= 1:
        queue.work()
        return
    others = [_pool(os.getpid(), n_threads - 1).submit(queue.work) for _ in range(n_threads - 1)]
    try:
        queue.work()
    finally:
        _wait(others)


class _Queue:
    """Jobs to do. Workers stay while a job runs, as it may make more."""

    def __init__(self, jobs: Sequence[Callable[[], More]]) -> None:
        self._jobs, self._n_running, self._n_waiting = deque(jobs), 0, 0
        self._changed = threading.Condition()

    def work(self) -> None:
        while job := self._take():
            more: More = None
            try:
                more = job()
            except BaseException:
                with self._changed:
                    self._jobs.clear()
                raise
            finally:
                with self._changed:
                    self._n_running -= 1
                    if more:
                        self._jobs.extendleft(reversed(more))
                    if self._n_waiting:
                        self._changed.notify_all()

    def _take(self) -> Callable[[], More] | None:
        with self._changed:
            while not self._jobs and self._n_running:
                self._n_waiting += 1
                self._changed.wait()
                self._n_waiting -= 1
            if not self._jobs:
                return None
            self._n_running += 1
            return self._jobs.popleft()


class _Last:
    """Of `n` calls, the last one is passed on."""

    def __init__(self, n: int, then: Callable[[], More]) -> None:
        self._left, self._then, self._lock = n, then, threading.Lock()

    def __call__(self) -> More:
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        return self._then() if is_last else None


@cache
def _kernels(dtype: torch.dtype) -> Kernels | None:
    library = _library()
    return Kernels(library, dtype) if library else None


@cache
def _library() -> ctypes.CDLL | None:
    try:
        return load("optim", _SOURCES, flags=_FLAGS)
    except Unavailable as reason:
        logging.getLogger(__name__).warning(
            "optimisers run without compiled kernels, several times as slow: %s", reason
        )
        return None


def _stretches(piece: Piece, columns: Sequence[str]) -> Iterator[tuple[list[int], int]]:
    """(addresses, elements)"""
    tensors = {"value": piece.value, "gradient": piece.gradient, **piece.state}
    starts = [tensors[column].data_ptr() for column in columns]
    n, width = piece.value.numel(), piece.value.element_size()
    for start in range(0, n, STRETCH):
        yield [address + start * width for address in starts], min(STRETCH, n - start)


def _sizes(*sizes: int) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(sizes))(*sizes)


def _numbers(numbers: Sequence[float]) -> ctypes.Array[ctypes.c_double]:
    return (ctypes.c_double * len(numbers))(*numbers)


def _wait(futures: Sequence[Future[None]]) -> None:
    for future in futures:
        future.result()


@cache
def _pool(process: int, n_threads: int) -> ThreadPoolExecutor:
    """process: a forked one has none of its parent's threads, and needs its own."""
    return ThreadPoolExecutor(n_threads, thread_name_prefix="optimizer")
