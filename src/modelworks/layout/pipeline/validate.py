"""Whether a program is right: run before it runs, so that a wrong schedule is an error and not a hang."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from modelworks.layout.pipeline.actions import (
    COMPUTE,
    FULL_GRADIENT,
    RECEIVES,
    SENDS,
    USES_PARAMETERS,
    Action,
    Program,
    matching_receive,
    message_of,
    stage_ranks,
)
from modelworks.layout.pipeline.simulate import Costs, simulate


def validate_program(program: Program, n_micro_batches: int, *, training: bool = True) -> None:
    """Raise ValueError, naming the action, unless

    each stage runs each micro-batch forward once and (in training) backward once, input before weights;
    what another rank needs is sent once, after it was made, and received once, before it is used;
    two ranks name their messages to each other in the same order; nobody waits for ever, even if each send waits for
    its receive; a stage that is gathered at all is gathered while it computes; and a stage's gradients are reduced
    after the last of them, and never while there are none.
    """
    ranks = stage_ranks(program)
    if list(ranks) != list(range(len(ranks))) or not ranks:
        raise ValueError(f"stages {list(ranks)} are computed, expected all from 0 to the last")
    for stage, rank in ranks.items():
        _check_computed(program[rank], stage, n_micro_batches, training)
    for rank, actions in enumerate(program):
        _check_transfers(actions, rank, ranks)
        for stage in (stage for stage, owner in ranks.items() if owner == rank):
            _check_sharding([action for action in actions if action.stage == stage], training)
    _check_messages(program, ranks)
    simulate(program, Costs.even(len(ranks)))
    _check_no_deadlock(program, ranks)


def _check_computed(actions: Sequence[Action], stage: int, n_micro_batches: int, training: bool) -> None:
    done: dict[int, list[str]] = defaultdict(list)
    for action in actions:
        if action.stage == stage and action.kind in COMPUTE:
            done[action.micro_batch].append(action.kind)
    if sorted(done) != list(range(n_micro_batches)):
        raise ValueError(f"stage {stage} computes micro-batches {sorted(done)}, expected 0 to {n_micro_batches - 1}")
    allowed = [["forward", "backward"], ["forward", "backward_input", "backward_weight"]] if training else [["forward"]]
    for micro_batch, kinds in done.items():
        if kinds not in allowed:
            expected = " or ".join(" ".join(each) for each in allowed)
            raise ValueError(
                f"stage {stage}, micro-batch {micro_batch}: computes {' '.join(kinds)}, expected {expected}"
            )


def _check_transfers(actions: Sequence[Action], rank: int, ranks: dict[int, int]) -> None:
    """Each send after what makes it, each receive before what uses it, and none besides."""
    counts = Counter(actions)
    for action, count in counts.items():
        if action.kind in (*SENDS, *RECEIVES) and (count > 1 or ranks.get(action.stage) != rank):
            raise ValueError(f"{action}: {count} times on rank {rank}, expected once where its stage is")
    made: set[Action] = set()
    received: set[Action] = set()
    for action in actions:
        if action.kind in RECEIVES:
            received.add(action)
        elif action.kind in SENDS:
            if action not in made:
                raise ValueError(f"{action}: sent before it is made")
            made.remove(action)
        elif action.kind in COMPUTE:
            needed = _needed_message(action, ranks)
            if needed is not None and needed not in received:
                raise ValueError(f"{action}: runs before {needed}")
            received.discard(needed) if needed is not None else None
            if message := message_of(action, ranks):
                made.add(message[0])
    if made or received:
        raise ValueError(f"rank {rank}: never sent {sorted(made)}, received and never used {sorted(received)}")


def _needed_message(action: Action, ranks: dict[int, int]) -> Action | None:
    kind, stage, micro_batch = action
    if kind == "forward" and ranks.get(stage - 1, ranks[stage]) != ranks[stage]:
        return Action("receive_forward", stage, micro_batch)
    if kind in ("backward", "backward_input") and ranks.get(stage + 1, ranks[stage]) != ranks[stage]:
        return Action("receive_backward", stage, micro_batch)
    return None


def _check_sharding(actions: Sequence[Action], training: bool) -> None:
    """The actions of one stage."""
    gathers = any(action.kind == "unshard" for action in actions)
    reduces = any(action.kind == "reduce" for action in actions)
    gathered, unreduced, forwards = False, 0, 0
    for action in actions:
        if action.kind in ("unshard", "reshard"):
            if gathered == (action.kind == "unshard"):
                raise ValueError(f"{action}: the stage is {'gathered' if gathered else 'sharded'} already")
            gathered = not gathered
        elif action.kind in USES_PARAMETERS and gathers and not gathered:
            raise ValueError(f"{action}: the stage's parameters are not gathered")
        elif action.kind == "reduce":
            if not unreduced:
                raise ValueError(f"{action}: there is no gradient to reduce")
            unreduced = 0
        forwards += action.kind == "forward"
        unreduced += action.kind in FULL_GRADIENT
    if gathered:
        raise ValueError(f"stage {actions[0].stage}: its parameters stay gathered after the step")
    if training and reduces and unreduced:
        raise ValueError(f"stage {actions[0].stage}: gradients of {unreduced} micro-batches are not reduced")


def _check_messages(program: Program, ranks: dict[int, int]) -> None:
    """Between each two ranks, the order of what is sent and received, both ways, is the same on both."""
    first_names: dict[tuple[int, int], list[Action]] = defaultdict(list)
    second_names: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, actions in enumerate(program):
        for message, peer in _messages(actions, ranks):
            names = first_names if rank < peer else second_names
            names[min(rank, peer), max(rank, peer)].append(message)
    for pair in {*first_names, *second_names}:
        for first, second in zip(first_names[pair], second_names[pair], strict=False):
            if first != second:
                raise ValueError(f"ranks {pair[0]} and {pair[1]}: one comes to {first} where the other does {second}")
        if len(first_names[pair]) != len(second_names[pair]):
            raise ValueError(f"ranks {pair[0]} and {pair[1]}: a send has no receive, or a receive no send")


def _messages(actions: Sequence[Action], ranks: dict[int, int]) -> Iterator[tuple[Action, int]]:
    """What a rank sends and receives, each by the name of its send, with the other rank."""
    for action in actions:
        if action.kind in SENDS:
            yield action, ranks[matching_receive(action).stage]
        elif action.kind == "receive_forward":
            yield Action("send_forward", action.stage - 1, action.micro_batch), ranks[action.stage - 1]
        elif action.kind == "receive_backward":
            yield Action("send_backward", action.stage + 1, action.micro_batch), ranks[action.stage + 1]


def _check_no_deadlock(program: Program, ranks: dict[int, int]) -> None:
    """Each send waits for its receive, and each receive for its send: the ranks still come to the end."""
    places = [0] * len(program)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(program):
            while places[rank] < len(actions):
                action = actions[places[rank]]
                if action.kind in RECEIVES:
                    break  # done together with its send
                if action.kind in SENDS:
                    receive = matching_receive(action)
                    peer = ranks[receive.stage]
                    if places[peer] == len(program[peer]) or program[peer][places[peer]] != receive:
                        break
                    places[peer] += 1
                places[rank] += 1
                moved = True
    waiting = [actions[place] for actions, place in zip(program, places, strict=True) if place < len(actions)]
    if waiting:
        raise ValueError(f"ranks wait for each other for ever at {'; '.join(map(str, waiting))}")
