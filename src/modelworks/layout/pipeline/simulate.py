"""Running a program on paper: when each action would start and end, given what each costs.

A rank does its actions in order. A computation starts when its rank is free and what it needs has arrived: from its
own rank when that was computed, from another `send` later. Sending and receiving take no time of the rank itself;
unshard and reduce do, as if nothing overlapped them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelworks.layout.pipeline.actions import INPUT_GRADIENT, Action, Program, stage_ranks
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
    made = _Made(ranks, costs.send)
    timed: list[list[Timed]] = [[] for _ in program]
    clocks = [0.0] * len(program)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(program):
            done, clock = timed[rank], clocks[rank]
            while len(done) < len(actions):
                action = actions[len(done)]
                arrived = made.needed(action)
                if arrived is None:
                    break
                start = arrived if arrived > clock else clock
                clock = start + costs.of(action)
                done.append(Timed(action, start, clock))
                made.add(action, clock)
                moved = True
            clocks[rank] = clock
    if stuck := [actions[len(done)] for actions, done in zip(program, timed, strict=True) if len(done) < len(actions)]:
        raise ValueError(f"the schedule never ends: ranks wait at {'; '.join(map(str, stuck))}")
    return Timeline(tuple(map(tuple, timed)))


class _Made:
    """When results were computed, by (stage, micro-batch), and when they arrive where they are needed.

    A forward needs the forward of the stage before; a gradient of inputs the stage's own forward and the gradient of
    the stage after; a gradient of weights that of the inputs.
    """

    def __init__(self, ranks: dict[int, int], send: float) -> None:
        self._last = len(ranks) - 1
        self._forward: dict[tuple[int, int], float] = {}
        self._gradient: dict[tuple[int, int], float] = {}  # of a stage's inputs, by a whole backward or its first half
        # what a stage waits for after its neighbour has computed: nothing on the same rank
        self._from_before = {stage: send * (ranks.get(stage - 1, rank) != rank) for stage, rank in ranks.items()}
        self._from_after = {stage: send * (ranks.get(stage + 1, rank) != rank) for stage, rank in ranks.items()}

    def add(self, action: Action, end: float) -> None:
        kind, stage, micro_batch = action
        if kind == "forward":
            self._forward[stage, micro_batch] = end
        elif kind in INPUT_GRADIENT:
            self._gradient[stage, micro_batch] = end

    def needed(self, action: Action) -> float | None:
        """When what an action needs has arrived; None while that is not known."""
        kind, stage, micro_batch = action
        if kind == "forward":
            if stage == 0:
                return 0.0
            end = self._forward.get((stage - 1, micro_batch))
            return None if end is None else end + self._from_before[stage]
        if kind in INPUT_GRADIENT:
            own = self._forward.get((stage, micro_batch))
            if own is None or stage == self._last:
                return own
            after = self._gradient.get((stage + 1, micro_batch))
            return None if after is None else max(own, after + self._from_after[stage])
        return self._gradient.get((stage, micro_batch)) if kind == "backward_weight" else 0.0


class Rehearsal:
    """A program made ready to be run on paper many times with other costs, when only its end is asked for.

    Only computations count: each is (which cost, what it needs and whether that comes from another rank, twice, what it
    makes), with results numbered, so that running it is a loop over numbers.
    """

    def __init__(self, program: Program) -> None:
        ranks = stage_ranks(program)
        last = len(ranks) - 1
        micro_batches = 1 + max(action.micro_batch for actions in program for action in actions)
        gradients = len(ranks) * micro_batches  # numbers of forwards come first, then of gradients of inputs
        self._results = 2 * gradients
        self._ranks: list[list[tuple[int, int, bool, int, bool, int]]] = []
        for rank, actions in enumerate(program):
            steps = []
            for kind, stage, micro_batch in actions:
                own = stage * micro_batches + micro_batch
                if kind == "forward":
                    before = own - micro_batches if stage else -1
                    steps.append((stage, before, stage > 0 and ranks[stage - 1] != rank, -1, False, own))
                elif kind in INPUT_GRADIENT:
                    after = gradients + own + micro_batches if stage < last else -1
                    cost = stage + (1 if kind == "backward_input" else 2) * len(ranks)
                    far = stage < last and ranks[stage + 1] != rank
                    steps.append((cost, own, False, after, far, gradients + own))
                elif kind == "backward_weight":
                    steps.append((stage + 3 * len(ranks), gradients + own, False, -1, False, -1))
            self._ranks.append(steps)

    def makespan(self, costs: Costs) -> float:
        """When the last computation ends; the first begins at 0."""
        return max(ends[-1] for ends in self.ends(costs) if ends)

    def ends(self, costs: Costs) -> list[list[float]]:
        """By rank, when each of its computations ends, in their order."""
        whole = [first + second for first, second in zip(costs.backward_input, costs.backward_weight, strict=True)]
        seconds = [*costs.forward, *costs.backward_input, *whole, *costs.backward_weight]
        ends: list[float] = [-1.0] * self._results
        send, done = costs.send, [list[float]() for _ in self._ranks]
        left = sum(map(len, self._ranks))
        while left:
            before = left
            for finished, steps in zip(done, self._ranks, strict=True):
                place = len(finished)
                left += place
                clock = finished[-1] if finished else 0.0
                while place < len(steps):
                    cost, first, first_far, second, second_far, result = steps[place]
                    start = clock
                    if first >= 0:
                        arrived = ends[first]
                        if arrived < 0.0:
                            break
                        if first_far:
                            arrived += send
                        if arrived > start:
                            start = arrived
                    if second >= 0:
                        arrived = ends[second]
                        if arrived < 0.0:
                            break
                        if second_far:
                            arrived += send
                        if arrived > start:
                            start = arrived
                    clock = start + seconds[cost]
                    if result >= 0:
                        ends[result] = clock
                    finished.append(clock)
                    place += 1
                left -= place
            if left == before:
                raise ValueError("the schedule never ends: all ranks wait for each other")
        return done
