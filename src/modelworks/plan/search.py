"""The search: which layouts of a job are best, of all that the trainer accepts.

    every layout under 1F1B            closed forms over columns: bytes, seconds            `spaces.splits`
    the other schedules of those       that could still be among the best: `_could_win`     `spaces.with_schedules`
    the best by closed form            simulated on the trainer's own schedules             `candidate.evaluate`

What is left out at each step is counted in `Search.left_out`, with the reason. Two rules leave layouts out, and both
are safe under the cost model:

    memory     what does not fit under 1F1B fits under no schedule, as none keeps fewer micro-batches
    time       no schedule is faster than one without a bubble whose stages all take the mean

Layouts whose times lie within `TIE` of each other are a tie: the simplest of them is put first.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelworks.config import UserError
from modelworks.plan.candidate import Candidate, Prediction, evaluate, work_of
from modelworks.plan.columns import Array
from modelworks.plan.compute import Work
from modelworks.plan.constants import CONSTANTS, Constants
from modelworks.plan.job import Job, Limits
from modelworks.plan.memory import memory
from modelworks.plan.pipeline import stage_counts
from modelworks.plan.spaces import Space, splits, with_schedules
from modelworks.plan.step_time import layer_costs, step_time

TIE = 0.01  # times that differ by less are not told apart: the model is not that exact
MARGIN = 0.03  # of time or memory by which closed forms may differ from what is simulated


@dataclass(frozen=True)
class Found:
    """A layout and what is predicted for it. ties: how many simpler or equal ones took no more than `TIE` longer."""

    candidate: Candidate
    prediction: Prediction

    @property
    def device_seconds_per_token(self) -> float:
        return self.candidate.n_devices / self.prediction.tokens_per_second


@dataclass(frozen=True)
class Points:
    """Every layout that was looked at, by closed form: seconds of a step, bytes of the fullest rank, and whether that
    fits. Equally long; step is nan where only memory was asked for, because the layout does not fit."""

    step: Array
    memory: Array
    fits: NDArray[np.bool_]


@dataclass(frozen=True)
class Search:
    """best: ranked, simulated. goals: the best for each end. evaluated, fitting: layouts by closed form, and those of
    them that fit. left_out: reason -> layouts that were not looked at for it. seconds: that the search took."""

    job: Job
    limits: Limits
    best: list[Found]
    goals: dict[str, Found]
    evaluated: int
    fitting: int
    simulated: int
    left_out: dict[str, int]
    points: Points
    seconds: float = 0.0
    neighbours: list[Any] = field(default_factory=list)
    nothing_fits: Any = None


def search(job: Job, limits: Limits | None = None, *, top: int = 10, constants: Constants = CONSTANTS) -> Search:
    """The best layouts of a job. Raises UserError where the limits leave no layout that the trainer accepts."""
    began = time.perf_counter()
    limits = limits or Limits()
    table = _Table(job, limits, job.n_devices, constants)
    if not len(table.space):
        raise UserError(_no_layout(job, limits))
    ranked, simulated = table.best(top)
    goals = {}
    if ranked:
        goals["fastest"] = ranked[0]
        goals["least memory"] = table.least_memory(ranked)
    return Search(
        job,
        limits,
        best=ranked,
        goals=goals,
        evaluated=len(table.points.step),
        fitting=int(table.points.fits.sum()),
        simulated=simulated,
        left_out=table.left_out,
        points=table.points,
        seconds=time.perf_counter() - began,
    )


class _Table:
    """All layouts of one world size with their closed forms."""

    def __init__(self, job: Job, limits: Limits, n_devices: int, constants: Constants) -> None:
        self.job, self.limits, self.constants = job, limits, constants
        self.left_out: dict[str, int] = {}
        self.space = splits(job, limits, n_devices)
        self.memory = self._memory(self.space)
        self.limit = job.device.memory_gb * 1e9 * (1.0 - limits.headroom)
        self.fits = self.memory <= self.limit
        near = np.flatnonzero(self.memory <= self.limit * (1.0 + MARGIN))
        self.step = np.full(len(self.space), np.nan)
        if len(near):
            self.step[near], self._floor = self._times(self.space.rows(near))
        self.near = near
        self.points = Points(self.step, self.memory, self.fits)

    def best(self, top: int) -> tuple[list[Found], int]:
        """(the best that fit, simulated and in order; how many were simulated)."""
        space, step = self._schedules(top)
        found: list[Found] = []
        simulated = 0
        for row in np.argsort(step, kind="stable"):
            limit = sorted(each.prediction.step_seconds for each in found)[top - 1] if len(found) >= top else np.inf
            if step[row] * (1.0 - MARGIN) > limit or simulated >= 4 * top:
                break
            one = self._evaluate(space.candidate(self.job, int(row)))
            simulated += 1
            if one.prediction.memory <= self.limit:
                found.append(one)
        return _in_order(found)[:top], simulated

    def least_memory(self, ranked: list[Found]) -> Found:
        rows = self.near[np.argsort(self.memory[self.near], kind="stable")[:3]]
        tried = [self._evaluate(self.space.candidate(self.job, int(row))) for row in rows]
        return min([*tried, *ranked], key=lambda each: (each.prediction.memory, each.prediction.step_seconds))

    def _schedules(self, top: int) -> tuple[Space, Array]:
        """Of each split that could be among the best, its best schedule by closed form, and the seconds."""
        space, step = self.space.rows(self.near), self.step[self.near]
        fitting = np.sort(step[self.fits[self.near]])
        if not len(fitting):
            return space, step
        bound = fitting[min(top, len(fitting)) - 1]
        possible = np.flatnonzero(self._floor <= bound * (1.0 + MARGIN))
        every, origin = with_schedules(self.job, self.limits, space.rows(possible))
        held = self._memory(every)
        fits = held <= self.limit * (1.0 + MARGIN)
        every, origin = every.rows(fits), origin[fits]
        times, _ = self._times(every)
        order = np.lexsort((times, origin))
        first = np.concatenate([[True], origin[order][1:] != origin[order][:-1]]) if len(order) else order
        chosen = order[first]
        added = Points(times, held[fits], held[fits] <= self.limit)
        self.points = Points(
            *(np.concatenate([getattr(self.points, name.name), getattr(added, name.name)]) for name in fields(Points))
        )
        return every.rows(chosen), times[chosen]

    def _work(self, space: Space) -> Work:
        job = self.job
        return work_of(
            job.model,
            space.split(job),
            job.device,
            precision=job.precision,
            software=job.software,
            constants=self.constants,
            optimizer=job.optimizer,
        )

    def _memory(self, space: Space) -> Array:
        return np.asarray(memory(self._work(space)).total, dtype=np.float64)

    def _times(self, space: Space) -> tuple[Array, Array]:
        """(seconds of a step, the least that any schedule of the same split could take)."""
        work = self._work(space)
        times = step_time(work)
        layer, head, _ = layer_costs(work)
        split, shape = work.split, work.shape
        mean = split.n_micro_batches * (shape.n_layers * layer.total + head.total) / split.pp
        most = stage_counts(shape, split, head.total / layer.total).most
        rest = (times.data + times.optimizer) * (shape.n_layers / split.pp) / most
        return np.asarray(times.total, dtype=np.float64), np.asarray(mean + rest, dtype=np.float64)

    def _evaluate(self, candidate: Candidate) -> Found:
        return Found(candidate, evaluate(candidate, self.constants))


def _in_order(found: list[Found]) -> list[Found]:
    """By time; of those within a tie of the fastest that is left, the simplest first."""
    left = sorted(found, key=lambda each: each.prediction.step_seconds)
    ordered = []
    while left:
        fastest = left[0].prediction.step_seconds
        tied = [each for each in left if each.prediction.step_seconds <= fastest * (1.0 + TIE)]
        chosen = min(tied, key=lambda each: (complexity(each.candidate), each.prediction.step_seconds))
        left.remove(chosen)
        ordered.append(chosen)
    return ordered


def complexity(candidate: Candidate) -> int:
    """How much a layout asks of who runs it: a point for each axis in use and each choice that is not the default."""
    parallel = candidate.parallel
    axes: int = sum(getattr(parallel, axis) > 1 for axis in ("tp", "cp", "pp", "ep", "dp_replicate", "dp_shard"))
    choices = [
        parallel.zero >= 2,
        parallel.zero == 3,
        parallel.pp_schedule not in ("1f1b", "interleaved"),
        parallel.pp_virtual > 1,
        parallel.pp_partition != "auto",
        parallel.pp_gather != "step",
        parallel.accumulate_reduce != "last",
        parallel.offload != "none",
        parallel.tp > 1 and not parallel.sequence_parallel,
        candidate.recompute != "none",
    ]
    return axes + sum(choices)


def _no_layout(job: Job, limits: Limits) -> str:
    fixed = ", ".join(f"{key}={value}" for key, value in limits.fixed.items()) or "no limits"
    return f"no layout of {job.n_devices} devices for {job.global_batch} rows is accepted by the trainer with {fixed}"
