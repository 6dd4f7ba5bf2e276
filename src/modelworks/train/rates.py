"""How fast the trainer's own parts run on one rank: what `modelworks plan --calibrate` measures.

Every rank calls `measure_rank`, and all do the same at the same time, since ranks on one machine share its memory and
caches: a rank's figures are those it has in a run. A figure is a median, the mean over ranks, and by `mean_of_rounds`
the mean over rounds that lie minutes apart: a machine that others share is not always equally fast, and a run sees its
mean. Where rounds differ by more than half, something else ran during the longer one, and the shortest counts.

On CUDA the same code measures the device of each rank; that has not been tried yet.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from modelworks.hardware import OPERATIONS
from modelworks.parallel import Mesh
from modelworks.train.exchange_rates import EXCHANGED, KINDS, exchange_seconds
from modelworks.train.operation_rates import (
    BLOCK_LENGTHS,
    LENGTHS,
    PRODUCTS,
    attention_seconds,
    block_seconds,
    operation_seconds,
    product_seconds,
)
from modelworks.train.step_rates import (
    PRECISION_NAMES,
    PROBES,
    SHARDED,
    sharded_seconds,
    split_loss_seconds,
    step_seconds,
    watched_seconds,
)
from modelworks.train.timing import DTYPES, Clock, Tell

DISTURBED = 1.5  # times the shortest of the rounds: no drift, but another program
Measured = dict[str, Any]


def parts_to_measure(n_ranks: int) -> int:
    """How often `measure_rank` calls `tell`."""
    several = n_ranks > 1
    dtypes = len(PRODUCTS) + len(LENGTHS) + several * len(BLOCK_LENGTHS)
    precisions = len(PROBES) + len(OPERATIONS) + 1 + several * (len(SHARDED) + 1)
    return len(DTYPES) * dtypes + len(PRECISION_NAMES) * precisions + several * len(KINDS) * len(EXCHANGED)


def measure_rank(mesh: Mesh, tell: Tell, *, effort: float = 1.0) -> Measured:
    """Seconds of everything, as `modelworks.plan.calibrate` takes them; the same on all ranks. All of them call it.

    tell: of what was just measured. effort: of the repetitions, relative to what gives steady figures.
    """
    clock = Clock(mesh, effort, tell)
    several = mesh.layout.world_size > 1
    by_precision = {
        name: {
            "steps": [step_seconds(clock, probe, name) for probe in PROBES],
            "operations": [operation_seconds(clock, operation, name) for operation in OPERATIONS],
            "watched": [watched_seconds(clock, name)],
            "sharded": [sharded_seconds(clock, probe, name) for probe in SHARDED] if several else [],
            "split_loss": [split_loss_seconds(clock, name)] if several else [],
        }
        for name in PRECISION_NAMES
    }
    parts = by_precision[PRECISION_NAMES[0]]
    return {
        "ranks": mesh.layout.world_size,
        "threads": torch.get_num_threads(),
        "products": {name: [product_seconds(clock, *shape, name) for shape in PRODUCTS] for name in DTYPES},
        "attention": {name: [attention_seconds(clock, length, name) for length in LENGTHS] for name in DTYPES},
        "blocks": {
            name: [block_seconds(clock, length, name) for length in BLOCK_LENGTHS] for name in DTYPES if several
        },
        "exchanges": exchange_seconds(clock),
        **{part: {name: each[part] for name, each in by_precision.items()} for part in parts},
    }


def mean_of_rounds(rounds: Sequence[Measured]) -> Measured:
    """Each figure's mean over what `measure_rank` has returned several times, or the least where they differ by more
    than `DISTURBED`. Sizes are the same in all of them."""
    return _mean(rounds)  # type: ignore[no-any-return]


def difference_of_rounds(rounds: Sequence[Measured]) -> float:
    """By how much a figure differs between the rounds, typically: the median of (most - least) / mean."""
    figures = zip(*map(_figures, rounds), strict=True)
    return float(
        statistics.median((max(each) - min(each)) / statistics.mean(each) for each in figures if max(each) > 0.0)
    )


def _mean(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _mean([value[key] for value in values]) for key in first}
    if isinstance(first, list):
        return [_mean(each) for each in zip(*values, strict=True)]
    if isinstance(first, int):
        return first
    return min(values) if max(values) > DISTURBED * min(values) else statistics.mean(values)


def _figures(value: Any) -> Iterator[float]:
    if isinstance(value, (Mapping, list)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _figures(each)
    elif isinstance(value, float):
        yield value
