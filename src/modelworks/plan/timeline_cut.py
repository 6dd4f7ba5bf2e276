"""The timeline of a pipeline's step, short enough to be drawn: begin and end, without the steady middle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def cut_curves(curves: Sequence[Sequence[tuple[float, float]]], cut: Mapping[str, Any]) -> list[list[list[float]]]:
    """Of values over time, each [seconds, value from then on], what lies where `cut_timeline` left the ranks; and the
    value with which a middle that is left out ends."""
    begin, end = cut["left_out_from_seconds"], cut["left_out_to_seconds"]
    if begin is None:
        return [[list(point) for point in curve] for curve in curves]
    kept = []
    for curve in curves:
        passed = [value for seconds, value in curve if seconds < end][-1:]
        before = [[seconds, value] for seconds, value in curve if seconds <= begin]
        after = [[seconds, value] for seconds, value in curve if seconds >= end]
        kept.append([*before, *([end, value] for value in passed), *after])
    return kept


def _middle(ranks: list[list[Timed]], most: int) -> tuple[float, float]:
    """From when to when to leave out; an empty span where everything may stay."""
    ends = sorted(timed.end for rank in ranks for timed in rank)
    starts = sorted(timed.start for rank in ranks for timed in rank)
    if len(ends) <= most:
        return ends[-1] if ends else 0.0, 0.0
    return ends[most // 2 - 1], starts[-(most // 2)]
