"""Timing work on all ranks at once: what the measurements of `modelworks.train.rates` share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from modelworks.parallel import Mesh

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Tell = Callable[[str], None]


class Clock:
    """effort: of the repetitions, relative to what gives steady figures. tell: of what was just measured."""

    def __init__(self, mesh: Mesh, effort: float, tell: Tell) -> None:
        self.mesh, self.device, self.tell = mesh, mesh.device, tell
        self._world, self._effort = mesh.group("world"), effort

    def seconds(self, *works: Callable[[], object], budget: float = 0.25) -> list[float]:
        """Of one call of each, which take turns: medians of as many turns as fit in the budget (3 to 25), after one
        that warms up. All ranks begin each together; the mean over them."""
        took = [self._once(work) for work in works]
        expected = max(self._world.gather_objects(sum(took)))
        turns = round(min(25, max(3, self._effort * budget / expected)))
        times: list[list[float]] = [[] for _ in works]
        for _ in range(turns):
            for work, each in zip(works, times, strict=True):
                each.append(self._once(work))
        medians = [statistics.median(each) for each in times]
        return [statistics.mean(of_ranks) for of_ranks in zip(*self._world.gather_objects(medians), strict=True)]

    def random(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Normal numbers, the same at each call."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(shape, generator=generator).to(self.device, dtype)

    def _once(self, work: Callable[[], object]) -> float:
        self._world.barrier()
        self._wait()
        started = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
