"""What the configuration leaves open, decided from the machine and the data, each with its reason.

`derive` turns `auto` into values and durations into optimiser steps. The resolved configuration that it returns
re-runs the run: it has no `auto` left. Durations stay as they were written, and their length in steps is a decision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import psutil
import torch

from modelworks.config import (
    BatchSizes,
    Interval,
    OptimizerConfig,
    RunConfig,
    UserError,
    assumed_seconds,
    best_interval,
    count_parameters,
    describe_seconds,
    failure_rate,
    format_bytes,
    scale_factor,
    show_value,
)
from modelworks.config.optimizers import HABITS
from modelworks.hardware import Machine, choose_device, choose_precision
from modelworks.layout import Layout
from modelworks.optim import Schedule, build_schedule
from modelworks.train.layout_decisions import layout_decisions
from modelworks.train.memory import MemoryPrediction
from modelworks.train.mup_decisions import mup_decisions
from modelworks.train.precision import PRECISIONS, Precision
from modelworks.train.rank_memory import predict_rank_memory, saved_bytes, staged_bytes, written_bytes
from modelworks.train.step_counts import StepCounts, describe_ramp

# Tokens of one micro-batch: enough rows for full-speed products. Beyond it activations only leave the caches sooner.
CPU_TOKENS = 4096
GPU_TOKENS = 32768
# Share of the free memory that a run may plan to use; the rest is for the allocator, the data and the system.
MEMORY_SHARE = 0.7


@dataclass(frozen=True)
class Decision:
    """One value that was not written, and why it is what it is."""

    key: str
    value: str
    reason: str


@dataclass(frozen=True)
class Derived:
    """Everything the loop needs to know. Lengths and intervals are in optimiser steps.

    save_interval: where `checkpoint.every` is auto, until a save has been measured; `checkpoint_every` is then None.
    staging: bytes of host memory that the fullest rank copies into when it saves.
    """

    config: RunConfig
    device: torch.device
    precision: Precision
    micro_batch: int
    accumulation: int
    total_steps: int
    warmup_steps: int
    decay_steps: int
    evaluate_every: int
    tasks_every: int | None
    checkpoint_every: int | None
    save_interval: Interval | None
    keep_every: int | None
    memory: MemoryPrediction
    staging: int
    decisions: tuple[Decision, ...]

    @cached_property
    def batches(self) -> BatchSizes:
        """How many sequences each step has."""
        return self.config.batches

    @cached_property
    def schedule(self) -> Schedule:
        """The rate of each step. Under a batch ramp it goes by samples, and follows the stage's batch where
        `optimizer.lr_scaling` says how."""
        config, total = self.config, self.total_steps
        done = self.batches.first_sample if self.batches.ramps else int
        rate = build_schedule(
            config.schedule,
            peak=config.peak_rate.lr,
            total_steps=done(total),
            warmup_steps=done(self.warmup_steps),
            decay_steps=done(total) - done(total - self.decay_steps),
            start=config.optimizer.lr if config.schedule.warmup_from == "base" else 0.0,
            done=done,
        )
        rule, full = config.optimizer.lr_scaling, config.train.global_batch
        if not self.batches.ramps or rule == "none":
            return rate
        return lambda step: rate(step) * scale_factor(rule, self.batches.rows(step), full)

    def at(self, step: int) -> Derived:
        """For the step that follows `step` steps: its configuration has the batch of its stage, and no ramp."""
        return self._of_batch(self.batches.rows(step))

    def _of_batch(self, rows: int) -> Derived:
        if rows == self.config.train.global_batch:
            return self
        if rows not in self._stages:
            config = self.config.with_batch(rows)
            accumulation = -(-config.rank_rows // self.micro_batch)
            self._stages[rows] = replace(self, config=config, accumulation=accumulation)
        return self._stages[rows]

    @cached_property
    def _stages(self) -> dict[int, Derived]:
        return {}


def derive(
    config: RunConfig,
    machine: Machine,
    *,
    samples_per_epoch: int | None = None,
    earlier: RunConfig | None = None,
    ranks_here: int | None = None,
) -> Derived:
    """Decide all that is open. samples_per_epoch: None while the data is unknown; then epochs are an error.

    earlier: the resolved configuration of the run that is resumed, whose choices stand wherever this one says `auto`:
    a run must not change its precision because it was resumed on a busier machine. ranks_here: of a split run, those
    on this machine; None: all of them.
    """
    ranks_here = ranks_here or Layout.of(config.parallel).world_size
    decisions: list[Decision] = []

    def decide(key: str, value: object, reason: str) -> None:
        decisions.append(Decision(key, str(value), reason))

    resolved = _keep_earlier(config, earlier)
    train = resolved.train
    if train.device == "auto":
        choice = choose_device(machine.facts)
        decide("train.device", choice.value, choice.reason)
        train = train.model_copy(update={"device": choice.value})
    if train.precision == "auto":
        choice = choose_precision(machine, train.device)
        decide("train.precision", choice.value, choice.reason)
        train = train.model_copy(update={"precision": choice.value})
    if train.micro_batch == "auto":
        rows, reason = _choose_micro_batch(resolved.model_copy(update={"train": train}), ranks_here)
        decide("train.micro_batch", rows, reason)
        train = train.model_copy(update={"micro_batch": rows})
    micro_batch = int(train.micro_batch)
    rows = config.rank_rows
    accumulation = -(-rows // micro_batch)
    of_rank = "" if rows == train.global_batch else " of each data-parallel rank"
    decide("accumulation", accumulation, f"{rows} sequences{of_rank} in micro-batches of {micro_batch}")
    split = resolved.model_copy(update={"train": train})
    for key, value, reason in layout_decisions(split, machine.facts, micro_batch, ranks_here):
        decide(key, value, reason)

    for key, value, reason in (*_own_values(config.optimizer), *mup_decisions(config)):
        decide(key, value, reason)
    if config.optimizer.lr_scaling != "none":
        rate = config.peak_rate
        decide("peak learning rate", f"{rate.lr:.4g}", rate.reason)
    steps = StepCounts(config, samples_per_epoch)
    total = steps.total
    decide("total steps", total, f"{train.duration} at {steps.tokens:,} tokens a step{steps.of_ramp}")
    if steps.batches.ramps:
        decide("batch ramp", *describe_ramp(steps.batches, config.data.seq_len, total))
    warmup = steps.first("schedule.warmup", config.schedule.warmup)
    decide("warmup steps", warmup, f"schedule.warmup is {config.schedule.warmup}")
    decay = steps.last("schedule.decay", config.schedule.decay) if config.schedule.name == "wsd" else 0
    if decay:
        decide("decay steps", decay, f"schedule.decay is {config.schedule.decay}")
    evaluate_every = steps.every("evaluate.every", config.evaluate.every)
    decide("evaluation every", f"{evaluate_every} steps", f"evaluate.every is {config.evaluate.every}, and at the end")
    checkpoint = resolved.checkpoint
    staging = staged_bytes(split, precision=train.precision)
    if staging:
        copied, wanted = "what it saves", written_bytes(split, precision=train.precision)
        if wanted > staging:
            copied = f"of the {format_bytes(wanted)} that it saves, what fits into checkpoint.staging"
        copied += " is copied there, and written while training goes on"
        if wanted > staging:
            copied += "; the rest is written before the step goes on"
        decide("checkpoint staging", format_bytes(staging), f"host memory of the fullest rank: {copied}")
    every, interval = None, None
    if checkpoint.every == "auto":
        interval = _first_interval(split, machine, staging)
        decide("checkpoint.every", describe_seconds(interval.seconds), f"at first, {interval.reason}")
    else:
        every = steps.every("checkpoint.every", checkpoint.every)
    tasks_every, keep_every = config.evaluate.tasks_every, checkpoint.keep_every
    return Derived(
        config=split,
        device=torch.device(train.device),
        precision=PRECISIONS[train.precision],
        micro_batch=micro_batch,
        accumulation=accumulation,
        total_steps=total,
        warmup_steps=warmup,
        decay_steps=decay,
        evaluate_every=evaluate_every,
        tasks_every=None if tasks_every is None else steps.every("evaluate.tasks_every", tasks_every),
        checkpoint_every=every,
        save_interval=interval,
        keep_every=None if keep_every is None else steps.every("checkpoint.keep_every", keep_every),
        memory=_predict(split, micro_batch),
        staging=staging,
        decisions=tuple(decisions),
    )


def _own_values(optimizer: OptimizerConfig) -> Iterator[tuple[str, str, str]]:
    """What was not written and is another value than AdamW's: the key, the value, whose it is."""
    for key in HABITS[optimizer.name].values:
        if key not in optimizer.model_fields_set:
            value = show_value(getattr(optimizer, key))
            yield f"optimizer.{key}", value, f"{optimizer.name}'s own: {HABITS[optimizer.name].reason}"


