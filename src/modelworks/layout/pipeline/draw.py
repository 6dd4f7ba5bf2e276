"""A schedule as a picture of text, one line a rank and time to the right:

    rank 0  F0 F1       B0···    B1···
    rank 1     F0 B0··· F1 B1···

F forward, B backward, I and W its halves (input, weights), each with its micro-batch; where a rank has several stages,
a letter after it says which: a for its first. A long action is filled up with dots.
"""

from __future__ import annotations

from collections.abc import Sequence

from modelworks.layout.pipeline.actions import COMPUTE, Kind, Program, stage_ranks
from modelworks.layout.pipeline.simulate import Costs, simulate
from modelworks.layout.pipeline.timeline import Timed, Timeline

LETTERS: dict[Kind, str] = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}


def draw(schedule: Program | Timeline, *, width: int | None = None) -> str:
    """Lines of text without a trailing newline. A program is drawn with forward, input and weight gradients of equal
    time. width: characters for the whole time; by default as many as the shortest action needs for its name."""
    if isinstance(schedule, Timeline):
        timeline = schedule
    else:
        timeline = simulate(schedule, Costs.even(len(stage_ranks(schedule))))
    computed = [[timed for timed in rank if timed.action.kind in COMPUTE] for rank in timeline.ranks]
    everything = [timed for rank in computed for timed in rank]
    if not everything or not timeline.makespan:
        return "nothing is computed"
    names = [_names(rank) for rank in computed]
    if width is None:
        longest = max(len(name) for rank in names for name in rank)
        shortest = min(timed.end - timed.start for timed in everything if timed.end > timed.start)
        width = round((longest + 1) * timeline.makespan / shortest)
    begin = min(timed.start for timed in everything)
    scale = width / timeline.makespan
    margin = len(f"rank {len(computed) - 1}")
    lines = []
    for number, (rank, called) in enumerate(zip(computed, names, strict=True)):
        line = [" "] * width
        for timed, name in zip(rank, called, strict=True):
            first, end = round((timed.start - begin) * scale), round((timed.end - begin) * scale)
            line[first:end] = _cell(name, end - first)
        lines.append(f"{f'rank {number}':<{margin}}  {''.join(line)}".rstrip())
    return "\n".join(lines)


def _names(rank: Sequence[Timed]) -> list[str]:
    stages = sorted({timed.action.stage for timed in rank})
    return [
        f"{LETTERS[kind]}{micro_batch}{chr(ord('a') + stages.index(stage)) if len(stages) > 1 else ''}"
        for (kind, stage, micro_batch), *_ in rank
    ]


def _cell(name: str, size: int) -> str:
    """The name, filled up to `size` with a gap at its end; only its letter where there is no room."""
    if size <= len(name):
        return name[:1].ljust(size, "·")[:size]
    return name.ljust(size - 1, "·") + " "
