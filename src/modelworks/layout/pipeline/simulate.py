"""Running a program on paper: when each action would start and end, given what each costs.

A rank does its actions in order. A computation starts when its rank is free and what it needs has arrived: from its
own rank when that was computed, from another `send` later. Sending and receiving take no time of the rank itself;
unshard and reduce do, as if nothing overlapped them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelworks.layout.pipeline.actions import COMPUTE, Action, Program, needs, stage_ranks
from modelworks.layout.pipeline.timeline import Timed, Timeline


@dataclass(frozen=True)
class Costs:
    """Seconds (or any unit) for one micro-batch, by stage; a whole backward costs the sum of its two halves.

    send: from the end of a computation to the arrival of its result on another rank. unshard, reduce: one of each.
    """

    forward: Sequence[float]
    backward_input: Sequence[float]
    backward_weight: Sequence[float]
    send: float = 0.0
    unshard: float = 0.0
    reduce: float = 0.0

    @classmethod
    def even(
        cls,
        n_stages: int,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        send: float = 0.0,
    ) -> Costs:
        """The same for every stage."""
        return cls([forward] * n_stages, [backward_input] * n_stages, [backward_weight] * n_stages, send)

    def of(self, action: Action) -> float:
        """The time that an action keeps its rank busy."""
        kind, stage, _ = action
        if kind == "forward":
            return self.forward[stage]
        if kind == "backward":
            return self.backward_input[stage] + self.backward_weight[stage]
        if kind == "backward_input":
            return self.backward_input[stage]
        if kind == "backward_weight":
            return self.backward_weight[stage]
        return {"unshard": self.unshard, "reduce": self.reduce}.get(kind, 0.0)


def simulate(program: Program, costs: Costs) -> Timeline:
    """When each action of each rank runs. Raises ValueError where the ranks would wait for each other for ever."""
    ranks = stage_ranks(program)
    split = {action[1:] for actions in program for action in actions if action.kind == "backward_input"}
    ends: dict[Action, float] = {}
    timed: list[list[Timed]] = [[] for _ in program]
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(program):
            done = timed[rank]
            while len(done) < len(actions):
                action = actions[len(done)]
                start = _start(action, rank, ranks, split, ends, costs.send)
                if start is None:
                    break
                start = max(start, done[-1].end) if done else start
                done.append(Timed(action, start, start + costs.of(action)))
                ends[action] = done[-1].end
                moved = True
    if stuck := [actions[len(done)] for actions, done in zip(program, timed, strict=True) if len(done) < len(actions)]:
        raise ValueError(f"the schedule never ends: ranks wait at {'; '.join(map(str, stuck))}")
    return Timeline(tuple(map(tuple, timed)))


def _start(
    action: Action,
    rank: int,
    ranks: dict[int, int],
    split: set[tuple[int, int]],
    ends: dict[Action, float],
    send: float,
) -> float | None:
    """When what an action needs has arrived; None while that is not known."""
    start = 0.0
    if action.kind not in COMPUTE:
        return start
    for need in needs(action, len(ranks), (action.stage + 1, action.micro_batch) in split):
        if need not in ends:
            return None
        start = max(start, ends[need] + (send if ranks[need.stage] != rank else 0.0))
    return start
