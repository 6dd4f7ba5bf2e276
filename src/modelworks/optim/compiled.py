"""Running compiled kernels over tensors: whether they can, in stretches, on as many threads as torch has.

Stretches have a fixed length and each leaves its own partial sums, which are added up in order: results do not depend
on the number of threads. Threads are those of this file and not of numba, whose own do not survive a fork.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelworks.optim.pieces import Piece

STRETCH = 1 << 19  # elements: well over what calling a kernel costs, and enough of them for many threads

Kernel = Callable[..., None]


def kernels_for(tensor: Tensor) -> ModuleType | None:
    """`modelworks.optim.kernels`, if they can update tensors like this one: float32 or float64 on a CPU. None where
    torch's own operations must do; where that is for want of a compiler, a line says so, once."""
    if tensor.device.type != "cpu" or tensor.dtype not in (torch.float32, torch.float64):
        return None
    return _kernels()


@cache
def _kernels() -> ModuleType | None:
    try:
        from modelworks.optim import kernels
    except ImportError as error:
        logging.getLogger(__name__).warning(
            "optimisers run without compiled kernels, several times as slow: numba cannot be imported (%s)", error
        )
        return None
    return kernels


def in_stretches(
    kernel: Kernel,
    pieces: Sequence[Piece],
    columns: Sequence[str],
    scalars: Sequence[Sequence[float]],
    *,
    backwards: bool = False,
) -> None:
    """`kernel(*stretches of the columns, *scalars)` over all elements of pieces of one dtype.

    columns: "value", "gradient" or a state's kind. scalars: for each piece, converted to its dtype. backwards: from the
    last stretch to the first: what a pass before this one touched last is still in the cache.
    """
    jobs = [(kernel, *stretch, *numbers) for _, stretch, numbers in _stretches(pieces, columns, scalars)]
    run(jobs[::-1] if backwards else jobs)


def sums_in_stretches(
    kernel: Kernel, pieces: Sequence[Piece], columns: Sequence[str], n_sums: int, scalars: Sequence[Sequence[float]]
) -> list[list[float]]:
    """As `in_stretches` with a kernel that takes, after the columns, an array of `n_sums` float64 and leaves its sums
    in it. Returns for each piece the sums over all of it."""
    found = list(_stretches(pieces, columns, scalars))
    partial = np.empty((len(found), n_sums))
    jobs = [(kernel, *stretch, row, *numbers) for (_, stretch, numbers), row in zip(found, partial, strict=True)]
    run(jobs)
    totals = np.zeros((len(pieces), n_sums))
    for (owner, _, _), row in zip(found, partial, strict=True):
        totals[owner] += row
    result: list[list[float]] = totals.tolist()
    return result


def run(jobs: Sequence[tuple[Any, ...]]) -> None:
    """Call each (function, *arguments), in order, on as many threads as torch has here."""
    n_threads = min(torch.get_num_threads(), len(jobs))
    if n_threads <= 1:
        for function, *arguments in jobs:
            function(*arguments)
        return
    queue = deque(jobs)
    others = [_pool(os.getpid(), n_threads - 1).submit(_take, queue) for _ in range(n_threads - 1)]
    try:
        _take(queue)
    finally:
        queue.clear()
        _wait(others)


def array(tensor: Tensor) -> Any:
    """The tensor's memory as a flat numpy array."""
    return tensor.detach().reshape(-1).numpy()


def _stretches(
    pieces: Sequence[Piece], columns: Sequence[str], scalars: Sequence[Sequence[float]]
) -> Iterator[tuple[int, list[Any], list[Any]]]:
    """(which piece, arrays, scalars)"""
    for owner, (piece, own) in enumerate(zip(pieces, scalars, strict=True)):
        tensors = {"value": piece.value, "gradient": piece.gradient, **piece.state}
        flat = [array(tensors[column]) for column in columns]
        numbers = [flat[0].dtype.type(number) for number in own]
        for start in range(0, flat[0].size, STRETCH):
            yield owner, [column[start : start + STRETCH] for column in flat], numbers


def _take(queue: deque[tuple[Any, ...]]) -> None:
    while True:
        try:
            function, *arguments = queue.popleft()
        except IndexError:
            return
        function(*arguments)


def _wait(futures: Sequence[Future[None]]) -> None:
    for future in futures:
        future.result()


@cache
def _pool(process: int, n_threads: int) -> ThreadPoolExecutor:
    """process: a forked one has none of its parent's threads, and needs its own."""
    return ThreadPoolExecutor(n_threads, thread_name_prefix="optimizer")
