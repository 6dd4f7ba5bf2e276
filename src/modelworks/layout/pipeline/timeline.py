"""What happened when: the actions of each rank with their times, predicted by `simulate` or measured by the executor.

Both are read by the same definitions, so that the two can stand side by side:

    bubble fraction   1 - (time computing, all ranks) / (ranks x time from the first computation to the last)
    held              micro-batches whose forward has run on a stage and whose last gradient has not: their
                      activations are in memory
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from modelworks.layout.pipeline.actions import COMPUTE, FULL_GRADIENT, Action


class Timed(NamedTuple):
    """An action and when it ran, in seconds (or the unit of the costs). A receive lasts while its result is waited
    for."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """By rank along the pipeline axis, what it did in order."""

    ranks: tuple[tuple[Timed, ...], ...]

    @property
    def makespan(self) -> float:
        """From the start of the first computation on any rank to the end of the last."""
        computed = [timed for rank in self.ranks for timed in _computed(rank)]
        if not computed:
            return 0.0
        return max(timed.end for timed in computed) - min(timed.start for timed in computed)

    def busy(self, rank: int) -> float:
        """Time that a rank computed."""
        return sum(timed.end - timed.start for timed in _computed(self.ranks[rank]))

    @property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time in which they did not compute, 0 to 1."""
        available = len(self.ranks) * self.makespan
        return 1.0 - sum(map(self.busy, range(len(self.ranks)))) / available if available else 0.0

    @property
    def peak_held(self) -> dict[int, int]:
        """Stage -> most micro-batches held at once."""
        peaks: dict[int, int] = {}
        for rank in self.ranks:
            for stage in {timed.action.stage for timed in _computed(rank)}:
                peaks[stage] = _peak([timed.action for timed in rank if timed.action.stage == stage])
        return dict(sorted(peaks.items()))

    @property
    def peak_held_by_rank(self) -> tuple[int, ...]:
        """Most micro-batches held at once by all stages of a rank together, each (stage, micro-batch) counting one."""
        return tuple(_peak([timed.action for timed in rank]) for rank in self.ranks)


def chrome_trace(timelines: Sequence[Sequence[Timed]]) -> dict[str, Any]:
    """The timelines of ranks, times in seconds, in the format of chrome://tracing and Perfetto (JSON-serialisable)."""
    events: list[dict[str, Any]] = []
    origin = min((timed.start for rank in timelines for timed in rank), default=0.0)
    for number, rank in enumerate(timelines):
        events.append({"name": "process_name", "ph": "M", "pid": number, "args": {"name": f"pipeline rank {number}"}})
        events += [
            {
                "name": f"{kind} {micro_batch}",
                "cat": kind if kind in COMPUTE else "communication",
                "ph": "X",
                "pid": number,
                "tid": 0 if kind in COMPUTE else 1,
                "ts": (start - origin) * 1e6,  # microseconds
                "dur": (end - start) * 1e6,
                "args": {"stage": stage, "micro_batch": micro_batch},
            }
            for (kind, stage, micro_batch), start, end in rank
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _computed(rank: Sequence[Timed]) -> Iterator[Timed]:
    return (timed for timed in rank if timed.action.kind in COMPUTE)


def _peak(actions: Sequence[Action]) -> int:
    counts: Counter[str] = Counter()
    for action in actions:
        if action.kind == "forward":
            counts["now"] += 1
            counts["peak"] = max(counts["peak"], counts["now"])
        elif action.kind in FULL_GRADIENT:
            counts["now"] -= 1
    return counts["peak"]
