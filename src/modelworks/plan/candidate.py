"""One candidate and what is predicted for it; and the same for thousands at once.

prediction = evaluate(candidate)            everything, simulated on the schedule that the trainer runs, with reasons
columns = work_of(model, machine, ...)      one model, arrays of degrees: `step_time` and `memory` take it as it is
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from modelworks.config import ModelConfig, ParallelConfig, UserError
from modelworks.hardware import AttentionKernel, Device
from modelworks.layout import V_SHAPED, Layout
from modelworks.layout.pipeline import Costs, Timeline
from modelworks.plan.columns import Shape, Split
from modelworks.plan.compute import Work, model_flops
from modelworks.plan.constants import CONSTANTS, Constants
from modelworks.plan.held import held_over_time
from modelworks.plan.machine import Machine, Numerics
from modelworks.plan.optimizer_bytes import state_bytes
from modelworks.plan.pipeline import Pipelined, Sends, pipelined, seconds_of_step, simulated, stage_costs
from modelworks.plan.rank_bytes import (
    activations_over_time,
    bytes_by_rank,
    host_bytes,
    ranks_of,
    stages_of_ranks,
    stored_by_rank,
)
from modelworks.plan.software import MODELWORKS, Software
from modelworks.plan.step_time import StepTime, layer_costs, step_time
from modelworks.plan.stored import Stored, stages

MOST_COMPUTATIONS = 2**18  # of a timeline that is kept


@dataclass(frozen=True)
class Candidate:
    """A run on paper: the config's own keys, and the devices that it would run on.

    micro_batch: rows on one rank. global_batch: rows of a step. precision: as in the config, or fp8.
    """

    model: ModelConfig
    parallel: ParallelConfig
    device: Device
    micro_batch: int
    global_batch: int
    seq_len: int
    precision: str = "bf16"
    recompute: str = "none"
    software: Software = MODELWORKS
    optimizer: str = "adamw"

    @property
    def n_devices(self) -> int:
        return Layout.of(self.parallel).world_size


@dataclass(frozen=True)
class Prediction:
    """Seconds and bytes. parts: of the step, by cause. bytes: of the fullest rank, by what they hold.

    by_stage: stored bytes of each rank along the pipeline; bytes_by_stage: all that it holds, like `bytes`. bubble:
    part of the step in which the mean rank waits in the pipeline. timeline: None without a pipeline, and where it would
    have more than `MOST_COMPUTATIONS`. activations_over_time: beside a timeline, for each rank (seconds, bytes of
    activations that it keeps from then on). host_memory: bytes in one host's memory, 0 without offload. model_flops: of
    the whole step, causal attention, nothing recomputed. mfu: those over the datasheet's peak of the products' dtype.
    reasons: sentences.
    """

    step_seconds: float
    parts: dict[str, float]
    memory: float
    bytes: dict[str, float]
    memory_limit: float
    by_stage: list[Stored]
    bytes_by_stage: list[dict[str, float]]
    bubble: float
    timeline: Timeline | None
    activations_over_time: list[list[tuple[float, float]]] | None
    host_memory: float
    tokens_per_second: float
    model_flops: float
    model_flops_full_attention: float
    mfu: float
    reasons: list[str]

    @property
    def fits(self) -> bool:
        return self.memory <= self.memory_limit


def work_of(
    model: ModelConfig,
    split: Split,
    device: Device,
    *,
    precision: str = "bf16",
    software: Software = MODELWORKS,
    constants: Constants = CONSTANTS,
    optimizer: str = "adamw",
) -> Work:
    """What the formulas take. split: one row or columns of them. Raises UserError for an unknown precision or
    optimiser."""
    kernel: AttentionKernel = "fused" if float(np.max(software.flash)) >= 2.0 else "flash"
    machine = Machine.of(device, precision, attention=kernel, ranks=int(np.max(split.world)))
    if machine.measured is not None:
        constants = machine.measured.constants(constants)
    numerics = Numerics.of(precision)
    if optimizer != "adamw":  # master weights are what the numerics have beside its two moments
        masters = numerics.state - state_bytes("adamw", model).mean
        numerics = numerics.with_(state=masters + state_bytes(optimizer, model).mean)
    return Work(Shape.of(model), split, machine, numerics, software, constants)


def evaluate(
    candidate: Candidate, constants: Constants = CONSTANTS, *, headroom: float = 0.0, timeline: bool = True
) -> Prediction:
    """The full prediction. headroom: the part of the memory that must stay free. timeline: whether the whole simulated
    step is to be kept, or only what it comes to.

    Raises UserError where the batch does not divide, or stages outnumber layers.
    """
    model, parallel = candidate.model, candidate.parallel
    work = candidate_work(candidate, constants)
    split = work.split
    _check(candidate, split)
    placed = stages(model, parallel, candidate.seq_len)
    ranks = ranks_of(parallel, placed)
    times = step_time(work, stages_of_ranks(ranks))
    parts = {field.name: float(getattr(times, field.name)) for field in fields(StepTime)}
    pipeline = None
    if parallel.pp > 1:
        pipeline = _Pipeline.of(candidate, work, placed)
        # what the closed form of the pipeline said, replaced by what the schedule does, without sends and with them
        formula = sum(parts.values()) - sum(parts[name] for name in ("sends", "data", "optimizer", "overhead"))
        parts["idle"] += pipeline.seconds_without_sends - formula
        parts["sends"] = pipeline.outcome.makespan - pipeline.seconds_without_sends
    total = sum(parts.values())
    numerics = Numerics.of(candidate.precision)
    by_stage = stored_by_rank(
        model,
        parallel,
        ranks,
        numerics=numerics,
        micro_batches=int(split.n_micro_batches),
        optimizer=candidate.optimizer,
    )
    held = pipeline.outcome.held if pipeline else [float(model.n_layers)]
    by_rank = bytes_by_rank(model, work, ranks, by_stage, held, float(parallel.bucket_size))
    size = max(by_rank, key=lambda each: sum(each.values()))
    tokens = candidate.global_batch * candidate.seq_len
    causal, full = (float(flops) * tokens for flops in model_flops(work))
    drawn = pipeline.timeline() if pipeline and timeline and pipeline.computations <= MOST_COMPUTATIONS else None
    curves = held_over_time(drawn, pipeline.layers) if pipeline and drawn else None
    needed, limit = sum(size.values()), float(work.machine.memory) * (1.0 - headroom)
    return Prediction(
        step_seconds=total,
        parts=parts,
        memory=needed,
        bytes=size,
        memory_limit=limit,
        by_stage=by_stage,
        bytes_by_stage=by_rank,
        bubble=pipeline.outcome.bubble if pipeline else 0.0,
        timeline=drawn,
        activations_over_time=activations_over_time(model, work, ranks, by_stage, curves) if curves else None,
        host_memory=host_bytes(model, parallel, work, ranks, held, numerics=numerics, optimizer=candidate.optimizer),
        tokens_per_second=tokens / total,
        model_flops=causal,
        model_flops_full_attention=full,
        mfu=causal / (total * candidate.n_devices * float(work.machine.peak)),
        reasons=_reasons(parts, total, size, needed, limit),
    )


def candidate_work(candidate: Candidate, constants: Constants) -> Work:
    """What the formulas take, for one candidate."""
    return work_of(
        candidate.model,
        split_of(candidate),
        candidate.device,
        precision=candidate.precision,
        software=candidate.software,
        constants=constants,
        optimizer=candidate.optimizer,
    )


def split_of(candidate: Candidate) -> Split:
    """Its degrees and sizes, as the formulas take them."""
    return Split.of(
        candidate.parallel,
        micro_batch=candidate.micro_batch,
        global_batch=candidate.global_batch,
        seq_len=candidate.seq_len,
        recompute=candidate.recompute,
    )


@dataclass(frozen=True)
class _Pipeline:
    """The pipeline on the trainer's schedule: what `simulated` and `pipelined` take."""

    schedule: str
    costs: Costs
    computing: Costs
    layers: tuple[int, ...]
    pp: int
    n_micro_batches: int
    virtual: int

    @classmethod
    def of(cls, candidate: Candidate, work: Work, placed: list[list[int]]) -> _Pipeline:
        parallel = candidate.parallel
        layers = tuple(map(len, placed))
        costs, computing = costs_of_stages(work, layers)
        virtual = 1 if parallel.pp_schedule in V_SHAPED else parallel.pp_virtual
        micro_batches = int(work.split.n_micro_batches)
        return cls(parallel.pp_schedule, costs, computing, layers, parallel.pp, micro_batches, virtual)

    @property
    def seconds_without_sends(self) -> float:
        return seconds_of_step(self.schedule, self.computing, self.pp, self.n_micro_batches, self.virtual)

    @property
    def computations(self) -> int:
        """Of all ranks, a backward pass in two halves counting two."""
        return 3 * len(self.layers) * self.n_micro_batches

    @property
    def outcome(self) -> Pipelined:
        return pipelined(self.schedule, self.costs, self.layers, self.pp, self.n_micro_batches, self.virtual)

    def timeline(self) -> Timeline:
        return simulated(self.schedule, self.costs, self.pp, self.n_micro_batches, self.virtual)


