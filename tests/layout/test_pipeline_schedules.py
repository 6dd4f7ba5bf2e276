"""Pipeline schedules: valid for every size, in torch's order where torch has them, as costly as their papers say."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelworks.config import UserError
from modelworks.layout.pipeline import (
    SCHEDULES,
    Action,
    Costs,
    Program,
    Timed,
    Timeline,
    bubble_formula,
    build_program,
    chrome_trace,
    draw,
    forward_program,
    peak_formula,
    placed_stages,
    simulate,
    validate_program,
)

INTERLEAVED, V_SHAPED = ("interleaved", "interleaved-zb"), ("zbv", "dualpipev")


def stages_each(schedule: str, virtual: int) -> int:
    """The `virtual` that a schedule can have."""
    return max(2, virtual) if schedule in INTERLEAVED else 2 if schedule in V_SHAPED else 1


sizes = st.tuples(st.sampled_from(SCHEDULES), st.integers(1, 6), st.integers(1, 14), st.integers(1, 3)).map(
    lambda drawn: (drawn[0], drawn[1], drawn[2], stages_each(drawn[0], drawn[3]))
)


@settings(max_examples=150, deadline=None)
@given(sizes, st.booleans(), st.sampled_from(["step", "micro-batch"]), st.sampled_from(["last", "every"]))
def test_every_program_is_valid(size: tuple[str, int, int, int], zero3: bool, gather: Any, reduces: Any) -> None:
    program = build_program(*size, zero3=zero3, gather=gather, accumulate_reduce=reduces)
    validate_program(program, size[2])
    kinds = [action.kind for actions in program for action in actions]
    stages = sum(map(len, placed_stages(size[0], size[1], size[3])))
    assert kinds.count("reduce") == stages * (size[2] if reduces == "every" else 1)
    assert kinds.count("unshard") == kinds.count("reshard")
    if zero3 and gather == "step":
        assert kinds.count("unshard") == stages


@settings(max_examples=40, deadline=None)
@given(sizes, st.booleans())
def test_every_forward_program_is_valid(size: tuple[str, int, int, int], zero3: bool) -> None:
    schedule, pp, n, virtual = size
    program = forward_program(placed_stages(schedule, pp, virtual), n, zero3=zero3, gather="micro-batch")
    validate_program(program, n, training=False)


def test_one_rank_does_forward_and_backward_in_turn() -> None:
    kinds = [(action.kind, action.micro_batch) for action in build_program("zb-h1", 1, 2)[0]]
    assert kinds == [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1), ("reduce", 1)]


def torch_order(schedule: str, pp: int, n: int, virtual: int) -> list[list[Action]]:
    """The computations of each rank by torch's schedule of that name."""
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining.stage import _PipelineStageBase

    class Stage(_PipelineStageBase):
        def __init__(self, index: int) -> None:  # of the base class only what schedules look at
            self.stage_index, self.num_stages, self.group_size, self.group_rank = index, pp * virtual, pp, 0
            self.group, self.submod = None, None
            self.has_backward = True

        def _create_grad_recv_info(self, act_send_info: Any) -> tuple[()]:
            return ()

        def _prepare_backward_infra(self, *arguments: Any) -> None: ...

        def _prepare_forward_infra(self, *arguments: Any) -> None: ...

    names = {
        "gpipe": "ScheduleGPipe",
        "1f1b": "Schedule1F1B",
        "interleaved": "ScheduleInterleaved1F1B",
        "zb-h1": "ScheduleInterleavedZeroBubble",  # with one stage a rank it is ZB-H1
        "interleaved-zb": "ScheduleInterleavedZeroBubble",
        "zbv": "ScheduleZBVZeroBubble",
        "dualpipev": "ScheduleDualPipeV",
    }
    kind = getattr(schedules, names[schedule])
    single = schedule in ("gpipe", "1f1b")
    own: Any = Stage(0) if single else [Stage(index) for index in placed_stages(schedule, pp, virtual)[0]]
    built = kind(own, n, loss_fn=lambda *arguments: None)
    order = built._get_pipeline_order() if single else built.pipeline_order
    kinds = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
    result = []
    for rank in range(pp):
        actions: list[Any] = []
        for action in filter(None, order[rank]):
            actions += action.sub_actions or [action]
        result.append(
            [
                Action(kinds[a.computation_type.value], a.stage_index, a.microbatch_index)
                for a in actions  # type: ignore[arg-type]
                if a.computation_type.value in kinds
            ]
        )
    if schedule == "1f1b":  # the table numbers the last rank's forwards from 1; torch's runtime counts from 0
        result[-1] = [a._replace(micro_batch=a.micro_batch - (a.kind == "forward")) for a in result[-1]]
    return result


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("pp", "n", "virtual"), [(2, 4, 2), (3, 6, 3), (4, 8, 2), (4, 12, 3), (4, 10, 2), (2, 2, 2)])
def test_the_order_is_torchs(schedule: str, pp: int, n: int, virtual: int) -> None:
    if schedule == "dualpipev" and n < 2 * pp:
        pytest.skip("torch refuses fewer micro-batches than stages")
    virtual = stages_each(schedule, virtual)
    computing = ("forward", "backward", "backward_input", "backward_weight")
    ours = [[a for a in rank if a.kind in computing] for rank in build_program(schedule, pp, n, virtual)]
    assert ours == torch_order(schedule, pp, n, virtual)


