"""The order in which each rank computes, for each schedule: the schedules themselves, before anything is sent.

    gpipe           all forwards, then all backwards                          Huang et al. 2019, 1811.06965
    1f1b            a warm-up, then one forward and one backward in turn      Narayanan et al. 2019 (PipeDream-Flush)
    interleaved     the same with several stages on each rank                 Narayanan et al. 2021, 2104.04473
    zb-h1           1f1b whose weight gradients wait, for the bubble          Qi et al. 2023, 2401.10241
    interleaved-zb  interleaved with the same delay
    zbv             two stages a rank, down and back; by hand for equal times Qi et al. 2023 (section 6), 2405.15362
    dualpipev       the same placement, forwards beside backwards             DeepSeek 2025, after 2412.19437

The first five are one rule with three numbers: forwards done before the first backward, and how many backwards a
weight gradient stays behind. Micro-batches go round the stages of a rank in rounds of at least `pp`, so that a rank
never waits for what it has just sent off.

Invariant: every micro-batch count gives a valid order. The V-shaped schedules need enough micro-batches to fill both
arms; with fewer, the order for enough is taken and those that do not exist are left out, which can block nobody,
because a micro-batch waits only for itself.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from modelworks.config import ParallelConfig, UserError
from modelworks.layout.layout import Layout
from modelworks.layout.pipeline.actions import Action, Kind
from modelworks.layout.placement import V_SHAPED, stages_of
from modelworks.layout.shards import split_evenly

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "interleaved-zb", "zbv", "dualpipev")


def placed_stages(schedule: str, pp: int, virtual: int) -> list[list[int]]:
    """The stages of each rank. Raises UserError for a schedule that does not exist or not with so many stages."""
    if schedule not in SCHEDULES:
        raise UserError(f"parallel.pp_schedule: got {schedule}, expected one of {', '.join(SCHEDULES)}")
    if pp > 1 and schedule in ("interleaved", "interleaved-zb") and virtual < 2:
        raise UserError(f"parallel.pp_virtual: got {virtual}, expected at least 2 with pp_schedule {schedule}")
    if virtual > 1 and schedule in ("gpipe", "1f1b", "zb-h1"):
        raise UserError(f"parallel.pp_virtual: got {virtual}, expected 1 with pp_schedule {schedule}")
    if virtual > 2 and schedule in V_SHAPED:
        raise UserError(f"parallel.pp_virtual: got {virtual}, expected 2 with pp_schedule {schedule}")
    if pp == 1:
        virtual = 1
    parallel = ParallelConfig.model_construct(pp=pp, pp_schedule=schedule, pp_virtual=virtual)
    return [stages_of(Layout(pp=pp), parallel, rank) for rank in range(pp)]


def compute_orders(schedule: str, pp: int, n_micro_batches: int, virtual: int) -> list[list[Action]]:
    """By rank: forwards and backwards in order."""
    placed = placed_stages(schedule, pp, virtual)
    if n_micro_batches < 1:
        raise UserError(f"micro-batches of a step: got {n_micro_batches}, expected at least 1")
    if pp == 1:
        return [_in_turn(placed[0], [range(n_micro_batches)], warmup=0)]
    if schedule in V_SHAPED:
        make, least = (_zbv, 2 * pp - 1) if schedule == "zbv" else (_dualpipev, 2 * pp)
        orders = [make(placed[rank], pp, rank, max(least, n_micro_batches)) for rank in range(pp)]
        return [[action for action in order if action.micro_batch < n_micro_batches] for order in orders]
    parts = rounds(pp, n_micro_batches)
    orders = []
    for rank, stages in enumerate(placed):
        behind = pp - 1 - rank
        split = schedule in ("zb-h1", "interleaved-zb")
        if schedule == "gpipe":
            warmup = n_micro_batches
        else:
            # Going round several stages, forwards and backwards alternate: two are on their way for each rank behind.
            hops = 2 if schedule == "interleaved" else 1
            warmup = (len(stages) - 1) * len(parts[0]) + hops * behind
        orders.append(_in_turn(stages, parts, warmup, weights_behind=rank if split else None))
    return orders


def rounds(pp: int, n_micro_batches: int) -> list[range]:
    """Micro-batches cut into as many groups of at least `pp` as there can be, the larger first."""
    count = max(1, n_micro_batches // pp)
    return [range(*split_evenly(n_micro_batches, count, index)) for index in range(count)]


def _in_turn(
    stages: Sequence[int], rounds: Sequence[range], warmup: int, weights_behind: int | None = None
) -> list[Action]:
    """`warmup` forwards, then one forward and one backward in turn, then the backwards that are left.

    weights_behind: how many backwards a weight gradient comes after its own; None where the backward is whole.
    """
    forwards = [Action("forward", stage, index) for part in rounds for stage in stages for index in part]
    kind: Kind = "backward" if weights_behind is None else "backward_input"
    backwards = [Action(kind, stage, index) for part in rounds for stage in reversed(stages) for index in part]
    weights = deque(action._replace(kind="backward_weight") for action in backwards)
    order = forwards[:warmup]
    for done, backward in enumerate(backwards):
        order += forwards[warmup + done : warmup + done + 1]
        order.append(backward)
        if weights_behind is not None and done >= weights_behind:
            order.append(weights.popleft())
    return order if weights_behind is None else [*order, *weights]


class _Order:
    """Actions of a rank with two stages, each numbered by how many of its kind came before."""

    def __init__(self, stages: Sequence[int]) -> None:
        self.stages = stages
        self.actions: list[Action] = []
        self._done: Counter[tuple[str, int]] = Counter()
        self._waiting: list[Action] = []  # weight gradients put off

    def forward(self, arm: int) -> None:
        self.actions.append(Action("forward", self.stages[arm], self._next("forward", arm)))

    def backward(self, arm: int, *, split: bool = False) -> None:
        action = Action("backward_input" if split else "backward", self.stages[arm], self._next("backward", arm))
        self.actions.append(action)
        if split:
            self._waiting.append(action._replace(kind="backward_weight"))

    def weight(self, arm: int | None = None) -> None:
        """The oldest weight gradient that waits, of one arm or of either; nothing where none does."""
        for action in self._waiting:
            if arm is None or action.stage == self.stages[arm]:
                self._waiting.remove(action)
                self.actions.append(action)
                return

    def _next(self, kind: str, arm: int) -> int:
        self._done[kind, arm] += 1
        return self._done[kind, arm] - 1


DOWN, BACK = 0, 1  # the arms of the V: from rank 0 to the last, and back


def _zbv(stages: Sequence[int], pp: int, rank: int, n_micro_batches: int) -> list[Action]:
    """Without a bubble between first and last action where forward, input and weight gradients take the same time."""
    order = _Order(stages)
    for _ in range(2 * (pp - rank) - 1):
        order.forward(DOWN)
    for _ in range(rank):
        order.forward(BACK)
        order.forward(DOWN)
    for _ in range(pp - rank):
        order.forward(BACK)
        order.backward(BACK, split=True)
        order.weight(BACK)
    left = n_micro_batches - (2 * (pp - rank) - 1 + rank)  # forwards of the first arm
    for step in range(n_micro_batches - pp):  # forwards of the second arm
        if step < left:
            order.forward(DOWN)
        order.backward(DOWN, split=True)
        order.weight(DOWN)
        order.forward(BACK)
        order.backward(BACK, split=True)
        order.weight(BACK)
    for _ in range(rank):
        order.backward(DOWN, split=True)
        order.backward(BACK, split=True)
    for _ in range(pp - rank):
        order.backward(DOWN, split=True)
        order.weight(DOWN)
    for arm in (BACK, DOWN):
        for _ in range(rank):
            order.weight(arm)
    return order.actions


def _dualpipev(stages: Sequence[int], pp: int, rank: int, n_micro_batches: int) -> list[Action]:
    """Backwards are split only where the pipeline fills and drains; in between they are whole and alternate with
    forwards of the other arm, whose communication they can hide."""
    order = _Order(stages)
    behind = pp - 1 - rank
    for _ in range(2 * behind):
        order.forward(DOWN)
    for _ in range(rank + 1):
        order.forward(DOWN)
        order.forward(BACK)
    for _ in range(behind):
        order.backward(BACK, split=True)
        order.weight()
        order.forward(BACK)
    for _ in range(n_micro_batches - 2 * pp + rank + 1):
        order.forward(DOWN)
        order.backward(BACK)
        order.forward(BACK)
        order.backward(DOWN)
    for _ in range(behind):
        order.backward(BACK)
        order.forward(BACK)
        order.backward(DOWN)
    # Of the last 2 (rank + 1) backwards the second half is split: their weight gradients fill the gaps after them.
    for number in range(2 * (rank + 1)):
        order.backward(BACK if number % 2 == 0 else DOWN, split=number > rank)
    for _ in range(behind):
        order.weight()
        order.backward(DOWN, split=True)
    for _ in range(rank + 1):
        order.weight()
    return order.actions
