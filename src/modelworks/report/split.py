"""How a run was split over processes, and what that cost: measured beside the formulas.

Read from the records that `modelworks.train.split_records` describes: collectives and memory of each rank at one of
the measured steps (the newest), and the timeline of one step of a pipeline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from modelworks.records import Record
from modelworks.report import numbers
from modelworks.report.run_data import Run, event_fields

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
CATEGORIES = ("parameters", "gradients", "optimizer")
# What is drawn of a pipeline's step: kind of action -> (letter, colour of the style sheet).
DRAWN = {"forward": ("F", 0), "backward": ("B", 1), "backward_input": ("I", 3), "backward_weight": ("W", 2)}
LANE, GAP, MARGIN, WIDTH = 26, 6, 58, 1000  # of the drawing, in its own units
ACTIONS = 4000  # drawn at most; a longer step is cut off

Tags = tuple[tuple[str, str | int], ...]
Pair = tuple[float | None, float | None]  # measured, predicted


def split_section(run: Run) -> dict[str, Any] | None:
    """What the template shows; None for a run of one process."""
    parallel = run.setting("parallel")
    degrees = {axis: parallel.get(axis, 1) for axis in AXES} if isinstance(parallel, dict) else {}
    world = 1
    for axis, degree in degrees.items():
        world *= degree if isinstance(degree, int) and axis != "ep" else 1
    if world == 1:
        return None
    tagged = _Tagged([record for record in run.tagged if not record.name.startswith("health/")])
    return {
        "layout": layout_text(degrees, parallel, world),
        "step": f"{tagged.step:,}" if tagged.step is not None else "",
        "collectives": _collectives(tagged),
        "memory": _memory(tagged),
        "held": _held(tagged),
        "bubble": _bubble(run),
        "timeline": _timeline(run),
    }


def layout_text(degrees: Mapping[str, int], parallel: Mapping[str, Any], world: int) -> str:
    """`8 ranks: pp 2 (1f1b) × dp_shard 2 (zero 3) × tp 2`."""
    remarks = {
        "pp": str(parallel.get("pp_schedule", "")),
        "dp_shard": f"zero {parallel.get('zero', 0)}",
        "cp": str(parallel.get("cp_mode", "")),
        "tp": "sequence parallel" if parallel.get("sequence_parallel", True) else "",
    }
    used = [axis for axis in AXES if degrees[axis] > 1 and axis != "ep"]
    parts = [f"{axis} {degrees[axis]}" + (f" ({remarks[axis]})" if remarks.get(axis) else "") for axis in used]
    experts = f"; experts over {degrees['ep']} ranks" if degrees["ep"] > 1 else ""
    return f"{world} ranks: {' × '.join(parts)}{experts}"


def ranks_text(ranks: Sequence[int]) -> str:
    """`0, 2-4`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


class _Tagged:
    """Values of the newest measured step by (name, kind, tags)."""

    def __init__(self, records: Sequence[Record]) -> None:
        steps = [record.step for record in records if record.name == "collectives/bytes"]
        self.step = max(steps, default=None)
        self._values: dict[tuple[str, str], dict[Tags, float]] = defaultdict(dict)
        for record in records:
            if record.step == self.step:
                tags = tuple(sorted(record.tags.items()))
                self._values[record.name, record.kind][tags] = float(record.value)

    def pairs(self, name: str) -> dict[Tags, Pair]:
        """Tags -> measured, predicted."""
        measured, predicted = (self._values[name, kind] for kind in ("measured", "predicted"))
        return {tags: (measured.get(tags), predicted.get(tags)) for tags in sorted({*measured, *predicted})}


def _collectives(tagged: _Tagged) -> list[list[str]]:
    """Rows of the table; ranks with the same figures are one row."""
    calls = tagged.pairs("collectives/calls")
    alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for tags, (size, formula) in tagged.pairs("collectives/bytes").items():
        of = dict(tags)
        made, expected = calls.get(tags, (None, None))
        ratio = f"{size / formula:.3f}" if size is not None and formula else ""
        figures = (_count(made), _count(expected), numbers.size(size), numbers.size(formula), ratio)
        alike[str(of["axis"]), str(of["kind"]), *figures].append(int(of["rank"]))
    return [[ranks_text(ranks), *key] for key, ranks in sorted(alike.items(), key=lambda item: item[0][:2])]


def _memory(tagged: _Tagged) -> list[dict[str, Any]]:
    """One entry for ranks that hold the same: bars of what was measured and of what was predicted."""
    of_rank: dict[int, dict[str, Pair]] = defaultdict(dict)
    for name in (*CATEGORIES, "gradients_accumulating"):
        for tags, pair in tagged.pairs(f"rank_memory/{name}").items():
            of_rank[int(dict(tags)["rank"])][name] = pair
    alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for rank, categories in sorted(of_rank.items()):
        alike[tuple(categories.items())].append(rank)
    totals = [_total(dict(key), side) for key in alike for side in (0, 1)]
    longest = max(totals, default=0.0) or 1.0
    return [_memory_entry(ranks_text(ranks), dict(key), longest) for key, ranks in alike.items()]


