"""Durations of a configuration in optimiser steps.

Under a batch ramp steps are not of one size. Lengths from the start of the run (its duration, the warmup) and to its
end (the decay) then count the samples that the steps really have. Intervals are so many steps throughout: those written
in tokens or epochs are converted at the full batch, and come after less data while the ramp lasts.
"""

from __future__ import annotations

import math
from functools import cached_property

from modelworks.config import BatchSizes, Duration, RunConfig, UserError, format_count


class StepCounts:
    """samples_per_epoch: None while the data is unknown; then epochs are a UserError. tokens: of a step of the full
    batch, padding included."""

    def __init__(self, config: RunConfig, samples_per_epoch: int | None) -> None:
        self.batches = config.batches
        self.tokens = config.train.global_batch * config.data.seq_len
        self._duration, self._seq_len = config.train.duration, config.data.seq_len
        self._rows = config.train.global_batch
        self._per_epoch = samples_per_epoch

    @cached_property
    def total(self) -> int:
        """Of the whole run."""
        return self.first("train.duration", self._duration)

    @property
    def of_ramp(self) -> str:
        return ", once the batch ramp is over" if self.batches.ramps else ""

    def first(self, key: str, length: Duration) -> int:
        """The steps of a length that begins with the run."""
        if length.unit == "steps" or not self.batches.ramps:
            return self._plain(key, length)
        return self.batches.steps_for(self._samples(key, length))

    def last(self, key: str, length: Duration) -> int:
        """The steps of a length that ends with the run."""
        if length.unit == "steps" or not self.batches.ramps:
            return self._plain(key, length)
        before = self.batches.first_sample(self.total) - self._samples(key, length)
        return self.total - (self.batches.steps_for(max(0, before) + 1) - 1)  # the step that it begins in is part of it

    def every(self, key: str, interval: Duration) -> int:
        """The steps of an interval, at least one."""
        return max(1, self._plain(key, interval))

    def _plain(self, key: str, length: Duration) -> int:
        """As if all steps were of the full batch."""
        self._check(key, length)
        return length.steps(
            tokens_per_step=self.tokens,
            steps_per_epoch=(self._per_epoch or 0) / self._rows,
            total_steps=self.total if length.unit == "percent" else None,
        )

    def _samples(self, key: str, length: Duration) -> int:
        self._check(key, length)
        if length.unit == "epochs":
            return math.ceil(length.value * (self._per_epoch or 0) - 1e-6)
        if length.unit == "percent":
            return round(self.batches.first_sample(self.total) * length.value / 100)
        return math.ceil(length.value / self._seq_len)

    def _check(self, key: str, length: Duration) -> None:
        if length.unit == "epochs" and self._per_epoch is None:
            raise UserError(
                f"{key}: how many steps `{length}` takes is known only with the data, which is not read here; "
                "write it in steps or tokens"
            )


def describe_ramp(batches: BatchSizes, seq_len: int, total: int) -> tuple[str, str]:
    """(its sizes, when each ends) in words."""
    *ramp, full = batches.stages
    sizes = f"{ramp[0].rows} to {full.rows} sequences"
    if full.first_step >= total:
        return sizes, f"train.batch_ramp; the run ends before it does, with steps of {batches.rows(max(0, total - 1))}"
    return sizes, (
        f"train.batch_ramp: {len(ramp)} stages in the first {full.first_step:,} steps, "
        f"{format_count(full.first_sample * seq_len)} tokens; the schedule of the rate goes by tokens"
    )
