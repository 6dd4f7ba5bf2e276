"""Parameters, gradients and optimiser state of a rank to the byte: the very formulas that the runs are held to.

`memory` has closed forms of these for searches. Here the plans of `modelworks.layout` say what each rank holds, rows
of padding and copies included, so that a prediction and what a run allocates are the same number.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from modelworks.config import ModelConfig, ParallelConfig
from modelworks.layout import V_SHAPED, Layout, ShardSpec, memory_of_run, plan_parameters, stages_of
from modelworks.layout.pipeline import partition_layers
from modelworks.plan.machine import Numerics
from modelworks.plan.optimizer_bytes import FLOAT, optimizer_bytes


@dataclass(frozen=True)
class Stored:
    """Bytes of one rank. gradients: the most of any moment."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def stages(model: ModelConfig, parallel: ParallelConfig, seq_len: int) -> list[list[int]]:
    """The layers of each (virtual) stage, as the trainer places them. Raises UserError for too many stages."""
    if parallel.pp == 1:
        return [list(range(model.n_layers))]
    if parallel.pp_partition != "auto":
        ends = [sum(parallel.pp_partition[:stage]) for stage in range(len(parallel.pp_partition) + 1)]
        return [list(range(begin, end)) for begin, end in itertools.pairwise(ends)]
    per_rank = 2 if parallel.pp_schedule in V_SHAPED else parallel.pp_virtual
    return partition_layers(model, seq_len, parallel.pp * per_rank)


def stored(
    model: ModelConfig,
    parallel: ParallelConfig,
    rank: int,
    *,
    numerics: Numerics,
    seq_len: int,
    micro_batches: int,
    placed: list[list[int]] | None = None,
    optimizer: str = "adamw",
) -> Stored:
    """What `rank` holds while nothing is gathered. Optimiser state that is offloaded lies elsewhere: 0 here.

    numerics: with AdamW's state, whatever the optimiser: its two moments make way for what `optimizer` keeps.
    placed: what `stages` answers, where the caller has it: balancing a hundred stages takes a tenth of a second.
    """
    plans = plan_parameters(model, Layout.of(parallel), parallel, rank, placed or stages(model, parallel, seq_len))
    itemsize = int(numerics.parameter)
    data = memory_of_run(plans, model, parallel, rank, micro_batches=micro_batches, itemsize=itemsize)
    state = (
        0 if parallel.offload != "none" else sum(_state(plan.stored, numerics, optimizer) for plan in plans.values())
    )
    return Stored(data.parameters, max(data.accumulating, data.gradients), state)


def _state(part: ShardSpec, numerics: Numerics, optimizer: str) -> int:
    """Bytes of what updates one parameter: master weights, if there are any, and what the optimiser keeps."""
    if optimizer == "adamw":
        return int(numerics.state) * part.n_local
    masters = int(numerics.state) - 2 * FLOAT
    kept = optimizer_bytes(optimizer, part.shape, parameter=part.name, held=part.local_shape)
    return masters * part.n_local + kept


def held_layers(model: ModelConfig, parallel: ParallelConfig, seq_len: int) -> list[int]:
    """Layers on each rank along the pipeline."""
    placed = stages(model, parallel, seq_len)
    layout = Layout(pp=parallel.pp)
    return [sum(len(placed[stage]) for stage in stages_of(layout, parallel, rank)) for rank in range(parallel.pp)]
