"""A pipeline schedule is data: for each rank, the actions that it performs, one after the other.

    forward, backward               one stage on one micro-batch; `backward` makes all gradients
    backward_input, backward_weight the same in two: the gradient that the stage before waits for, then the weights'
    send_forward                    hand the stage's outputs to the rank of the next stage
    receive_forward                 start to receive the stage's inputs from the rank of the stage before
    send_backward                   hand the gradients of the stage's inputs to the rank of the stage before
    receive_backward                start to receive the gradients of its outputs from the rank of the next stage
    unshard, reshard                gather a stage's parameters (ZeRO-3), and let them go again
    reduce                          sum a stage's gradients over the data-parallel ranks

Neighbouring stages on one rank hand over directly: nothing is sent. Stages are numbered through the whole model; ranks
are places along the pipeline axis.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal[
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "send_forward",
    "receive_forward",
    "send_backward",
    "receive_backward",
    "unshard",
    "reshard",
    "reduce",
]

COMPUTE: tuple[Kind, ...] = ("forward", "backward", "backward_input", "backward_weight")
FULL_GRADIENT: tuple[Kind, ...] = ("backward", "backward_weight")  # after these a micro-batch is done with a stage
INPUT_GRADIENT: tuple[Kind, ...] = ("backward", "backward_input")  # these make what the stage before waits for
USES_PARAMETERS: tuple[Kind, ...] = ("forward", "backward", "backward_input")  # a weight's gradient needs no weights
SENDS: tuple[Kind, ...] = ("send_forward", "send_backward")
RECEIVES: tuple[Kind, ...] = ("receive_forward", "receive_backward")


class Action(NamedTuple):
    """What to do, for which stage and micro-batch. An unshard, reshard or reduce carries the micro-batch beside it."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, micro-batch {self.micro_batch}"


Program = tuple[tuple[Action, ...], ...]  # by rank along the pipeline axis


def stage_ranks(program: Program) -> dict[int, int]:
    """Stage -> the rank that computes it. Raises ValueError where two ranks compute the same stage."""
    ranks: dict[int, int] = {}
    for rank, actions in enumerate(program):
        for action in actions:
            if action.kind in COMPUTE and ranks.setdefault(action.stage, rank) != rank:
                raise ValueError(f"{action}: computed on rank {rank} and on rank {ranks[action.stage]}")
    return dict(sorted(ranks.items()))


def message_of(action: Action, ranks: dict[int, int]) -> tuple[Action, Action] | None:
    """The send and the receive that follow a compute action, None where nobody on another rank waits for it."""
    _, stage, micro_batch = action
    if action.kind == "forward" and ranks.get(stage + 1, ranks[stage]) != ranks[stage]:
        return Action("send_forward", stage, micro_batch), Action("receive_forward", stage + 1, micro_batch)
    if action.kind in INPUT_GRADIENT and ranks.get(stage - 1, ranks[stage]) != ranks[stage]:
        return Action("send_backward", stage, micro_batch), Action("receive_backward", stage - 1, micro_batch)
    return None


def matching_receive(send: Action) -> Action:
    """What the receiver of `send` does."""
    if send.kind == "send_forward":
        return Action("receive_forward", send.stage + 1, send.micro_batch)
    return Action("receive_backward", send.stage - 1, send.micro_batch)
