"""Parameters, gradients and optimiser state of a rank to the byte: the very formulas that the runs are held to.

`memory` has closed forms of these for searches. Here the plans of `modelworks.layout` say what each rank holds, rows
of padding and copies included, so that a prediction and what a run allocates are the same number.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from modelworks.config import ModelConfig, ParallelConfig
from modelworks.layout import V_SHAPED, Layout, ParameterPlan, ShardSpec, memory_of_run, plan_parameters
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
    copies: Sequence[int] | None = None,
) -> Stored:
    """What `rank` holds while nothing is gathered. Optimiser state that is offloaded lies elsewhere: 0 here.

    numerics: with AdamW's state, whatever the optimiser: its two moments make way for what `optimizer` keeps.
    placed: what `stages` answers, where the caller has it. copies: of each layer of the model, where one stands for
    several that are alike.
    """
    plans = plan_parameters(model, Layout.of(parallel), parallel, rank, placed or stages(model, parallel, seq_len))
    parameters = accumulating = gradients = state = 0
    for count, part in _by_layer(plans, copies):
        itemsize = int(numerics.parameter)
        data = memory_of_run(part, model, parallel, rank, micro_batches=micro_batches, itemsize=itemsize)
        parameters += count * data.parameters
        accumulating += count * data.accumulating
        gradients += count * data.gradients
        state += count * sum(_state(plan.stored, numerics, optimizer) for plan in part.values())
    return Stored(parameters, max(accumulating, gradients), 0 if parallel.offload != "none" else state)


def _by_layer(
    plans: dict[str, ParameterPlan], copies: Sequence[int] | None
) -> list[tuple[int, dict[str, ParameterPlan]]]:
    """(how often they are there, plans): all at once, or those of each layer and of what lies outside the layers."""
    if copies is None:
        return [(1, plans)]
    parts: dict[int, dict[str, ParameterPlan]] = {}
    for name, plan in plans.items():
        layer = int(name.split(".", 2)[1]) if name.startswith("blocks.") else -1
        parts.setdefault(layer, {})[name] = plan
    return [(1 if layer < 0 else copies[layer], part) for layer, part in parts.items()]


def _state(part: ShardSpec, numerics: Numerics, optimizer: str) -> int:
    """Bytes of what updates one parameter: master weights, if there are any, and what the optimiser keeps."""
    if optimizer == "adamw":
        return int(numerics.state) * part.n_local
    masters = int(numerics.state) - 2 * FLOAT
    kept = optimizer_bytes(optimizer, part.shape, parameter=part.name, held=part.local_shape)
    return masters * part.n_local + kept