GRID = [
    (schedule, pp, n, virtual)
    for schedule in SCHEDULES
    for pp in (1, 2, 3, 4, 6)
    for n in (1, 2, 3, 4, 5, 7, 8, 11, 12, 16)
    for virtual in ((2, 3) if schedule in INTERLEAVED else (stages_each(schedule, 1),))
]


def test_micro_batches_held_are_what_the_formula_says() -> None:
    for schedule, pp, n, virtual in GRID:
        program = build_program(schedule, pp, n, virtual)
        held = simulate(program, Costs.even(pp * virtual)).peak_held_by_rank
        expected = tuple(peak_formula(schedule, pp, n, virtual, rank=rank) for rank in range(pp))
        assert held == expected, (schedule, pp, n, virtual)


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (2.0, 2.5, 2.0), (3.0, 1.0, 1.0)])
def test_the_bubble_is_what_the_formula_says(times: tuple[float, float, float]) -> None:
    known = set()
    for schedule, pp, n, virtual in GRID:
        f, b, w = times
        formula = bubble_formula(schedule, pp, n, virtual, forward=f, backward_input=b, backward_weight=w)
        stages = len(placed_stages(schedule, pp, virtual)[0]) * pp
        measured = simulate(build_program(schedule, pp, n, virtual), Costs.even(stages, *times)).bubble_fraction
        if formula is not None:
            assert measured == pytest.approx(formula, abs=1e-12), (schedule, pp, n, virtual)
            known.add(schedule)
    assert known >= {"gpipe", "1f1b", "interleaved", "zb-h1", "interleaved-zb"}


def test_published_figures() -> None:
    assert bubble_formula("1f1b", 4, 8) == pytest.approx(3 / 11)  # (p - 1) / (m + p - 1)
    assert bubble_formula("interleaved", 4, 8, 2) == pytest.approx(3 / 19)  # 1 / v of the idle time
    # with input and weight gradients as long as a forward, ZB-H1 has a third of 1F1B's idle time (Qi et al.)
    idle = {name: 1 / (1 / bubble_formula(name, 4, 8) - 1) for name in ("1f1b", "zb-h1")}  # type: ignore[operator]
    assert idle["zb-h1"] == pytest.approx(idle["1f1b"] / 3)
    assert [peak_formula("1f1b", 4, 8, rank=rank) for rank in range(4)] == [4, 3, 2, 1]
    # 1 + (p - 1) / (p v) of 1F1B's memory, in stages half as large
    assert peak_formula("interleaved", 4, 8, 2, rank=0) == 2 * 4 * (1 + 3 / 8)
    with pytest.raises(UserError, match=r"pp_schedule: got 2f2b, expected one of gpipe, 1f1b"):
        build_program("2f2b", 2, 2)
    with pytest.raises(UserError, match="pp_virtual: got 1, expected at least 2"):
        build_program("interleaved", 2, 2)
    with pytest.raises(UserError, match="got 0, expected at least 1"):
        build_program("1f1b", 2, 0)


def test_uneven_costs_and_slow_links() -> None:
    """Worked by hand: two stages, the second twice as slow, half a unit between them."""
    costs = Costs([1.0, 2.0], [1.0, 2.0], [1.0, 2.0], send=0.5)
    timeline = simulate(build_program("1f1b", 2, 2), costs)
    times = {(t.action.kind, t.action.stage, t.action.micro_batch): t[1:] for rank in timeline.ranks for t in rank}
    assert times["forward", 0, 1] == (1.0, 2.0)
    assert times["forward", 1, 0] == (1.5, 3.5)
    assert times["backward", 1, 0] == (3.5, 7.5)
    assert times["backward", 0, 0] == (8.0, 10.0)
    assert times["forward", 1, 1] == (7.5, 9.5)
    assert times["backward", 0, 1] == (14.0, 16.0)
    assert timeline.makespan == 16.0
    assert timeline.bubble_fraction == pytest.approx(1 - (6 + 12) / 32)


def without(program: Program, gone: Action) -> Program:
    return tuple(tuple(action for action in rank if action != gone) for rank in program)


def swapped(program: Program, first: Action, second: Action) -> Program:
    exchange = {first: second, second: first}
    return tuple(tuple(exchange.get(action, action) for action in rank) for rank in program)


