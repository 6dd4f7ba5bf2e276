"""Ranks as threads of one process: what an optimiser does over shards, without processes or a network.

    held = [{"w": ShardSpec.whole("w", (6, 4)).cut(0, 3, rank)} for rank in range(3)]
    results = ThreadRanks(held, {"w": (6, 4)}).run(lambda rank, split: ...)

Each thread gets a `Split` whose sums, maxima and whole matrices meet the others' at a barrier.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from modelworks.layout import ShardSpec
from modelworks.optim.sums import Split

T = TypeVar("T")


class ThreadRanks:
    """held: for each rank, its slices by name. shapes: of all parameters."""

    def __init__(self, held: Sequence[Mapping[str, ShardSpec]], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._held, self._shapes, self.size = held, shapes, len(held)
        self._barrier, self._given = threading.Barrier(self.size), dict[int, Any]()

    def run(self, job: Callable[[int, Split], T]) -> list[T]:
        """What `job(rank, split)` returns on each. What it raises on any is raised."""
        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(self._guarded, job, rank) for rank in range(self.size)]
        errors = [error for future in futures if (error := future.exception())]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]

    def _guarded(self, job: Callable[[int, Split], T], rank: int) -> T:
        try:
            return job(rank, self._split(rank))
        except BaseException:
            self._barrier.abort()  # the others must not wait for this one
            raise

    def _split(self, rank: int) -> Split:
        def all_given(value: Any) -> list[Any]:
            self._given[rank] = value
            self._barrier.wait()
            given = [self._given[each] for each in range(self.size)]
            self._barrier.wait()
            return given

        def reduce(value: Tensor, how: Literal["sum", "max"]) -> Tensor:
            given = torch.stack(all_given(value))
            return given.sum(0) if how == "sum" else given.amax(0)

        def matrices(
            slices: Mapping[str, Tensor], specs: Mapping[str, ShardSpec], compute: Callable[[Tensor], Tensor]
        ) -> dict[str, Tensor]:
            wholes = {name: tensor.new_zeros(specs[name].shape) for name, tensor in slices.items()}
            for theirs, places in all_given((slices, specs)):
                for name in theirs.keys() & wholes.keys():
                    wholes[name][places[name].slices] = theirs[name]
            return {name: compute(whole)[specs[name].slices].contiguous() for name, whole in wholes.items()}

        return Split(self._held[rank], self._shapes, reduce, matrices)
