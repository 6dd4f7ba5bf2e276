"""Programs: the order of a schedule, completed by what is sent, gathered and reduced.

Where a send and its receive stand follows from running the order on paper (equal stages, a whole backward twice a
forward): both are put at the moment when the result is made. That gives the invariant on which every transport can
rely: any two ranks name their messages to each other, both ways, in the same order, and the program ends even if
each send waits for its receive. Receiving is *started* there; the computation that needs the tensor waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from modelworks.layout.pipeline.actions import (
    COMPUTE,
    FULL_GRADIENT,
    USES_PARAMETERS,
    Action,
    Program,
    message_of,
    stage_ranks,
)
from modelworks.layout.pipeline.orders import compute_orders
from modelworks.layout.pipeline.simulate import Costs, simulate

Gather = Literal["step", "micro-batch"]
AccumulateReduce = Literal["last", "every"]


def build_program(
    schedule: str,
    pp: int,
    n_micro_batches: int,
    virtual: int = 1,
    *,
    zero3: bool = False,
    gather: Gather = "step",
    accumulate_reduce: AccumulateReduce = "last",
) -> Program:
    """The actions of each of `pp` ranks for one step.

    virtual: stages on each rank of an interleaved schedule (V-shaped ones always have two; pp=1 has one).
    zero3: parameters are sharded, so stages are gathered before they compute: once a step, or for each micro-batch's
    forward and backward anew, which keeps fewer of them in memory. accumulate_reduce: gradients are reduced after a
    stage's last micro-batch, or after every one.
    Raises UserError for a schedule that does not exist, or not with these numbers.
    """
    orders = compute_orders(schedule, pp, n_micro_batches, virtual)
    return _with_transfers([_with_sharding(order, zero3, gather, accumulate_reduce) for order in orders])


def forward_program(
    placed: Sequence[Sequence[int]], n_micro_batches: int, *, zero3: bool = False, gather: Gather = "step"
) -> Program:
    """Forwards alone, for evaluation. placed: the stages of each rank (`placed_stages`, or of a program)."""
    orders = [
        [Action("forward", stage, index) for index in range(n_micro_batches) for stage in sorted(stages)]
        for stages in placed
    ]
    if len(placed) > 1:
        # A rank with several stages goes through as many micro-batches as there are ranks before its next stage.
        width = len(placed)
        for order in orders:
            order.sort(key=lambda action: (action.micro_batch // width, action.stage, action.micro_batch))
    return _with_transfers([_with_sharding(order, zero3, gather, None) for order in orders])


def _with_sharding(
    order: Sequence[Action], zero3: bool, gather: Gather, accumulate_reduce: AccumulateReduce | None
) -> list[Action]:
    """Unshards, reshards and reduces put beside the computations of one rank. accumulate_reduce: None for none."""
    first = {action.stage: index for index, action in reversed(list(enumerate(order)))}
    last = {action.stage: index for index, action in enumerate(order)}
    completed: list[Action] = []
    for index, action in enumerate(order):
        stage = action.stage
        per_use = gather == "micro-batch" and action.kind in USES_PARAMETERS
        if zero3 and (per_use or (gather == "step" and first[stage] == index)):
            # Two uses in a row need no gathering in between.
            if completed and completed[-1].kind == "reshard" and completed[-1].stage == stage:
                completed.pop()
            else:
                completed.append(action._replace(kind="unshard"))
        completed.append(action)
        final = action.kind in FULL_GRADIENT and (accumulate_reduce == "every" or last[stage] == index)
        if final and accumulate_reduce is not None:
            completed.append(action._replace(kind="reduce"))
        if zero3 and (per_use or (gather == "step" and last[stage] == index)):
            completed.append(action._replace(kind="reshard"))
    return completed


def _with_transfers(orders: Sequence[Sequence[Action]]) -> Program:
    program = tuple(map(tuple, orders))
    ranks = stage_ranks(program)
    timeline = simulate(program, Costs.even(len(ranks)))
    # (time, transfers before computations, place) sorts what each rank does; alike on both ends of a transfer.
    placed: list[list[tuple[float, int, int, Action]]] = [
        [(timed.start, 1, index, timed.action) for index, timed in enumerate(rank)] for rank in timeline.ranks
    ]
    made = sorted(
        (timed.end, timed.action.stage, timed.action.micro_batch, timed.action.kind)
        for rank in timeline.ranks
        for timed in rank
        if timed.action.kind in COMPUTE
    )
    for number, (time, stage, micro_batch, kind) in enumerate(made):
        if message := message_of(Action(kind, stage, micro_batch), ranks):
            for action in message:
                placed[ranks[action.stage]].append((time, 0, number, action))
    return tuple(tuple(action for *_, action in sorted(rank)) for rank in placed)