def _memory_entry(ranks: str, categories: dict[str, Pair], longest: float) -> dict[str, Any]:
    between = categories.get("gradients_accumulating")
    bars = []
    for side, label in enumerate(("measured", "predicted")):
        parts = [
            {
                "name": "optimiser state" if name == "optimizer" else name,
                "colour": CATEGORIES.index(name),
                "width": round(100 * (categories[name][side] or 0.0) / longest, 2),
                "size": numbers.size(categories[name][side]),
            }
            for name in CATEGORIES
            if name in categories
        ]
        bars.append({"label": label, "total": numbers.size(_total(categories, side)), "parts": parts})
    text = "" if between is None else f"{numbers.size(between[0])}, predicted {numbers.size(between[1])}"
    return {"ranks": ranks, "bars": bars, "between": text}


def _total(categories: dict[str, Pair], side: int) -> float:
    return sum(categories[name][side] or 0.0 for name in CATEGORIES if name in categories)


def _held(tagged: _Tagged) -> list[list[str]]:
    alike: dict[tuple[str, str], list[int]] = defaultdict(list)
    for tags, (measured, predicted) in tagged.pairs("pipeline/held").items():
        alike[_count(measured), _count(predicted)].append(int(dict(tags)["rank"]))
    return [[ranks_text(ranks), *key] for key, ranks in alike.items()]


def _bubble(run: Run) -> list[list[str]]:
    """(what, share of the time in which ranks did not compute)."""
    measured = run.last("pipeline/bubble")
    if measured is None:
        return []
    words = {
        "simple": "(p − 1) / (m + p − 1), of 1F1B with equal stages",
        "schedule": "this schedule's formula, with equal stages and no communication",
        "simulated": "simulated from the step's own durations, with no communication",
    }
    found = {str(r.tags.get("formula")): float(r.value) for r in run.tagged if r.name == "pipeline/bubble"}
    rows = [["measured", numbers.percent(measured)]]
    return rows + [[text, numbers.percent(found[name])] for name, text in words.items() if name in found]


def _timeline(run: Run) -> dict[str, Any] | None:
    """The Gantt chart of one step as boxes; None where none was recorded."""
    events = run.events_named("pipeline/timeline")
    ranks = event_fields(events[-1]).get("ranks") if events else None
    if not isinstance(ranks, list) or not ranks:
        return None
    computed = [[row for row in rank if row[0] in DRAWN] for rank in ranks]
    ends = [start + duration for rank in computed for *_, start, duration in rank]
    starts = [start for rank in computed for *_, start, _ in rank]
    if not ends or max(ends) <= min(starts):
        return None
    begin, scale = min(starts), (WIDTH - MARGIN) / (max(ends) - min(starts))
    boxes: list[dict[str, Any]] = []
    left_out = 0
    for place, rank in enumerate(computed):
        stages = sorted({stage for _, stage, *_ in rank})
        for kind, stage, micro_batch, start, duration in rank:
            if len(boxes) == ACTIONS:
                left_out += 1
                continue
            letter, colour = DRAWN[kind]
            width = max(duration * scale, 0.5)
            boxes.append(
                {
                    "x": round(MARGIN + (start - begin) * scale, 2),
                    "y": place * (LANE + GAP),
                    "width": round(width, 2),
                    "colour": colour,
                    "faint": len(stages) > 1 and stage != stages[0],
                    "label": f"{letter}{micro_batch}" if width > 22 else "",
                    "title": f"{kind.replace('_', ' ')} of micro-batch {micro_batch}, stage {stage}: "
                    f"{duration / 1000:.2f} ms",
                }
            )
    kinds = {row[0] for rank in computed for row in rank}
    return {
        "step": f"{events[-1].step:,}",
        "boxes": boxes,
        "lanes": [
            {"label": f"rank {place}", "y": place * (LANE + GAP) + 0.66 * LANE} for place in range(len(computed))
        ],
        "lane": LANE,
        "width": WIDTH,
        "height": len(computed) * (LANE + GAP),
        "milliseconds": f"{(max(ends) - begin) / 1000:,.1f}",
        "legend": [
            {"colour": colour, "text": f"{letter} {kind.replace('_', ' ')}"}
            for kind, (letter, colour) in DRAWN.items()
            if kind in kinds
        ],
        "note": f"{left_out:,} further actions are left out." if left_out else "",
    }


def _count(value: float | None) -> str:
    return numbers.MISSING if value is None else f"{value:,.0f}"
