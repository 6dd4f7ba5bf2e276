"""Drawings of a plan as numbers for the templates: stacked bars, the pipeline's schedule, the scatter of a search.

Everything is worked out here; the page needs no script to show it. Lengths are in the drawing's own units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from modelworks.report import numbers
from modelworks.report.split import DRAWN, GAP, LANE, MARGIN, WIDTH

_HEIGHT = 380  # of the scatter
_LEFT, _BELOW = 64, 34  # room for its labels
_CUT = 26  # width of what stands for the middle that is left out
_STEPS = 150  # height of curves over a step
_CURVES = 7  # of them, that can be told apart


def stacked_bars(
    rows: Sequence[tuple[str, Sequence[float]]],
    groups: Sequence[tuple[str, int, Any]],
    text: Callable[[float], str],
    limit: float | None = None,
) -> dict[str, Any]:
    """Bars of parts, all to one scale. rows: label and the value of each group. limit: a mark across all bars."""
    longest = max([sum(values) for _, values in rows] + [limit or 0.0]) or 1.0
    used = [place for place in range(len(groups)) if any(values[place] > 0 for _, values in rows)]
    bars = [
        {
            "label": label,
            "total": text(sum(values)),
            "over": limit is not None and sum(values) > limit,
            "parts": [
                {
                    "colour": groups[place][1],
                    "width": round(100 * values[place] / longest, 3),
                    "title": f"{groups[place][0]}: {text(values[place])}",
                }
                for place in used
            ],
        }
        for label, values in rows
    ]
    return {
        "bars": bars,
        "legend": [{"name": groups[place][0], "colour": groups[place][1]} for place in used],
        "limit": None if limit is None else round(100 * limit / longest, 3),
        "limit_text": "" if limit is None else text(limit),
        "head": ["", *(groups[place][0] for place in used), "all"],
        "rows": [[label, *(text(values[place]) for place in used), text(sum(values))] for label, values in rows],
    }


def gantt(timeline: Mapping[str, Any]) -> dict[str, Any] | None:
    """Boxes of what each rank along the pipeline computes when; None for a timeline without computations."""
    ranks = timeline["ranks"]
    ends = [row[4] for rank in ranks for row in rank]
    if not ends or max(ends) <= 0.0:
        return None
    clock = _Clock(timeline, max(ends))
    lane = LANE if len(ranks) <= 16 else 14 if len(ranks) <= 40 else 7
    gap = GAP if len(ranks) <= 16 else 2 if len(ranks) <= 40 else 1
    boxes = []
    for number, rank in enumerate(ranks):
        first = min((row[1] for row in rank), default=0)
        for kind, stage, micro_batch, start, stop in rank:
            letter, colour = DRAWN[kind]
            width = max((stop - start) * clock.scale, 0.3)
            boxes.append(
                {
                    "x": round(clock.at(start), 2),
                    "y": number * (lane + gap),
                    "width": round(width, 2),
                    "colour": colour,
                    "faint": stage != first,
                    "label": f"{letter}{micro_batch}" if width > 22 and lane == LANE else "",
                    "title": f"{kind.replace('_', ' ')} of micro-batch {micro_batch}, stage {stage}: "
                    f"{(stop - start) * 1e3:.3g} ms from {start:.4g} s",
                }
            )
    kinds = {row[0] for rank in ranks for row in rank}
    every = 1 if lane == LANE else 4 if lane == 14 else 8
    return {
        "boxes": boxes,
        "lanes": [
            {"label": f"stage {number}", "y": round(number * (lane + gap) + 0.5 * lane + 4, 1)}
            for number in range(0, len(ranks), every)
        ],
        "lane": lane,
        "width": WIDTH,
        "height": len(ranks) * (lane + gap),
        "cut": clock.cut,
        "legend": [
            {"colour": colour, "text": f"{letter} {kind.replace('_', ' ')}"}
            for kind, (letter, colour) in DRAWN.items()
            if kind in kinds
        ],
        "several": any(len({row[1] for row in rank}) > 1 for rank in ranks),
        "seconds": f"{timeline['makespan_seconds']:,.3g}",
        "left_out": f"{timeline['left_out']:,}" if clock.cut else "",
    }


def steps(timeline: Mapping[str, Any], curves: Sequence[Sequence[Sequence[float]]]) -> dict[str, Any] | None:
    """Bytes of each rank along the pipeline over its step, above the same moments as in `gantt`; None where that draws
    none, or nothing is kept. curves: by rank, [seconds, bytes from then on]. Of many ranks some are drawn, evenly."""
    ends = [row[4] for rank in timeline["ranks"] for row in rank]
    most = max((value for curve in curves for _, value in curve), default=0.0)
    if not ends or max(ends) <= 0.0 or most <= 0.0:
        return None
    clock = _Clock(timeline, max(ends))
    drawn = min(len(curves), _CURVES)
    ranks = [round(place * (len(curves) - 1) / max(drawn - 1, 1)) for place in range(drawn)]
    ticks = _even_ticks(most)

    def up(value: float) -> float:
        return round(_STEPS - 4 - value / most * (_STEPS - 16), 1)

    return {
        "width": WIDTH,
        "height": _STEPS,
        "left": MARGIN,
        "cut": clock.cut,
        "paths": [
            {
                "colour": colour,
                "text": f"stage {rank}",
                "d": f"M{clock.at(curves[rank][0][0]):.1f} {up(0.0)}"
                + "".join(f"H{clock.at(seconds):.1f}V{up(value)}" for seconds, value in curves[rank]),
            }
            for colour, rank in enumerate(ranks)
            if curves[rank]
        ],
        "ticks": [{"at": up(value), "text": f"{value / 1e9:.4g}"} for value in ticks],
    }


def _even_ticks(most: float) -> list[float]:
    """From 0 on, two to five of them."""
    power = 10.0 ** math.floor(math.log10(most))
    step = next(each * power for each in (0.2, 0.5, 1.0, 2.0) if most / (each * power) < 5.0)
    return [step * place for place in range(int(most / step) + 1)]


class _Clock:
    """Where the moments of a step lie across a drawing, the middle that is left out taking little room. cut: where."""

    def __init__(self, timeline: Mapping[str, Any], last: float) -> None:
        self._begin, self._end = timeline["left_out_from_seconds"], timeline["left_out_to_seconds"]
        without = self._begin is None
        drawn = last - (0.0 if without else self._end - self._begin)
        self.scale = (WIDTH - MARGIN - (0 if without else _CUT)) / drawn
        self.cut = None if without else round(MARGIN + self._begin * self.scale + _CUT / 2, 1)

    def at(self, seconds: float) -> float:
        if self.cut is not None and seconds >= self._end:
            return float(MARGIN + _CUT + (seconds - self._end + self._begin) * self.scale)
        return float(MARGIN + seconds * self.scale)


def scatter(
    points: Mapping[str, Sequence[Any]], best: Sequence[tuple[float, float, str]], limit: float | None
) -> dict[str, Any]:
    """Step time against bytes, both logarithmic. best: (bytes, seconds, layout) of the ranked ones, the first first."""
    sizes = [*points["memory_bytes"], *(size for size, _, _ in best)] + ([limit] if limit else [])
    times = [*points["step_seconds"], *(time for _, time, _ in best)]
    across, up = LogAxis(sizes, _LEFT, WIDTH - 8), LogAxis(times, _HEIGHT - _BELOW, 8)
    dots = [
        {"x": across.at(size), "y": up.at(time), "fits": bool(fits)}
        for size, time, fits in zip(points["memory_bytes"], points["step_seconds"], points["fits"], strict=True)
    ]
    return {
        "width": WIDTH,
        "height": _HEIGHT,
        "bottom": _HEIGHT - _BELOW,
        "left": _LEFT,
        "dots": sorted(dots, key=lambda dot: dot["fits"]),
        "best": [
            {"x": across.at(size), "y": up.at(time), "title": f"{place}. {layout}", "first": place == 1}
            for place, (size, time, layout) in enumerate(best, 1)
        ],
        "limit": across.at(limit) if limit else None,
        "x_ticks": [{"at": across.at(value), "text": f"{numbers.count(value / 1e9)}"} for value in across.ticks()],
        "y_ticks": [{"at": up.at(value), "text": f"{value:,.4g}"} for value in up.ticks()],
    }


class LogAxis:
    """A logarithmic axis from the smallest to the largest value, a little wider."""

    def __init__(self, values: Sequence[float], begin: float, end: float) -> None:
        low, high = math.log10(min(values)), math.log10(max(values))
        room = 0.03 * (high - low) or 0.1
        self.low, self.high, self.begin, self.end = low - room, high + room, begin, end

    def at(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return round(self.begin + share * (self.end - self.begin), 1)

    def ticks(self) -> list[float]:
        """1, 2, 5 and their powers of ten, or powers alone where that would be many."""
        decades = range(math.floor(self.low), math.ceil(self.high) + 1)
        steps = (1, 2, 5) if self.high - self.low < 3 else (1,)
        found = [step * 10.0**decade for decade in decades for step in steps]
        return [value for value in found if self.low <= math.log10(value) <= self.high]
