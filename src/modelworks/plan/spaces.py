"""All layouts of so many devices that the trainer accepts, as columns.

Which combinations are allowed is asked of the trainer's own checks (`layout.layout_problems`), a few keys at a time:
what a pipeline may be does not depend on the tensor degree, so asking for each part once and joining the answers by
numpy costs milliseconds where asking for every layout would cost minutes. The invariant, which a test holds against the
checks of whole run descriptions, is that what passes part by part passes whole.

What is not listed, and why no layout is lost by it (unless a limit asks for it):

    sequence_parallel false   where true is accepted: true exchanges the same bytes and keeps fewer
    micro-batches that leave  a rest: every micro-batch of a step has the same rows
    cp_mode ulysses           is not modelled; ring serves every number of heads
    micro-batches that are    too large for all devices together: the input of one layer, in two bytes an element,
    never held                takes more than all their memory

`splits` lists layouts under the 1F1B schedule, which of all keeps the fewest micro-batches; `with_schedules` gives rows
of it the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelworks.config import ParallelConfig, RunConfig
from modelworks.layout import V_SHAPED, layout_problems
from modelworks.plan.candidate import Candidate
from modelworks.plan.columns import OFFLOAD, RECOMPUTE, SCHEDULES, Split
from modelworks.plan.job import Job, Limits

Rows = NDArray[np.int64]
MODES = tuple(RECOMPUTE)
OFFLOADS = tuple(OFFLOAD)


@dataclass(frozen=True)
class Space:
    """Layouts as columns of whole numbers, one row each. schedule: index of `SCHEDULES`. recompute, offload: of `MODES`
    and `OFFLOADS`. every: 1 where each micro-batch's gradients are reduced. gather: 1 where ZeRO-3 gathers for each.
    """

    tp: Rows
    sequence_parallel: Rows
    cp: Rows
    pp: Rows
    dp_replicate: Rows
    dp_shard: Rows
    ep: Rows
    zero: Rows
    every: Rows
    gather: Rows
    micro_batch: Rows
    recompute: Rows
    offload: Rows
    schedule: Rows
    virtual: Rows

    def __len__(self) -> int:
        return len(self.tp)

    def rows(self, chosen: NDArray[Any]) -> Space:
        """Some of the rows: by number, or by a mask."""
        return Space(*(getattr(self, item.name)[chosen] for item in fields(self)))

    def groups(self) -> Rows:
        """A number for each row, the same where only data parallelism and the pipeline's schedule differ."""
        code = np.zeros(len(self), dtype=np.int64)
        for column in (self.tp, self.cp, self.pp, self.ep, self.recompute, self.micro_batch):
            width = int(column.max(initial=0)) + 1
            if int(code.max(initial=0)) * width > 2**62:
                code = np.unique(code, return_inverse=True)[1]
            code = code * width + column
        return code

    def complexity(self) -> Rows:
        """How much a layout asks of who runs it: a point for each axis in use and each choice beyond the usual."""
        axes = (self.tp, self.cp, self.pp, self.ep, self.dp_replicate, self.dp_shard, self.virtual)
        points = sum(((axis > 1).astype(np.int64) for axis in axes), np.zeros(len(self), dtype=np.int64))
        unusual = ~np.isin(self.schedule, [SCHEDULES.index(name) for name in ("1f1b", "interleaved")])
        for choice in (self.zero >= 2, self.zero == 3, unusual, self.recompute > 0):
            points = points + choice
        points = points + self.every + self.gather + (self.offload > 0)
        return np.asarray(points + ((self.tp > 1) & (self.sequence_parallel == 0)), dtype=np.int64)

    def split(self, job: Job) -> Split:
        """What the formulas take."""
        virtual = np.where(np.isin(self.schedule, _V_SHAPED), 2, self.virtual)
        columns = {
            name: getattr(self, name).astype(np.float64)
            for name in ("tp", "cp", "pp", "ep", "dp_replicate", "dp_shard", "zero", "sequence_parallel", "micro_batch")
        }
        return Split(
            **columns,
            global_batch=float(job.global_batch),
            seq_len=float(job.seq_len),
            virtual=virtual.astype(np.float64),
            recompute=self.recompute.astype(np.float64),
            schedule=self.schedule.astype(np.float64),
            reduce_every=self.every.astype(np.float64),
            gather_every=np.where(self.pp == 1, 1.0, self.gather.astype(np.float64)),
            offload=self.offload.astype(np.float64),
        )

    def candidate(self, job: Job, row: int, fixed: Mapping[str, Any]) -> Candidate:
        """One row as a run on paper. fixed: of the limits, for the keys that are no columns."""
        value = {item.name: int(getattr(self, item.name)[row]) for item in fields(self)}
        parallel = ParallelConfig(
            dp_replicate=value["dp_replicate"],
            dp_shard=value["dp_shard"],
            zero=value["zero"],  # type: ignore[arg-type]  # one of its four
            tp=value["tp"],
            sequence_parallel=bool(value["sequence_parallel"]),
            cp=value["cp"],
            pp=value["pp"],
            pp_schedule=SCHEDULES[value["schedule"]],  # type: ignore[arg-type]
            pp_virtual=value["virtual"],
            pp_partition=fixed.get("pp_partition", "auto") if value["pp"] > 1 else "auto",
            cp_mode=fixed.get("cp_mode", "ring"),
            pp_gather="micro-batch" if value["gather"] else "step",
            ep=value["ep"],
            accumulate_reduce="every" if value["every"] else "last",
            offload=OFFLOADS[value["offload"]],  # type: ignore[arg-type]
        )
        return candidate_of(job, parallel, value["micro_batch"], MODES[value["recompute"]])