def _keep_earlier(config: RunConfig, earlier: RunConfig | None) -> RunConfig:
    """`config` with the earlier run's choices in place of `auto`."""
    if earlier is None:
        return config
    kept: Mapping[str, object] = {
        key: getattr(earlier.train, key)
        for key in ("device", "precision", "micro_batch")
        if getattr(config.train, key) == "auto"
        and (key != "micro_batch" or config.parallel == earlier.parallel)  # which was chosen for its layout
    }
    return config.model_copy(update={"train": config.train.model_copy(update=kept)})


def _first_interval(config: RunConfig, machine: Machine, staging: int) -> Interval:
    """Between saves, as long as none has been measured: a copy at memory's speed, a write at an assumed one."""
    settings, world_size = config.checkpoint, Layout.of(config.parallel).world_size
    size = count_parameters(config.model).total * saved_bytes(config, precision=config.train.precision)
    write = assumed_seconds(round(size))
    copied = 2 * staging / machine.memory_bandwidth  # read and written
    stall = copied if settings.async_ and (settings.staging is None or staging < settings.staging) else write
    rate = failure_rate(world_size, settings.mean_time_between_failures)
    return best_interval(stall, max(write, stall), rate, measured=False)


def _choose_micro_batch(config: RunConfig, ranks_here: int) -> tuple[int, str]:
    """The largest even share of the global batch that runs at full speed and fits; rows and the reason."""
    train, seq_len = config.train, config.data.seq_len
    parallel = config.parallel
    wanted = CPU_TOKENS if train.device == "cpu" else GPU_TOKENS
    # A pipeline needs several micro-batches to fill, at least as many as it has ranks. Every stage of a batch ramp is
    # to be cut evenly.
    shared = math.gcd(*(config.with_batch(rows).rank_rows for rows in config.batches.sizes))
    most = max(1, shared // (parallel.pp if parallel.pp > 1 else 1))
    shares = [rows for rows in range(most, 0, -1) if shared % rows == 0]
    fast = [rows for rows in shares if rows * seq_len <= wanted] or [1]
    on_device = train.device == "cuda"
    free = _free_memory(train.device) // (1 if on_device else ranks_here)  # a device is a rank's own
    staging = 0 if on_device else staged_bytes(config, precision=train.precision)
    for rows in fast:
        needed = _predict(config, rows).total + staging
        if needed <= MEMORY_SHARE * free:
            pipeline = f", in at least {parallel.pp} micro-batches that fill the pipeline" if parallel.pp > 1 else ""
            reason = f"{rows * seq_len} tokens keep the products at full speed{pipeline}; needs {format_bytes(needed)}"
            if rows < fast[0]:
                reason = f"needs {format_bytes(needed)} of the {format_bytes(free)} free, {fast[0]} rows would not fit"
            return rows, reason
    total, parameters = _predict(config, 1).total + staging, count_parameters(config.model).total
    raise UserError(
        f"this model ({parameters:,} parameters) needs about {format_bytes(total)} to train on rows of {seq_len} "
        f"tokens, and {format_bytes(free)} are free; make the model or data.seq_len smaller, set train.recompute to "
        f"`full`, or set train.micro_batch to try nevertheless"
    )


def _predict(config: RunConfig, rows: int) -> MemoryPrediction:
    return predict_rank_memory(config, precision=config.train.precision, micro_batch=rows)


def _free_memory(device: str) -> int:
    """Bytes that this process can still get."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    from modelworks.hardware import facts

    return min(int(psutil.virtual_memory().available), facts().memory)
