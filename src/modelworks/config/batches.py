"""How many sequences each step has: a pure function of the number of steps done.

A ramp begins with small batches and ends at `train.global_batch`. It is written in one of two ways:

    batch_ramp: {start: 32, increment: 32, over: 12B tokens}     even stages, as Megatron's --rampup-batch-size and
                                                                 GPT-3's ramp (Brown et al. 2020, 2005.14165)
    batch_ramp: [{batch: 512, until: 250M tokens}, {batch: 1024, until: 2.8T tokens}]    any stages, as Llama 3's

Both become stages. A stage lasts until so much is done, counted from the start of the run: a step belongs to the first
stage whose end is not reached yet, so that the step which crosses an end is the stage's last. Samples are numbered
through, whatever the batch: step s has the samples `first_sample(s)` to `first_sample(s + 1) - 1`. Neither the layout
nor where a run was resumed enters.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from modelworks.config.quantities import Duration

if TYPE_CHECKING:
    from modelworks.config.run import TrainConfig


@dataclass(frozen=True)
class Stage:
    """Steps of one size: from step `first_step` (counted from 0), which begins with sample `first_sample`."""

    first_step: int
    first_sample: int
    rows: int


@dataclass(frozen=True)
class BatchSizes:
    """stages: in their order, without empty ones; the last has no end."""

    stages: tuple[Stage, ...]

    @classmethod
    def constant(cls, rows: int) -> BatchSizes:
        return cls((Stage(0, 0, rows),))

    @classmethod
    def of(cls, train: TrainConfig, seq_len: int) -> BatchSizes:
        """Of a configuration whose ramp is valid (`ramp_stages`)."""
        sizes = cls.constant(train.global_batch)
        for rows, until in ramp_stages(train):
            sizes = sizes._with(rows, until, seq_len, train.global_batch)
        return sizes

    def rows(self, step: int) -> int:
        """Sequences of the step that follows `step` steps."""
        return self._stage(step).rows

    def first_sample(self, step: int) -> int:
        """Sequences of the first `step` steps together."""
        stage = self._stage(step)
        return stage.first_sample + (step - stage.first_step) * stage.rows

    def steps_for(self, samples: int) -> int:
        """The fewest steps that have so many sequences."""
        stage = self.stages[max(0, bisect_right(self.stages, samples - 1, key=lambda each: each.first_sample) - 1)]
        return stage.first_step + -(-(samples - stage.first_sample) // stage.rows)

    def until(self, step: int) -> tuple[Stage, ...]:
        """The stages of the first `step` steps: two runs that agree here have seen the same batches."""
        return tuple(stage for stage in self.stages if stage.first_step < step)

    @property
    def ramps(self) -> bool:
        return len(self.stages) > 1

    @property
    def sizes(self) -> list[int]:
        """Sequences of a step in each stage."""
        return [stage.rows for stage in self.stages]

    @cached_property
    def _starts(self) -> list[int]:
        return [stage.first_step for stage in self.stages]

    def _stage(self, step: int) -> Stage:
        return self.stages[bisect_right(self._starts, step) - 1]

    def _with(self, rows: int, until: Duration, seq_len: int, last: int) -> BatchSizes:
        """The last stage, which has no end, made one of `rows` that ends, and one of `last` behind it."""
        *before, open_end = self.stages
        done = int(until.value)
        if until.unit == "steps":
            steps = done - open_end.first_step
        else:
            steps = -(-(-(-done // seq_len) - open_end.first_sample) // rows)
        if steps <= 0:  # what came before has passed its end already
            return self
        here = Stage(open_end.first_step, open_end.first_sample, rows)
        behind = Stage(here.first_step + steps, here.first_sample + steps * rows, last)
        return BatchSizes((*before, here, behind))


def ramp_stages(train: TrainConfig) -> Iterator[tuple[int, Duration]]:
    """(sequences of a step, until when) of each stage before the full batch, in the order written."""
    ramp = train.batch_ramp
    if ramp is None:
        return
    if isinstance(ramp, Sequence):
        yield from ((stage.batch, stage.until) for stage in ramp)
        return
    count, total = (train.global_batch - ramp.start) // ramp.increment, int(ramp.over.value)
    for index in range(count):
        yield ramp.start + index * ramp.increment, Duration(-(-(index + 1) * total // count), ramp.over.unit)
