"""How a run is split, in words: the layout, threads, what each rank of the pipeline holds and what it needs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise

from modelworks.config import RunConfig, format_bytes
from modelworks.hardware import MachineFacts
from modelworks.layout import AXES, Layout, describe, stages_of
from modelworks.layout.pipeline import stage_layers
from modelworks.train.rank_memory import predict_rank_memory

Row = tuple[str, object, str]  # key, value, reason


def layout_decisions(config: RunConfig, facts: MachineFacts, micro_batch: int, ranks_here: int) -> Iterator[Row]:
    """Nothing for one process. config: without `auto`. ranks_here: of this machine."""
    layout = Layout.of(config.parallel)
    if layout.world_size == 1:
        return
    degrees = " * ".join(f"{axis} {degree}" for axis, degree in zip(AXES, layout.degrees, strict=True) if degree > 1)
    yield "layout", describe(config.parallel), f"{layout.world_size} ranks: {degrees}"
    if config.train.device == "cpu":
        yield _threads(facts, ranks_here)
    precision = config.train.precision
    stages = stage_layers(config)
    for place, rank in enumerate(layout.ranks(0, "pp")):
        ranks = [number for number in range(layout.world_size) if layout.coordinates(number).pp == place]
        memory = predict_rank_memory(config, precision=precision, micro_batch=micro_batch, rank=rank)
        held = "; then ".join(_stage(stages, number) for number in stages_of(layout, config.parallel, rank))
        reason = f"{format_bytes(memory.total)} on each; parallel.pp_partition is {config.parallel.pp_partition}"
        if layout.pp == 1:
            reason = f"{format_bytes(memory.total)} on each"
        yield f"on {_numbers('rank', ranks)}", held, reason


def _threads(facts: MachineFacts, ranks_here: int) -> Row:
    """As `modelworks.parallel.launch` divides them."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    each = max(1, facts.cores // ranks_here)
    if given.isdigit() and int(given) != each:
        return "threads per rank", given, f"OMP_NUM_THREADS={given} is set"
    short = ": ranks share cores, which is slow" if ranks_here > facts.cores else ""
    return "threads per rank", each, f"{facts.cores} usable cores for {ranks_here} ranks{short}"


def _stage(stages: Sequence[Sequence[int]], number: int) -> str:
    """`embedding, layers 0-3`, the layers in the order that they compute."""
    parts = ["embedding"] if number == 0 else []
    parts += [_numbers("layer", stages[number])] if stages[number] else []
    parts += ["head"] if number == len(stages) - 1 else []
    return ", ".join(parts) or "nothing"


def _numbers(noun: str, numbers: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-3`, `ranks 0, 2, 4`."""
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    if all(after == before + 1 for before, after in pairwise(numbers)):
        return f"{noun}s {numbers[0]}-{numbers[-1]}"
    return f"{noun}s {', '.join(map(str, numbers))}"