def costs_of_stages(work: Work, counts: Sequence[int]) -> tuple[Costs, Costs]:
    """For one micro-batch of each stage, which holds so many layers; the last also the head: with sends, and without.
    work: of one row."""
    layer, head, sends = layer_costs(work)
    passes = [float(each) for each in layer], [float(each) for each in head]
    sent = Sends(*map(float, sends))
    return stage_costs(*passes, sent, counts), stage_costs(*passes, Sends(0.0, 0.0), counts)


def _check(candidate: Candidate, split: Split) -> None:
    rows = int(split.dp) * candidate.micro_batch
    if candidate.global_batch % rows:
        raise UserError(
            f"global_batch: got {candidate.global_batch}, expected a multiple of {rows}: "
            "dp_replicate * dp_shard * micro_batch"
        )


def _reasons(parts: dict[str, float], total: float, size: dict[str, float], needed: float, limit: float) -> list[str]:
    exchanges = ("tensor", "context", "experts", "gather", "sends", "data")
    shares = {
        "computing": sum(parts[name] for name in ("linear", "attention", "elementwise", "head", "optimizer")),
        "recomputing": parts["recompute"],
        "waiting in the pipeline": parts["idle"],
        "exchanging": sum(parts[name] for name in exchanges),
    }
    order = sorted(shares.items(), key=lambda item: -item[1])
    reasons = [
        "of a step: " + ", ".join(f"{value / total:.0%} {name}" for name, value in order if value > 0.005 * total)
    ]
    largest = max(exchanges, key=lambda name: parts[name])
    if parts[largest] > 0.05 * total:
        reasons.append(
            f"the costliest exchange is {largest}: {parts[largest] / total:.0%} of the step that nothing hides"
        )
    most = sorted(size.items(), key=lambda item: -item[1])[:3]
    held = ", ".join(f"{name} {value / 1e9:.1f} GB" for name, value in most)
    verdict = "fits" if needed <= limit else f"does not fit, by {(needed - limit) / 1e9:.1f} GB"
    reasons.append(f"{needed / 1e9:.1f} of {limit / 1e9:.0f} GB on the fullest rank: {verdict}; most of it {held}")
    return reasons
