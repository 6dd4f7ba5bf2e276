"""The bubble of a pipeline: measured beside simulation and formula.

With as many ranks as cores the stages do real work. With more, two cores would measure contention, so stages wait a
set time in place of computing, as a process does whose device computes; everything else (the executor, messages, the
order) is what a real run does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modelworks.layout import V_SHAPED, Layout
from modelworks.layout.pipeline import (
    Costs,
    Timed,
    Timeline,
    bubble_formula,
    build_program,
    peak_formula,
    simulate,
    stage_ranks,
)
from modelworks.parallel import build_mesh
from modelworks.parallel.pipeline import PipelineExecutor

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "interleaved-zb": 2, "zbv": 2, "dualpipev": 2}


def waiting_bubbles(rank: int, micro_batches: list[int], seconds: float, rounds: int) -> list[dict[str, Any]]:
    """On one rank of a pipeline over the whole world: every schedule, round by round. seconds: that the whole share of
    a rank takes for one forward pass, one gradient of inputs or one of weights."""
    pp = dist.get_world_size()
    mesh = build_mesh(Layout(pp=pp), torch.device("cpu"))
    cases = [(schedule, m) for m in micro_batches for schedule in SCHEDULES]
    executors = {case: _executor(mesh, *case) for case in cases}
    found: dict[tuple[str, int], list[Timeline]] = {case: [] for case in cases}
    held: dict[tuple[str, int], list[int]] = {}
    for turn in range(-1, rounds):  # the first opens the connections
        for case, executor in executors.items():
            stages = len(stage_ranks(executor.program)) // pp
            forward = _Forward(executor, seconds / stages)
            mesh.group("world").barrier()
            executor.run(case[1], forward, training=True, edge_shapes={"hidden": ((1,), torch.float32)})
            timelines = mesh.group("world").gather_objects(executor.timeline)
            held[case] = mesh.group("world").gather_objects(executor.peak_held_together)
            if turn >= 0:
                found[case].append(as_timeline(timelines))
    return [
        {
            **compared(schedule, pp, m, [timeline.bubble_fraction for timeline in found[schedule, m]]),
            "stages": "waiting",
            "held": held[schedule, m],
            "held_formula": [
                peak_formula(schedule, pp, m, formula_virtual(schedule), rank=place) for place in range(pp)
            ],
        }
        for schedule, m in cases
    ]


def compared(
    schedule: str, pp: int, micro_batches: int, measured: list[float], costs: Costs | None = None
) -> dict[str, Any]:
    """Median of the measured bubble fractions, beside what is expected. costs: of the stages; default: all alike."""
    virtual = formula_virtual(schedule)
    program = build_program(schedule, pp, micro_batches, virtual)
    return {
        "schedule": schedule,
        "pp": pp,
        "micro_batches": micro_batches,
        "measured": sorted(measured)[len(measured) // 2],
        "each": measured,
        "simulated": simulate(program, costs or Costs.even(len(stage_ranks(program)))).bubble_fraction,
        "formula": bubble_formula(schedule, pp, micro_batches, virtual),
        "simple": (pp - 1) / (micro_batches + pp - 1),
    }


def formula_virtual(schedule: str) -> int:
    """What `pp_virtual` is: V-shaped schedules have two stages a rank without being asked."""
    return 1 if schedule in V_SHAPED else SCHEDULES[schedule]


def as_timeline(timelines: list[list[Timed]]) -> Timeline:
    return Timeline(tuple(map(tuple, timelines)))


def _executor(mesh: Any, schedule: str, micro_batches: int) -> PipelineExecutor:
    program = build_program(schedule, mesh.size("pp"), micro_batches, formula_virtual(schedule))
    own = [stage for stage, place in stage_ranks(program).items() if place == mesh.place("pp")]
    parts: Any = {stage: nn.Identity() for stage in own}
    return PipelineExecutor(mesh, program, parts, record=True)


class _Forward:
    """What a stage does: it waits, and its backward pass waits once for inputs and once for weights."""

    def __init__(self, executor: PipelineExecutor, seconds: float) -> None:
        self._executor, self._seconds = executor, seconds
        self._last = len(executor.ranks) - 1

    def __call__(
        self, stage: int, part: Any, micro_batch: int, inputs: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        x = inputs["hidden"] if inputs else torch.zeros(1, requires_grad=True)
        deferred = self._executor.deferred.get(stage)
        put_off = deferred.put_off if deferred is not None and deferred.active else None
        y = _Waits.apply(x, self._seconds, put_off)
        return ({}, y.sum()) if stage == self._last else ({"hidden": y}, None)


class _Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, put_off: Callable[[Callable[[], None]], None] | None) -> Tensor:
        ctx.seconds, ctx.put_off = seconds, put_off
        _wait(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        _wait(ctx.seconds)
        if ctx.put_off is None:
            _wait(ctx.seconds)
        else:
            ctx.put_off(partial(_wait, ctx.seconds))
        return gradient.clone(), None, None


def _wait(seconds: float) -> None:
    threading.Event().wait(seconds)
