"""What a split run measures of its own split, beside what the formulas say: collectives, memory, pipeline.

A few steps are measured: the third of this process, each with an evaluation, and the last. Every rank notes what it
sent, which bytes it held when it updated, and how many micro-batches its stages held; rank 0 gathers and records it:

    collectives/calls, collectives/bytes            tags rank, axis, kind    what the rank sent in that one step
    rank_memory/{parameters, gradients, optimizer}  tags rank                bytes at the update
    rank_memory/gradients_accumulating              tags rank                between two micro-batches, where pp is 1
    pipeline/held                                   tags rank                most (stage, micro-batch) pairs at once
    pipeline/bubble                                 measured once; predicted with the tag formula
    pipeline/timeline                               an event: what each rank of the first pipeline did when

Each is written as `measured` and as `predicted`; see `modelworks.layout.traffic`, `.data_memory` and `.pipeline`.
Experts are predicted with balanced routing, which a real router does not have.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelworks.layout import Layout
from modelworks.layout.pipeline import (
    Action,
    Costs,
    Program,
    Timed,
    Timeline,
    bubble_formula,
    chrome_trace,
    peak_formula,
    simulate,
    stage_ranks,
)
from modelworks.layout.traffic import step_traffic
from modelworks.records import Kind, Record
from modelworks.train.derivation import Derived
from modelworks.train.loop import StepDone
from modelworks.train.rank_memory import stored_memory
from modelworks.train.recording import RunLog
from modelworks.train.run_directory import write_atomically
from modelworks.train.state import TrainState

FIRST = 3  # the first step measured: the ones before it allocate
MEMORY = ("parameters", "gradients", "gradients_accumulating", "optimizer")
TRACE = Path("profile") / "pipeline-trace.json"


@dataclass
class RankFigures:
    """What one rank measured, or should have. sent: (axis, kind) -> calls and bytes. held: (stage, micro-batch) pairs.

    timeline: of the ranks of the first pipeline, times in seconds since the epoch.
    """

    sent: dict[tuple[str, str], tuple[int, float]]
    memory: dict[str, int]
    held: int
    timeline: list[Timed] = field(default_factory=list)


class SplitRecords:
    """A hook. run_dir: where the trace goes. latest: the newest measurement, as `--json` shows it; None before any."""

    def __init__(self, log: RunLog, derived: Derived, state: TrainState, run_dir: Path) -> None:
        self.latest: dict[str, Any] | None = None
        self._log, self._derived, self._run_dir = log, derived, run_dir
        self._first = min(state.step + FIRST, derived.total_steps)
        self._measured_first = False
        self._predicted: dict[int, list[RankFigures]] = {}  # by the micro-batches of a step
        self._bubble: dict[str, float | None] | None = None
        self._prepare(state)

    def after_step(self, state: TrainState, done: StepDone) -> None:
        if state.model.measures:
            self._measure(state, done)
        self._prepare(state)

    def _prepare(self, state: TrainState) -> None:
        """Make the next step a measured one, where it should be."""
        step, derived = state.step + 1, self._derived
        wanted = step == self._first or step % derived.evaluate_every == 0 or step == derived.total_steps
        state.model.measures = wanted and step <= derived.total_steps
        if derived.config.parallel.pp > 1:
            state.model.executor(derived.at(state.step).accumulation).record = step == self._first

    def _measure(self, state: TrainState, done: StepDone) -> None:
        model = state.model
        here = self._derived.at(done.step - 1)
        executor = model.executor(here.accumulation)
        own = RankFigures(
            {key: (volume.calls, volume.bytes) for key, volume in done.sent.items()},
            done.result.held,
            executor.peak_held_together,
        )
        first = done.step == self._first and not self._measured_first
        if first and executor.record and model.mesh.rank in model.mesh.layout.ranks(0, "pp"):
            own.timeline = _since_epoch(executor.timeline)
        self._measured_first |= first
        measured: list[RankFigures] = model.mesh.group("world").gather_objects(own)
        if not model.mesh.is_main:
            return
        if here.accumulation not in self._predicted:
            ranks = range(model.mesh.layout.world_size)
            self._predicted[here.accumulation] = [predict_rank(here, rank) for rank in ranks]
        predicted = self._predicted[here.accumulation]
        if any(figures.timeline for figures in measured):
            self._record_pipeline(here, done.step, measured, executor.program)
        for own, formula in zip(measured, predicted, strict=True):
            own.memory = {name: size for name, size in own.memory.items() if name in formula.memory}
        pipeline = len(executor.program) > 1
        self._log.write(*figure_records(done.step, measured, "measured", pipeline=pipeline))
        self._log.write(*figure_records(done.step, predicted, "predicted", pipeline=pipeline))
        self.latest = compact(done.step, measured, predicted, self._bubble)

    def _record_pipeline(self, here: Derived, step: int, measured: list[RankFigures], program: Program) -> None:
        timeline = Timeline(tuple(tuple(figures.timeline) for figures in measured if figures.timeline))
        self._bubble = bubbles(here, timeline, program)
        for name, value in self._bubble.items():
            if value is None:
                continue
            tags: dict[str, str | int] = {} if name == "measured" else {"formula": name}
            kind: Kind = "measured" if name == "measured" else "predicted"
            self._log.write(Record(step, "pipeline/bubble", value, "", kind, tags))
        self._log.event(step, "pipeline/timeline", json.dumps(timeline_value(timeline), separators=(",", ":")))
        path = self._run_dir / TRACE
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(chrome_trace(timeline.ranks)))
        except OSError as error:
            self._log.event(step, "warning", f"{path}: cannot be written ({error.strerror})")


def predict_rank(derived: Derived, rank: int) -> RankFigures:
    """What the formulas say of one rank."""
    config, precision = derived.config, derived.precision
    parallel, layout, rows = config.parallel, Layout.of(config.parallel), config.rank_rows
    micro_batches = [min(derived.micro_batch, rows - start) for start in range(0, rows, derived.micro_batch)]
    itemsize = precision.parameter_dtype.itemsize
    data, state = stored_memory(config, rank, itemsize=itemsize, micro_batches=len(micro_batches))
    memory = {"parameters": data.parameters, "gradients": data.gradients, "optimizer": state}
    if parallel.pp == 1 and len(micro_batches) > 1 and parallel.accumulate_reduce == "last":
        memory["gradients_accumulating"] = data.accumulating
    product = precision.autocast_dtype
    sent = step_traffic(
        config, rank, micro_batches, itemsize, product_itemsize=None if product is None else product.itemsize
    )
    place = layout.coordinates(rank).pp
    held = peak_formula(parallel.pp_schedule, parallel.pp, len(micro_batches), parallel.pp_virtual, rank=place)
    return RankFigures({key: (volume.calls, volume.bytes) for key, volume in sent.items()}, memory, held)


def bubbles(derived: Derived, timeline: Timeline, program: Program) -> dict[str, float | None]:
    """The bubble fraction: measured; `simple`, (p - 1) / (m + p - 1); `schedule`, its own formula for equal stages with
    a backward pass in two equal halves; `simulated`, from this step's own durations. None where there is no formula."""
    parallel, m = derived.config.parallel, derived.accumulation
    return {
        "measured": timeline.bubble_fraction,
        "simple": (parallel.pp - 1) / (m + parallel.pp - 1),
        "schedule": bubble_formula(parallel.pp_schedule, parallel.pp, m, parallel.pp_virtual),
        "simulated": simulate(program, measured_costs(timeline, len(stage_ranks(program)))).bubble_fraction,
    }


