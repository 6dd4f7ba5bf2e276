"""What must hold between the batch, its rate, and the other keys. The rules of `modelworks.config.checks` for these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from modelworks.config.errors import Problem

if TYPE_CHECKING:
    from modelworks.config.run import OptimizerConfig, ScheduleConfig, TrainConfig


def scaling_problems(
    train: TrainConfig, optimizer: OptimizerConfig, schedule: ScheduleConfig | None
) -> Iterator[Problem]:
    if optimizer.lr_scaling == "none":
        return
    base = optimizer.base_batch
    if base is None:
        expected = f"the global batch, in sequences, that optimizer.lr is for (lr_scaling is {optimizer.lr_scaling})"
        yield Problem("optimizer.base_batch", None, expected)
    elif schedule and schedule.warmup_from == "base" and base > train.global_batch:
        expected = f"zero: the rate of {base} sequences is above that of {train.global_batch}, and no warmup falls"
        yield Problem("schedule.warmup_from", "base", expected)


def unused_by_scaling(optimizer: OptimizerConfig) -> Iterator[tuple[str, str]]:
    if optimizer.lr_scaling == "none":
        yield "optimizer.base_batch", "optimizer.lr_scaling is none, so the rate does not follow the batch"
        yield "schedule.warmup_from", "optimizer.lr_scaling is none, so the rate is that of the base"
