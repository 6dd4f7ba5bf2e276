"""The timeline of a pipeline's step, short enough to be drawn: begin and end, without the steady middle."""

from __future__ import annotations

from typing import Any

from modelworks.layout.pipeline import Timed, Timeline

PER_RANK = 44  # computations that can be told apart in a drawing
_DRAWN = ("forward", "backward", "backward_input", "backward_weight")


def cut_timeline(timeline: Timeline, per_rank: int = PER_RANK) -> dict[str, Any]:
    """ranks: for each along the pipeline, [kind, stage, micro-batch, start, end] in seconds of the step.

    Where there are more than `per_rank` computations a rank, only those remain that end before
    `left_out_from_seconds` or start after `left_out_to_seconds`; both are null where all are there.
    """
    computed = [[timed for timed in rank if timed.action.kind in _DRAWN] for rank in timeline.ranks]
    begin, end = _middle(computed, per_rank * len(computed))
    kept = [[timed for timed in rank if timed.end <= begin or timed.start >= end] for rank in computed]
    whole = begin >= end
    return {
        "makespan_seconds": timeline.makespan,
        "left_out": sum(map(len, computed)) - sum(map(len, kept)),
        "left_out_from_seconds": None if whole else begin,
        "left_out_to_seconds": None if whole else end,
        "ranks": [[[*timed.action, timed.start, timed.end] for timed in rank] for rank in kept],
    }


def _middle(ranks: list[list[Timed]], most: int) -> tuple[float, float]:
    """From when to when to leave out; an empty span where everything may stay."""
    ends = sorted(timed.end for rank in ranks for timed in rank)
    starts = sorted(timed.start for rank in ranks for timed in rank)
    if len(ends) <= most:
        return ends[-1] if ends else 0.0, 0.0
    return ends[most // 2 - 1], starts[-(most // 2)]
