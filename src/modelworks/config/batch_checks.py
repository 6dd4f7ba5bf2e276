"""What must hold between the batch, its rate, and the other keys. The rules of `modelworks.config.checks` for these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from modelworks.config.errors import Problem

if TYPE_CHECKING:
    from modelworks.config.quantities import Duration
    from modelworks.config.run import OptimizerConfig, ScheduleConfig, TrainConfig


def ramp_problems(train: TrainConfig) -> Iterator[Problem]:
    """Of `train.batch_ramp`: it must rise to the global batch, and each stage end after the one before it."""
    ramp, full = train.batch_ramp, train.global_batch
    if ramp is None:
        return
    if not isinstance(ramp, list):
        if ramp.start >= full:
            yield Problem("train.batch_ramp.start", ramp.start, f"less than train.global_batch ({full}), where it ends")
        elif (full - ramp.start) % ramp.increment:
            expected = f"a divisor of {full - ramp.start}, which is train.global_batch ({full}) less the start"
            yield Problem("train.batch_ramp.increment", ramp.increment, expected)
        yield from _length("train.batch_ramp.over", ramp.over)
        return
    if not ramp:
        yield Problem("train.batch_ramp", ramp, "at least one stage; null for steps of one size")
    for index, stage in enumerate(ramp):
        here = f"train.batch_ramp.{index}"
        above = ramp[index - 1].batch if index else 0
        if not above < stage.batch < full:
            expected = f"more than {above} and less than train.global_batch ({full}): a ramp rises to it"
            yield Problem(f"{here}.batch", stage.batch, expected)
        yield from _length(f"{here}.until", stage.until)
        before = ramp[index - 1].until if index else None
        if before and before.unit == stage.until.unit and stage.until.value <= before.value:
            yield Problem(f"{here}.until", str(stage.until), f"more than {before}: counted from the run's beginning")


def _length(key: str, length: Duration) -> Iterator[Problem]:
    if length.unit not in ("steps", "tokens") or not length.value:
        yield Problem(key, str(length), "steps or tokens above 0, such as 500 steps or 250M tokens")


def scaling_problems(
    train: TrainConfig, optimizer: OptimizerConfig, schedule: ScheduleConfig | None
) -> Iterator[Problem]:
    if optimizer.lr_scaling == "none":
        return
    base = optimizer.base_batch
    if base is None:
        expected = f"the global batch, in sequences, that optimizer.lr is for (lr_scaling is {optimizer.lr_scaling})"
        yield Problem("optimizer.base_batch", None, expected)
    elif schedule and schedule.warmup_from == "base" and train.batch_ramp:
        expected = "zero: with train.batch_ramp the rate follows each stage's batch, and so rises from the base anyhow"
        yield Problem("schedule.warmup_from", "base", expected)
    elif schedule and schedule.warmup_from == "base" and base > train.global_batch:
        expected = f"zero: the rate of {base} sequences is above that of {train.global_batch}, and no warmup falls"
        yield Problem("schedule.warmup_from", "base", expected)


def unused_by_scaling(optimizer: OptimizerConfig) -> Iterator[tuple[str, str]]:
    if optimizer.lr_scaling == "none":
        yield "optimizer.base_batch", "optimizer.lr_scaling is none, so the rate does not follow the batch"
        yield "schedule.warmup_from", "optimizer.lr_scaling is none, so the rate is that of the base"
