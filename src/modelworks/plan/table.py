"""All layouts of one world size: closed forms for every one, the trainer's schedules simulated for the best.

    every layout under 1F1B          bytes and seconds by closed form                        `Table`
    their other schedules            where the split could still be among the best           `_schedules`
    the best by closed form          the pipeline's part replaced by the simulated one       `_refined`
    the best of those                predicted in full                                       `candidate.evaluate`

Two rules leave layouts out, both safe under the cost model and counted in `left_out`:

    memory     what does not fit under 1F1B fits under no schedule, as none keeps fewer micro-batches
    time       no schedule is faster than one without a bubble whose ranks all take the mean
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from modelworks.layout.pipeline import Costs
from modelworks.plan.candidate import Candidate, evaluate, work_of
from modelworks.plan.columns import SCHEDULES, Array
from modelworks.plan.compute import Passes, Work
from modelworks.plan.constants import Constants
from modelworks.plan.found import TIE, Found, Points
from modelworks.plan.job import Job, Limits
from modelworks.plan.memory import memory
from modelworks.plan.partition import improved
from modelworks.plan.pipeline import Sends, Stages, seconds_of_step, stage_costs
from modelworks.plan.spaces import Placements, Space, complexity, splits, with_schedules
from modelworks.plan.step_time import step_and_costs

MARGIN = 0.05  # by which closed forms of memory may be above what is predicted in full: 99 % are less
MARGIN_AT_LAST = 0.25  # the same where nothing was found: small models on many stages are up to 15 % less
FAR = 0.05  # by which a floor must be above the best to be left out
SLACK = 0.03  # the same of times and simulations
SCHEDULES_TRIED = (4, 24)  # pipelines that are simulated of a split, and of the one that is the best so far
TRIED = 8  # of layouts that tie, those predicted in full until one fits
MISSES = 32  # times that none of those fit, until no more are tried
PARTITIONS = 3  # of the best splits, those whose own partition is looked for


class Table:
    """The layouts of so many devices. points: what was looked at so far. left_out: reason -> layouts."""

    def __init__(
        self, job: Job, limits: Limits, n_devices: int, constants: Constants, placements: Placements | None = None
    ) -> None:
        self.job, self.limits, self.n_devices, self._constants = job, limits, n_devices, constants
        self._placements = placements or Placements(job, limits)
        self.left_out: dict[str, int] = {}
        self.simulated = 0
        self.space = splits(job, limits, n_devices)
        self.memory = self._memory(self.space)
        self.limit = self._limit()
        self.points = Points(np.full(len(self.space), np.nan), self.memory, self.memory <= self.limit)

    def __len__(self) -> int:
        return len(self.space)

    def best(self, top: int, *, at_last: bool = False) -> list[Found]:
        """The best that fit, in order: the simplest of what ties with the fastest, then the same of other splits.

        at_last: where none is found, whether those further above the limit by closed form are predicted in full too.
        """
        found = self._found(top, MARGIN)
        if not found and at_last:
            found = self._found(top, MARGIN_AT_LAST)
        if not found:
            return []
        fastest = min(each.prediction.step_seconds for each in found)
        tied = [each for each in found if each.prediction.step_seconds <= fastest * (1.0 + TIE)]
        first = min(tied, key=lambda each: (complexity(each.candidate), each.prediction.step_seconds))
        others = [each for each in found if each is not first]
        return [first, *sorted(others, key=lambda each: each.prediction.step_seconds)]

    def _found(self, top: int, margin: float) -> list[Found]:
        """One for each split, predicted in full."""
        rows = self._refined(top, margin)
        if rows is None:
            return []
        found: list[Found] = []
        misses = 0
        while len(found) < top and misses < MISSES and len(members := rows.next(everything=not found)):
            for row in members[:TRIED]:
                one = self._evaluate(rows.space.candidate(self.job, int(row), self.limits.fixed))
                if one.prediction.fits:
                    found.append(replace(self._partitioned(one, rows), ties=len(members) - 1))
                    rows.left &= rows.group != rows.group[row]  # its split has its answer
                    break
                rows.left[row] = False
                self._count("do not fit when predicted in full", 1)
            else:
                misses += 1
        if misses == MISSES:
            self._count("near the limit of memory, not predicted in full", int(rows.left.sum()))
        return found

    def least_memory(self) -> Found | None:
        """The layout of the fewest bytes, whether it fits or not; None where there is no layout."""
        if not len(self):
            return None
        rows = np.lexsort((self.space.complexity(), np.round(self.memory / 1e6)))[:4]
        tried = [self._evaluate(self.space.candidate(self.job, int(row), self.limits.fixed)) for row in rows]
        return min(tried, key=lambda each: each.prediction.memory)

    def fastest_seconds(self) -> float:
        """Of a step, by closed form, under the first schedule: what other world sizes are compared by."""
        near = np.flatnonzero(self.memory <= self.limit)
        return float(np.min(self._times(self.space.rows(near)).step)) if len(near) else np.inf

    def _partitioned(self, one: Found, rows: _Rows) -> Found:
        """With a partition of its own where that is faster by more than a tie."""
        parallel = one.candidate.parallel
        if parallel.pp == 1 or "pp_partition" in self.limits.fixed or rows.partitioned >= PARTITIONS:
            return one
        rows.partitioned += 1
        other = improved(one.candidate, self._constants, headroom=self.limits.headroom)
        if other is None:
            return one
        better = self._evaluate(other)
        seconds = one.prediction.step_seconds
        if not better.prediction.fits or better.prediction.step_seconds * (1.0 + TIE) > seconds:
            return one
        return replace(better, default_seconds=seconds)

    def _refined(self, top: int, margin: float) -> _Rows | None:
        """The rows that may be among the best, with simulated times; None where nothing may fit."""
        near = np.flatnonzero(self.memory <= self.limit * (1.0 + margin))
        if not len(near):
            return None
        space = self.space.rows(near)
        times = self._times(space)
        self.points.step[near] = times.step
        order = np.sort(times.step[self.memory[near] <= self.limit])
        bound = order[min(top * 4, len(order)) - 1] * (1.0 + FAR) if len(order) else np.inf
        possible = np.flatnonzero(times.floor <= bound)
        every = with_schedules(self.job, self.limits, space.rows(possible))
        self._count("slower than the best even without a bubble", len(near) - len(possible))
        self._count("do not fit even under 1F1B, whatever the schedule", len(self) - len(near))
        held = self._memory(every)
        fits = held <= self.limit * (1.0 + margin)
        every, held = every.rows(fits), held[fits]
        times = self._times(every)
        self._add(Points(times.step, held, held <= self.limit))
        return self._simulated(every, times, held <= self.limit, top)

    def _simulated(self, space: Space, times: _Times, fits: NDArray[np.bool_], top: int) -> _Rows:
        """Closed forms, best first, with the pipeline's part simulated, until no other row can be among the best."""
        groups = space.groups()
        best: dict[int, float] = {}  # seconds of each split
        tried: dict[int, set[object]] = defaultdict(set)  # pipelines of each
        seconds, chosen, bound = [], [], np.inf
        for place, row in enumerate(np.argsort(times.step, kind="stable")):
            value, group = float(times.step[row]), int(groups[row])
            if value * (1.0 - SLACK) > bound:
                self._count("slower than the best by closed form", len(space) - place)
                break
            if space.pp[row] > 1:
                ahead = group in best and best[group] <= min(best.values())
                enough = len(tried[group]) >= SCHEDULES_TRIED[ahead]
                if enough or value * (1.0 - SLACK) > best.get(group, np.inf):
                    self._count("schedules near their split's best by closed form, not simulated", 1)
                    continue
                key, makespan = self._pipeline(space, times, int(row))
                tried[group].add(key)
                value += makespan - float(times.pipeline[row])
            seconds.append(value)
            chosen.append(row)
            if not fits[row]:
                continue  # it may fit when predicted in full, and must keep no other from being tried
            best[group] = min(best.get(group, np.inf), value)
            if len(best) >= top:
                bound = sorted(best.values())[top - 1]
        self.simulated += sum(map(len, tried.values()))
        rows = np.array(chosen, dtype=np.int64)
        return _Rows(space.rows(rows), np.array(seconds), groups[rows])

    def _pipeline(self, space: Space, times: _Times, row: int) -> tuple[object, float]:
        pp, schedule, virtual = (int(column[row]) for column in (space.pp, space.schedule, space.virtual))
        counts = self._placements.counts(pp, schedule, virtual)
        costs = times.costs(row, counts)
        micro_batches = self.job.global_batch // int(
            space.dp_replicate[row] * space.dp_shard[row] * space.micro_batch[row]
        )
        key = SCHEDULES[schedule], costs, pp, micro_batches, virtual
        return key, seconds_of_step(*key, exact=False)

    def _work(self, space: Space) -> Work:
        job = self.job
        return work_of(
            job.model,
            space.split(job),
            job.device,
            precision=job.precision,
            software=job.software,
            constants=self._constants,
            optimizer=job.optimizer,
        )

    def _memory(self, space: Space) -> Array:
        if not len(space):
            return np.zeros(0)
        total = memory(self._work(space), self._placements.stages(space)).total
        return np.array(np.broadcast_to(total, len(space)), dtype=np.float64)

    def _times(self, space: Space) -> _Times:
        work, stages = self._work(space), self._placements.stages(space)
        return _Times.of(work, stages, len(space))

    def _evaluate(self, candidate: Candidate) -> Found:
        self.simulated += 1
        return Found(candidate, evaluate(candidate, self._constants, headroom=self.limits.headroom, timeline=False))

    def _limit(self) -> float:
        if not len(self.space):
            return 0.0
        return float(self._work(self.space.rows(np.array([0]))).machine.memory) * (1.0 - self.limits.headroom)

    def _count(self, reason: str, number: int) -> None:
        if number:
            self.left_out[reason] = self.left_out.get(reason, 0) + number

    def _add(self, more: Points) -> None:
        pairs = ((getattr(self.points, item.name), getattr(more, item.name)) for item in fields(Points))
        self.points = Points(*(np.concatenate(pair) for pair in pairs))