def candidate_of(job: Job, parallel: ParallelConfig, micro_batch: int, recompute: str) -> Candidate:
    return Candidate(
        job.model,
        parallel,
        job.device,
        micro_batch,
        job.global_batch,
        job.seq_len,
        job.precision,
        recompute,
        job.software,
        job.optimizer,
    )


def complexity(candidate: Candidate) -> int:
    """The same of one candidate, a partition of its own counting too."""
    parallel = candidate.parallel
    axes = (parallel.tp, parallel.cp, parallel.pp, parallel.ep, parallel.dp_replicate, parallel.dp_shard)
    choices = (
        *(axis > 1 for axis in (*axes, parallel.pp_virtual)),
        parallel.zero >= 2,
        parallel.zero == 3,
        parallel.pp_schedule not in ("1f1b", "interleaved"),
        candidate.recompute != "none",
        parallel.accumulate_reduce == "every",
        parallel.pp_gather == "micro-batch",
        parallel.offload != "none",
        parallel.tp > 1 and not parallel.sequence_parallel,
        parallel.pp_partition != "auto",
    )
    return sum(choices)


def splits(job: Job, limits: Limits, n_devices: int) -> Space:
    """Every layout of so many devices under its first schedule: 1F1B, where the limits do not ask for another."""
    ask = _Checks(job, limits, n_devices)
    parts: list[dict[str, Rows]] = []
    schedules: dict[int, list[tuple[int, int]]] = {}
    for tp, sequence_parallel, cp in ask.inner(n_devices):
        for pp in _divisors(n_devices // (tp * cp)):
            dp = n_devices // (tp * cp * pp)
            if pp not in schedules:
                schedules[pp] = ask.schedules(pp)
            if not schedules[pp]:
                continue
            schedule, virtual = schedules[pp][0]
            here = {
                "tp": tp,
                "sequence_parallel": sequence_parallel,
                "cp": cp,
                "pp": pp,
                "schedule": schedule,
                "virtual": virtual,
            }
            outer = np.array(list(ask.outer(dp, cp, pp)), dtype=np.int64).reshape(-1, len(_OUTER))
            if len(outer):
                columns = {key: np.full(len(outer), value) for key, value in here.items()}
                parts.append(columns | dict(zip(_OUTER, outer.T, strict=True)))
    names = [item.name for item in fields(Space)]
    if not parts:
        return Space(*(np.zeros(0, dtype=np.int64) for _ in names))
    return Space(*(np.concatenate([part[name] for part in parts]) for name in names))


def with_schedules(job: Job, limits: Limits, space: Space) -> Space:
    """Each row once for every schedule that its pipeline may have."""
    ask = _Checks(job, limits, job.n_devices)
    spaces = []
    for pp in np.unique(space.pp):
        here = np.flatnonzero(space.pp == pp)
        for schedule, virtual in ask.schedules(int(pp)):
            some = space.rows(here)
            full = np.full(len(here), 1)
            spaces.append(replace(some, schedule=full * schedule, virtual=full * virtual))
    if not spaces:
        return space
    return Space(*(np.concatenate([getattr(each, item.name) for each in spaces]) for item in fields(Space)))


def schedules_of(job: Job, limits: Limits, space: Space) -> int:
    """Rows that `with_schedules` would give."""
    ask = _Checks(job, limits, job.n_devices)
    degrees, rows = np.unique(space.pp, return_counts=True)
    return sum(len(ask.schedules(int(pp))) * int(number) for pp, number in zip(degrees, rows, strict=True))


_OUTER = ("dp_replicate", "dp_shard", "ep", "zero", "every", "gather", "micro_batch", "recompute", "offload")
_V_SHAPED = [SCHEDULES.index(name) for name in V_SHAPED]


class _Checks:
    """The trainer's checks, a few keys at a time, under the user's limits."""

    def __init__(self, job: Job, limits: Limits, n_devices: int) -> None:
        self._config = job.run_config(ParallelConfig(cp_mode=limits.fixed.get("cp_mode", "ring")))
        self._limits = limits
        row = 2.0 * job.seq_len * job.model.d_model  # bytes of a layer's input, at least
        self._most_rows = max(1, int(n_devices * job.device.memory_gb * 1e9 / row))
        self._outer: dict[tuple[int, int, bool], list[tuple[int, ...]]] = {}

    def inner(self, n_devices: int) -> Iterator[tuple[int, int, int]]:
        """(tp, sequence_parallel, cp)."""
        limits = self._limits
        heads = self._config.model.n_heads
        for tp in _divisors(n_devices, most=min(heads, limits.max_tp or heads)):
            for cp in _divisors(n_devices // tp, most=self._config.data.seq_len):
                if not (limits.allows("tp", tp) and limits.allows("cp", cp)):
                    continue
                wanted = [limits.fixed["sequence_parallel"]] if "sequence_parallel" in limits.fixed else [True, False]
                for sequence_parallel in wanted:
                    if self._accepts(tp=tp, cp=cp, sequence_parallel=sequence_parallel):
                        yield tp, int(sequence_parallel), cp
                        break

    def schedules(self, pp: int) -> list[tuple[int, int]]:
        """(schedule, virtual) of a pipeline of so many ranks; 1F1B first."""
        without = {"pp_schedule": "1f1b", "pp_virtual": 1, "pp_partition": "auto"}  # of a layout that is no pipeline
        if not self._limits.allows("pp", pp) or (
            pp == 1 and not all(self._limits.allows(key, value) for key, value in without.items())
        ):
            return []
        names = ("1f1b", *(name for name in SCHEDULES if name != "1f1b")) if pp > 1 else ("1f1b",)
        most = (self._config.model.n_layers + 2) // pp if pp > 1 else 1
        found = []
        for name in names:
            if pp > 1 and not self._limits.allows("pp_schedule", name):
                continue
            for virtual in range(1, most + 1):
                if pp > 1 and not self._limits.allows("pp_virtual", virtual):
                    continue
                if name in V_SHAPED and virtual == 2 and "pp_virtual" not in self._limits.fixed:
                    continue  # the same as 1
                if self._accepts(pp=pp, pp_schedule=name, pp_virtual=virtual, **self._partition(pp)):
                    found.append((SCHEDULES.index(name), virtual))
        return found

    def outer(self, dp: int, cp: int, pp: int) -> list[tuple[int, ...]]:
        """Rows of `_OUTER` for so many data-parallel ranks."""
        key = (dp, cp if self._config.model.n_experts else 1, pp > 1)
        if key not in self._outer:
            self._outer[key] = list(self._data(dp, cp, pp > 1)) if self._accepts(dp_replicate=dp) else []
        return self._outer[key]

    def _data(self, dp: int, cp: int, pipeline: bool) -> Iterator[tuple[int, ...]]:
        limits, rows = self._limits, self._config.train.global_batch // dp
        experts = self._config.model.n_experts
        modes = [index for index, mode in enumerate(MODES) if limits.allows("recompute", mode)]
        most = None if "micro_batch" in limits.fixed else self._most_rows
        micro_batches = [size for size in _divisors(rows, most) if limits.allows("micro_batch", size)]
        away = OFFLOADS.index(limits.fixed.get("offload", "none"))
        for shard in _divisors(dp):
            replicate = dp // shard
            if not (limits.allows("dp_shard", shard) and limits.allows("dp_replicate", replicate)):
                continue
            zeros = [
                zero
                for zero in range(4)
                if limits.allows("zero", zero) and self._accepts(dp_replicate=replicate, dp_shard=shard, zero=zero)
            ]
            for ep in _divisors(math.gcd(dp * cp, experts) if experts else 1):
                placed = {"dp_replicate": replicate, "dp_shard": shard, "cp": cp, "ep": ep, "zero": int(shard > 1)}
                if not (limits.allows("ep", ep) and (ep == 1 or self._accepts_experts(placed))):
                    continue
                for zero in zeros:
                    for micro_batch in micro_batches:
                        for every, gather in self._accumulations(zero, rows // micro_batch, pipeline):
                            for mode in modes:
                                yield replicate, shard, ep, zero, every, gather, micro_batch, mode, away

    def _accumulations(self, zero: int, n_micro_batches: int, pipeline: bool) -> Iterator[tuple[int, int]]:
        """(accumulate_reduce is every, pp_gather is micro-batch): with one micro-batch, or without shards of what they
        are about, both choices of a key are the same and the default stands for them."""
        limits = self._limits
        for every in (0, 1):
            if every and (zero < 2 or n_micro_batches == 1) and "accumulate_reduce" not in limits.fixed:
                continue
            if not limits.allows("accumulate_reduce", "every" if every else "last"):
                continue
            for gather in (0, 1):
                if gather and not (zero == 3 and pipeline) and "pp_gather" not in limits.fixed:
                    continue
                if limits.allows("pp_gather", "micro-batch" if gather else "step"):
                    yield every, gather

    def _partition(self, pp: int) -> dict[str, Any]:
        wanted = self._limits.fixed.get("pp_partition", "auto")
        return {"pp_partition": wanted} if wanted != "auto" and pp > 1 else {}

    def _accepts_experts(self, keys: dict[str, Any]) -> bool:
        return not any("parallel.ep" in problem for problem in layout_problems(self._with(keys)))

    def _accepts(self, **keys: Any) -> bool:
        return not any(layout_problems(self._with(keys)))

    def _with(self, keys: dict[str, Any]) -> RunConfig:
        parallel = self._config.parallel.model_copy(update=keys)
        return self._config.model_copy(update={"parallel": parallel})


def _divisors(number: int, most: int | None = None) -> list[int]:
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    every = sorted({*small, *(number // each for each in small)})
    return [each for each in every if most is None or each <= most]