def measured_costs(timeline: Timeline, n_stages: int) -> Costs:
    """Median durations by stage; a backward pass that was never cut in two counts as one half."""
    durations: dict[tuple[str, int], list[float]] = defaultdict(list)
    for rank in timeline.ranks:
        for action, start, end in rank:
            durations[action.kind, action.stage].append(end - start)

    def of(kind: str, stage: int) -> float | None:
        return statistics.median(durations[kind, stage]) if (kind, stage) in durations else None

    weights = [of("backward_weight", stage) or 0.0 for stage in range(n_stages)]
    inputs = [of("backward_input", stage) or of("backward", stage) or 0.0 for stage in range(n_stages)]
    return Costs([of("forward", stage) or 0.0 for stage in range(n_stages)], inputs, weights)


def figure_records(step: int, ranks: list[RankFigures], kind: Kind, *, pipeline: bool) -> list[Record]:
    """The records of all ranks at one step."""
    records = []
    for rank, figures in enumerate(ranks):
        for (axis, collective), (calls, size) in sorted(figures.sent.items()):
            tags: dict[str, str | int] = {"rank": rank, "axis": axis, "kind": collective}
            records.append(Record(step, "collectives/calls", float(calls), "", kind, tags))
            records.append(Record(step, "collectives/bytes", float(size), "bytes", kind, tags))
        for name in MEMORY:
            if name in figures.memory:
                size = float(figures.memory[name])
                records.append(Record(step, f"rank_memory/{name}", size, "bytes", kind, {"rank": rank}))
        if pipeline:
            records.append(Record(step, "pipeline/held", float(figures.held), "", kind, {"rank": rank}))
    return records


def compact(
    step: int, measured: list[RankFigures], predicted: list[RankFigures], bubble: dict[str, float | None] | None
) -> dict[str, Any]:
    """The `parallel` object of `--json`."""
    collectives, memory, held = [], [], []
    for rank, (own, formula) in enumerate(zip(measured, predicted, strict=True)):
        for key in sorted({*own.sent, *formula.sent}):
            calls, size = own.sent.get(key, (0, 0.0))
            predicted_calls, predicted_size = formula.sent.get(key, (0, 0.0))
            collectives.append(
                {
                    "rank": rank,
                    "axis": key[0],
                    "kind": key[1],
                    "calls": calls,
                    "bytes": size,
                    "predicted_calls": predicted_calls,
                    "predicted_bytes": predicted_size,
                }
            )
        predictions = {f"predicted_{name}": size for name, size in formula.memory.items()}
        memory.append({"rank": rank, **own.memory, **predictions})
        held.append({"rank": rank, "micro_batches": own.held, "predicted_micro_batches": formula.held})
    return {"step": step, "collectives": collectives, "memory": memory, "held": held, "bubble": bubble}


def timeline_value(timeline: Timeline) -> dict[str, Any]:
    """For the event: by rank, rows of [kind, stage, micro-batch, start, duration], times in whole microseconds."""
    origin = min(timed.start for rank in timeline.ranks for timed in rank)
    return {
        "unit": "microseconds",
        "ranks": [
            [[*action, round((start - origin) * 1e6), round((end - start) * 1e6)] for action, start, end in rank]
            for rank in timeline.ranks
        ],
    }


def _since_epoch(timeline: list[Timed]) -> list[Timed]:
    """In the one clock that machines share, as well as theirs are set."""
    shift = time.time() - time.perf_counter()
    return [Timed(Action(*action), start + shift, end + shift) for action, start, end in timeline]
