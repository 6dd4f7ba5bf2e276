"""What the trainer places where, for every pipeline of a job: layers on stages, and which of its ranks may be fullest.

A pipeline here is (ranks, schedule, stages on a rank, micro-batches). Layouts that differ in anything else share it, so
that each is worked out once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from modelworks.config import ParallelConfig
from modelworks.plan.columns import SCHEDULES, Array
from modelworks.plan.held import FILLING, most_held, shortened
from modelworks.plan.job import Job, Limits
from modelworks.plan.pipeline import Stages
from modelworks.plan.rank_bytes import Rank, ranks_of, stages_of_ranks
from modelworks.plan.spaces import Rows, Space
from modelworks.plan.stored import stages


class Pipeline(NamedTuple):
    """schedule: index of `SCHEDULES`."""

    pp: int
    schedule: int
    virtual: int
    n_micro_batches: int

    @property
    def name(self) -> str:
        return SCHEDULES[self.schedule]


class Fullest(NamedTuple):
    """Ranks that may hold the most, of each row one or several, the rows in order. row: which it belongs to. first:
    where each row's begin. layers, held, ends, looks_up (`first`), has_loss, sparse: as `rank_memory` takes them."""

    row: Rows
    first: Rows
    layers: Array
    held: Array
    ends: Array
    looks_up: Array
    has_loss: Array
    sparse: Array


class Placements:
    """Of every pipeline of a job; worked out once for each."""

    def __init__(self, job: Job, limits: Limits) -> None:
        self._job = job
        self._partition: list[int] | str = limits.fixed.get("pp_partition", "auto")
        self._placed: dict[tuple[int, int, int], tuple[tuple[int, ...], Stages, list[Rank]]] = {}
        self._fullest: dict[Pipeline, Array] = {}

    def counts(self, pipeline: Pipeline) -> tuple[int, ...]:
        """Layers of each stage."""
        return self._place(pipeline)[0]

    def stages(self, space: Space) -> Stages:
        """Layers of the ranks, for every row."""
        pipelines, member = self.pipelines(space)
        known = [self._place(each)[1] for each in pipelines]
        return Stages(*(np.array([getattr(each, item.name) for each in known])[member] for item in fields(Stages)))

    def pipelines(self, space: Space) -> tuple[list[Pipeline], NDArray[np.intp]]:
        """The different ones of a space, and which of them each row has."""
        number = self._job.global_batch // (space.dp_replicate * space.dp_shard * space.micro_batch)
        number = np.where(space.pp > 1, number, 1)
        key = (space.pp * len(SCHEDULES) + space.schedule) * (self._job.model.n_layers + 3) + space.virtual
        key = key * (self._job.global_batch + 1) + number
        _, first, member = np.unique(key, return_index=True, return_inverse=True)
        columns = (space.pp, space.schedule, space.virtual, number)
        return [Pipeline(*(int(column[row]) for column in columns)) for row in first], member

    def fullest(self, space: Space) -> Fullest:
        """Of every row, the ranks of which one holds the most, whatever else the row says."""
        pipelines, member = self.pipelines(space)
        known = [self._may_be_fullest(each) for each in pipelines]
        sizes = np.array([len(each) for each in known])
        begin = np.concatenate([[0], np.cumsum(sizes)])
        many = sizes[member]
        first = np.concatenate([[0], np.cumsum(many)])[:-1]
        row = np.repeat(np.arange(len(space)), many)
        place = begin[member][row] + np.arange(len(row)) - first[row]
        return Fullest(row, first, *np.concatenate(known)[place].T)

    def _may_be_fullest(self, pipeline: Pipeline) -> Array:
        """(layers, held, ends, looks_up, has_loss, sparse) of the ranks that no other one exceeds."""
        if pipeline.name != "gpipe":
            short = shortened(pipeline.name, pipeline.pp, pipeline.n_micro_batches, FILLING)
            pipeline = pipeline._replace(n_micro_batches=short)
        if pipeline not in self._fullest:
            model = self._job.model
            counts, _, ranks = self._place(pipeline)
            kept: Sequence[float] = (float(counts[0]),)
            if pipeline.pp > 1:
                kept = most_held(pipeline.name, counts, pipeline.pp, pipeline.n_micro_batches, pipeline.virtual)
            rows = set()
            for rank, held in zip(ranks, kept, strict=True):
                layers, sparse = len(rank.layers), sum(map(model.has_experts, rank.layers))
                rows.add(
                    (layers, held / max(layers, 1), rank.ends(model), rank.first, rank.last, sparse, -sparse, held)
                )
            every = np.array(sorted(rows), dtype=np.float64)
            at_most = (every[:, None, :] <= every[None, :, :]).all(axis=2)  # no two are alike: only itself exceeds none
            self._fullest[pipeline] = every[at_most.sum(axis=1) == 1][:, :6]
        return self._fullest[pipeline]

    def _place(self, pipeline: Pipeline) -> tuple[tuple[int, ...], Stages, list[Rank]]:
        key = pipeline.pp, pipeline.schedule, pipeline.virtual
        if key not in self._placed:
            partition = self._partition if pipeline.pp > 1 else "auto"
            parallel = ParallelConfig.model_construct(
                pp=pipeline.pp, pp_schedule=pipeline.name, pp_virtual=pipeline.virtual, pp_partition=partition
            )
            placed = stages(self._job.model, parallel, self._job.seq_len)
            ranks = ranks_of(parallel, placed)
            self._placed[key] = tuple(map(len, placed)), stages_of_ranks(ranks), ranks
        return self._placed[key]