def _broken() -> dict[str, tuple[Program, str]]:
    plain, split = build_program("1f1b", 2, 3), build_program("zb-h1", 2, 3)
    sharded = build_program("1f1b", 2, 3, zero3=True)
    first_send, second_send = Action("send_forward", 0, 0), Action("send_forward", 0, 1)
    both = [action for action in plain[1] if action.kind == "receive_forward"][:2]
    late = tuple(action for action in plain[0] if action != first_send)
    return {
        "a forward missing": (without(plain, Action("forward", 1, 2)), "stage 1 computes|micro-batch 2"),
        "weights before inputs": (
            swapped(split, Action("backward_input", 1, 0), Action("backward_weight", 1, 0)),
            "expected forward backward or forward backward_input backward_weight",
        ),
        "no weight gradient": (without(split, Action("backward_weight", 0, 1)), "stage 0, micro-batch 1"),
        "never sent": (without(plain, first_send), "never sent"),
        "never received": (without(plain, both[0]), "runs before receive_forward of stage 1, micro-batch 0"),
        "sent too early": (swapped(plain, first_send, Action("forward", 0, 0)), "sent before it is made"),
        "another order": (swapped(plain, *both), "runs before|comes to"),
        "sent twice": ((*((*plain[0], first_send),), plain[1]), "2 times"),
        "a reduce too early": (
            swapped(plain, Action("reduce", 0, 2), Action("backward", 0, 0)),
            "no gradient to reduce",
        ),
        "not gathered": (without(sharded, Action("unshard", 0, 0)), "not gathered|sharded already"),
        "gathered for ever": (without(sharded, Action("reshard", 1, 2)), "stay gathered"),
        "on two ranks": ((plain[0], (*plain[1], Action("forward", 0, 0))), "computed on rank 1 and on rank 0"),
        "too late for the other": (
            ((*late[:2], second_send, first_send, *(a for a in late[2:] if a != second_send)), plain[1]),
            "comes to",
        ),
    }


@pytest.mark.parametrize("name", _broken())
def test_a_broken_program_is_refused(name: str) -> None:
    program, message = _broken()[name]
    with pytest.raises(ValueError, match=message):
        validate_program(program, 3)


def test_ranks_that_wait_for_each_other_are_found() -> None:
    def at(rank: Any, *actions: tuple[Any, int, int]) -> tuple[Action, ...]:
        return tuple(Action(*action) for action in actions)

    crossed = (
        at(0, ("forward", 0, 0), ("send_forward", 0, 0), ("receive_backward", 0, 0), ("backward", 0, 0)),
        at(1, ("receive_forward", 1, 0), ("backward", 1, 0), ("send_backward", 1, 0), ("forward", 1, 0)),
    )
    with pytest.raises(ValueError, match="computes backward forward"):
        validate_program(crossed, 1)
    with pytest.raises(ValueError, match=r"never ends: ranks wait at .*backward of stage 1, micro-batch 0"):
        simulate(crossed, Costs.even(2))

    # Receives put off until their use: each of three ranks sends to the next before it receives from the one before.
    naive = []
    for rank in forward_program([[0, 3], [1, 4], [2, 5]], 3):
        receives = {action[1:]: action for action in rank if action.kind == "receive_forward"}
        late: list[Action] = []
        for action in rank:
            if action.kind == "forward" and action[1:] in receives:
                late.append(receives[action[1:]])
            if action.kind != "receive_forward":
                late.append(action)
        naive.append(tuple(late))
    simulate(tuple(naive), Costs.even(6))  # fine where sends do not wait
    with pytest.raises(ValueError, match="wait for each other for ever at send_forward of stage 0, micro-batch 2"):
        validate_program(tuple(naive), 3, training=False)


def test_pictures() -> None:
    assert draw(build_program("1f1b", 2, 2)).splitlines() == [
        "rank 0  F0 F1       B0···    B1···",
        "rank 1     F0 B0··· F1 B1···",
    ]
    zbv = draw(build_program("zbv", 2, 3)).splitlines()
    assert zbv[0].startswith("rank 0  F0a F1a F2a F0b I0b W0b")
    assert all(f"{letter}{n}{arm}" in zbv[0] for letter in "FIW" for n in range(3) for arm in "ab")
    narrow = draw(build_program("1f1b", 4, 8), width=40).splitlines()
    assert all(len(line) <= len("rank 0  ") + 40 for line in narrow)


def test_chrome_trace() -> None:
    timeline = simulate(build_program("interleaved", 2, 4, 2), Costs.even(4))
    events = [event for event in chrome_trace(timeline.ranks)["traceEvents"] if event["ph"] == "X"]
    for rank in range(2):
        computed = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["pid"] == rank and e["tid"] == 0)
        assert len(computed) == 2 * 4 * 2
        assert all(end <= start for (_, end), (start, _) in pairwise(computed))


def test_of_a_measured_timeline() -> None:
    first = (Timed(Action("forward", 0, 0), 10.0, 11.0), Timed(Action("backward", 0, 0), 13.0, 15.0))
    second = (Timed(Action("receive_forward", 1, 0), 10.0, 11.5), Timed(Action("forward", 1, 0), 11.5, 12.0))
    timeline = Timeline((first, second))
    assert timeline.makespan == 5.0
    assert timeline.bubble_fraction == pytest.approx(1 - 3.5 / 10)  # waiting is not computing
    assert (timeline.peak_held, timeline.peak_held_by_rank) == ({0: 1, 1: 1}, (1, 1))


def test_the_planner_needs_no_torch() -> None:
    code = "import sys, modelworks.layout.pipeline; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
