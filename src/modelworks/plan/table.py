"""All layouts of one world size: closed forms for every one, the trainer's schedules simulated for the best.

    every layout under 1F1B          bytes and seconds by closed form                        `Table`
    their other schedules            where the split could still be among the best           `_possible`
    in the order of what they take   the pipeline simulated, until no other row can be       `_simulated`
    at least (`bounds`)              the best
    the best of those                predicted in full                                       `candidate.evaluate`

What is left out cannot be the best under the cost model, and is counted in `left_out`:

    memory     does not fit in closed form, which differs from the full prediction by rows of padding only; in a large
               space its splits under 1F1B are asked first, with a wide margin for what another placement saves
    time       is slower than the best even where nothing beyond the pipeline's own order makes it wait

Splits behind the best are ranked by a few schedules of each: that is a heuristic, for the list below the winner.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from modelworks.layout.pipeline import Costs
from modelworks.plan.bounds import least_seconds
from modelworks.plan.candidate import Candidate, evaluate, work_of
from modelworks.plan.columns import Array
from modelworks.plan.compute import Passes, Work
from modelworks.plan.constants import Constants
from modelworks.plan.found import TIE, Found, Points
from modelworks.plan.job import Job, Limits
from modelworks.plan.memory import rank_memory
from modelworks.plan.partition import improved
from modelworks.plan.pipeline import Sends, Stages, seconds_of_step, stage_costs
from modelworks.plan.placements import Pipeline, Placements
from modelworks.plan.spaces import Space, complexity, schedules_of, splits, with_schedules
from modelworks.plan.step_time import step_and_costs

MARGIN = 0.03  # by which closed forms of memory may differ from what is predicted in full: rows of padding
MARGIN_MEASURED = 0.4  # the same on a machine that was measured, whose moments are followed one by one
MARGIN_AT_LAST = 0.05  # where nothing was found
MARGIN_OTHERS = 0.1  # by which another schedule may need less than 1F1B, by placing layers more evenly
FAR = 0.05  # by which a floor must be above the best to be left out
WHOLE = 50_000  # layouts with all their schedules, up to which each of them is looked at
SCHEDULES_TRIED = 4  # pipelines of a split that are simulated although it can no longer be the best
TRIED = 8  # of layouts that tie, those predicted in full until one fits
MISSES = 32  # times that none of those fit, until no more are tried
EXPANDED = 256  # splits of least memory whose other schedules are looked at for it
LOWEST = 64  # layouts of least memory that are predicted in full where nothing was found
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
        machine = self._work(self.space.rows(np.arange(min(1, len(self.space))))).machine if len(self.space) else None
        self.limit = float(machine.memory) * (1.0 - limits.headroom) if machine else 0.0
        self.margin = MARGIN if machine is None or machine.measured is None else MARGIN_MEASURED
        self.memory = self.bytes_of(self.space)
        self.points = Points(np.full(len(self.space), np.nan), self.memory, self.memory <= self.limit)

    def __len__(self) -> int:
        return len(self.space)

    def best(self, top: int, *, thorough: bool = True) -> list[Found]:
        """The best that fit, in order: the simplest of what ties with the fastest, then the same of other splits.

        thorough: whether every schedule that may be the best is simulated, however many a split has of them.
        """
        found = self._found(top, thorough) or self._lowest()
        if not found:
            return []
        fastest = min(each.prediction.step_seconds for each in found)
        tied = [each for each in found if each.prediction.step_seconds <= fastest * (1.0 + TIE)]
        first = min(tied, key=lambda each: (complexity(each.candidate), each.prediction.step_seconds))
        others = [each for each in found if each is not first]
        return [first, *sorted(others, key=lambda each: each.prediction.step_seconds)]

    def may_fit(self) -> bool:
        """Whether any layout comes near to fitting."""
        return bool((self.memory <= self.limit * (1.0 + MARGIN_OTHERS + self.margin)).any())

    def bytes_of(self, space: Space) -> Array:
        """Of each row's fullest rank, by closed form."""
        if not len(space):
            return np.zeros(0)
        ranks = self._placements.fullest(space)
        total = rank_memory(
            self._work(space.rows(ranks.row)),
            layers=ranks.layers,
            held=ranks.held,
            ends=ranks.ends,
            first=ranks.looks_up,
            has_loss=ranks.has_loss,
            sparse=ranks.sparse,
        ).total
        return np.asarray(np.maximum.reduceat(np.broadcast_to(total, len(ranks.row)), ranks.first), dtype=np.float64)

    def _found(self, top: int, thorough: bool) -> list[Found]:
        """One for each split, predicted in full."""
        rows = self._refined(top, thorough)
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

    def _lowest(self) -> list[Found]:
        """Those that fit of the layouts that need least, whatever the search made of them."""
        near = self._least(LOWEST, self.limit * (1.0 + MARGIN_AT_LAST + self.margin))
        return [each for each in near if each.prediction.fits]

    def least_memory(self) -> Found | None:
        """The layout of the fewest bytes, whether it fits or not; None where there is no layout."""
        return min(self._least(4), key=lambda each: each.prediction.memory, default=None)

    def _least(self, number: int, most: float = np.inf) -> list[Found]:
        """So many layouts of the fewest bytes by closed form, at most `most`, under any schedule, predicted in full."""
        if not len(self):
            return []
        lowest = np.argsort(self.memory, kind="stable")[:EXPANDED]
        lowest = lowest[self.memory[lowest] <= self.memory[lowest[0]] * (1.0 + MARGIN_OTHERS)]
        space = with_schedules(self.job, self.limits, self.space.rows(lowest))
        memory = self.bytes_of(space)
        order = np.lexsort((space.complexity(), np.round(memory / 1e6)))[:number]
        return [
            self._evaluate(space.candidate(self.job, int(row), self.limits.fixed))
            for row in order
            if memory[row] <= most
        ]

    def least_seconds(self) -> float:
        """Of a step, below which no layout that may fit can be: what other world sizes are compared by."""
        near = np.flatnonzero(self.memory <= self.limit * (1.0 + MARGIN_OTHERS + self.margin))
        return float(np.min(self._times(self.space.rows(near)).floor)) if len(near) else np.inf

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

    def _refined(self, top: int, thorough: bool) -> _Rows | None:
        """The rows that may be among the best, with simulated times; None where nothing may fit."""
        possible = self._possible(top)
        if not len(possible):
            return None
        held = self.bytes_of(possible)
        near = held <= self.limit * (1.0 + self.margin)
        self._count("do not fit", int((~near).sum()))
        space, held = possible.rows(near), held[near]
        if not len(space):
            return None
        times = self._times(space, self._placements)
        self._add(Points(times.step, held, held <= self.limit))
        return self._simulated(space, times, held <= self.limit * (1.0 - self.margin), top, thorough)

    def _possible(self, top: int) -> Space:
        """Splits that may be among the best, with all their schedules: in a small space all of them."""
        every = self.space
        if len(every) > WHOLE or schedules_of(self.job, self.limits, every) > WHOLE:
            margin = self.margin + (MARGIN_OTHERS if (every.pp > 1).any() else 0.0)
            near = np.flatnonzero(self.memory <= self.limit * (1.0 + margin))
            self._count("do not fit even under 1F1B, whatever the schedule", len(every) - len(near))
            every = every.rows(near)
            if not len(every):
                return every
            times = self._times(every)
            self.points.step[near] = times.step
            sure = np.sort(times.step[self.memory[near] <= self.limit * (1.0 - self.margin)])
            bound = sure[min(top * 4, len(sure)) - 1] * (1.0 + FAR) if len(sure) else np.inf
            possible = times.floor <= bound
            self._count("slower than the best even without a bubble", int((~possible).sum()))
            every = every.rows(possible)
        return with_schedules(self.job, self.limits, every)

    def _simulated(self, space: Space, times: _Times, fits: NDArray[np.bool_], top: int, thorough: bool) -> _Rows:
        """From the row that may be the fastest on, with the pipeline's part simulated, until no other row can be among
        the best. fits: of what surely does; what may miss the limit must keep no other from being tried."""
        groups, points = space.groups(), space.complexity()
        best: dict[int, float] = {}  # seconds of each split
        tried: dict[int, set[object]] = defaultdict(set)  # pipelines of each
        rows, seconds, tied = list[int](), list[float](), list[tuple[float, int]]()
        bound = fastest = np.inf
        for place, row in enumerate(np.argsort(times.least, kind="stable")):
            least, group = float(times.least[row]), int(groups[row])
            if least > bound:
                self._count("slower than the best by a lower bound", len(space) - place)
                break
            value = float(times.step[row])
            if space.pp[row] > 1:
                simplest = min((each for time, each in tied if time <= fastest * (1.0 + TIE)), default=np.inf)
                wins = least <= fastest or (least <= fastest * (1.0 + TIE) and points[row] < simplest)
                enough = len(tried[group]) >= SCHEDULES_TRIED
                if (enough and not (wins and thorough)) or (not wins and least > best.get(group, np.inf)):
                    self._count("schedules of splits behind the best, not simulated", 1)
                    continue
                key, makespan = self._pipeline(space, times, int(row))
                tried[group].add(key)
                value += makespan - float(times.pipeline[row])
            rows.append(int(row))
            seconds.append(value)
            if not fits[row]:
                continue
            fastest = min(fastest, value)
            tied.append((value, int(points[row])))
            best[group] = min(best.get(group, np.inf), value)
            if len(best) >= top:
                bound = max(sorted(best.values())[top - 1], fastest * (1.0 + TIE))
        self.simulated += sum(map(len, tried.values()))
        chosen = np.array(rows, dtype=np.int64)
        return _Rows(space.rows(chosen), np.array(seconds), groups[chosen])

    def _pipeline(self, space: Space, times: _Times, row: int) -> tuple[object, float]:
        pipeline = times.pipelines[times.member[row]]
        costs = times.costs(row, self._placements.counts(pipeline))
        key = pipeline.name, costs, pipeline.pp, pipeline.n_micro_batches, pipeline.virtual
        return key, seconds_of_step(*key)

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

    def _times(self, space: Space, placements: Placements | None = None) -> _Times:
        """placements: where lower bounds are asked for."""
        return _Times.of(self._work(space), self._placements.stages(space), space, placements)

    def _evaluate(self, candidate: Candidate) -> Found:
        self.simulated += 1
        return Found(candidate, evaluate(candidate, self._constants, headroom=self.limits.headroom, timeline=False))

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
    """Closed forms of rows. floor, least: seconds that no schedule can go below, and that its own cannot. pipeline: of
    `step`, what a simulation replaces. layer, head, sends: for one micro-batch. pipelines, member: which each row has.
    """

    step: Array
    floor: Array
    least: Array
    pipeline: Array
    layer: Passes
    head: Passes
    sends: Sends
    pipelines: list[Pipeline]
    member: NDArray[np.intp]

    @classmethod
    def of(cls, work: Work, stages: Stages, space: Space, placements: Placements | None) -> _Times:
        rows = len(space)
        times, (layer, head, sends) = step_and_costs(work, stages)
        split, shape = work.split, work.shape
        mean = split.n_micro_batches * (shape.n_layers * layer.total + head.total) / split.pp
        rest = (times.data + times.optimizer) * (shape.n_layers / split.pp) / np.maximum(stages.most, 1.0)
        total = times.total
        pipeline = total - times.data - times.optimizer - times.overhead
        step, floor, closed = (np.broadcast_to(each, rows) for each in (total, mean + rest, pipeline))
        layers, heads = (Passes(*(np.broadcast_to(part, rows) for part in each)) for each in (layer, head))
        sent = Sends(*(np.broadcast_to(each, rows) for each in sends))
        if placements is None:
            return cls(step, floor, floor, closed, layers, heads, sent, [], np.zeros(rows, dtype=np.intp))
        pipelines, member = placements.pipelines(space)
        least = np.array(step)
        order = np.argsort(member, kind="stable")
        for pipeline, mine in zip(pipelines, np.split(order, np.cumsum(np.bincount(member))[:-1]), strict=True):
            if pipeline.pp > 1:
                costs = [np.array([part[mine] for part in each]) for each in (layers, heads, sent)]
                least[mine] += least_seconds(pipeline, placements.counts(pipeline), *costs) - closed[mine]
        return cls(step, floor, least, closed, layers, heads, sent, pipelines, member)

    def costs(self, row: int, counts: tuple[int, ...]) -> Costs:
        """Of each stage, which holds so many layers; the last also the head."""
        layer, head, sends = ([float(part[row]) for part in each] for each in (self.layer, self.head, self.sends))
        return stage_costs(layer, head, Sends(*sends), counts)