@dataclass
class _Rows:
    """Rows with their seconds and the split that each belongs to. partitioned: so many had a partition looked for."""

    space: Space
    seconds: Array
    group: NDArray[np.int64]
    partitioned: int = 0

    def __post_init__(self) -> None:
        self.left = np.ones(len(self.space), dtype=np.bool_)
        self._complexity = self.space.complexity()

    def next(self, *, everything: bool) -> NDArray[np.int64]:
        """What ties with the fastest that is left, in everything or in its own split; simplest first. Empty at last."""
        if not self.left.any():
            return np.zeros(0, dtype=np.int64)
        fastest = int(np.argmin(np.where(self.left, self.seconds, np.inf)))
        within = self.left if everything else self.left & (self.group == self.group[fastest])
        tied = np.flatnonzero(within & (self.seconds <= self.seconds[fastest] * (1.0 + TIE)))
        return tied[np.lexsort((self.seconds[tied], self._complexity[tied]))]


@dataclass(frozen=True)
class _Times:
    """Closed forms of rows. floor: seconds that no schedule can go below. pipeline: of `step`, what a simulation
    replaces. layer, head, sends: for one micro-batch."""

    step: Array
    floor: Array
    pipeline: Array
    layer: Passes
    head: Passes
    sends: Sends

    @classmethod
    def of(cls, work: Work, stages: Stages, rows: int) -> _Times:
        times, (layer, head, sends) = step_and_costs(work, stages)
        split, shape = work.split, work.shape
        mean = split.n_micro_batches * (shape.n_layers * layer.total + head.total) / split.pp
        rest = (times.data + times.optimizer) * (shape.n_layers / split.pp) / np.maximum(stages.most, 1.0)
        total = times.total
        pipeline = total - times.data - times.optimizer - times.overhead
        step, floor, closed = (np.broadcast_to(each, rows) for each in (total, mean + rest, pipeline))
        layers, heads = (Passes(*(np.broadcast_to(part, rows) for part in each)) for each in (layer, head))
        return cls(step, floor, closed, layers, heads, Sends(*(np.broadcast_to(each, rows) for each in sends)))

    def costs(self, row: int, counts: tuple[int, ...]) -> Costs:
        """Of each stage, which holds so many layers; the last also the head."""
        layer, head, sends = ([float(part[row]) for part in each] for each in (self.layer, self.head, self.sends))
        return stage_costs(layer, head, Sends(*sends), counts)
