"""How well predictions order the layouts of a published sweep, and how well anything could.

A sweep is one model, batch, cluster and precision in one published table, with at least eight layouts. `mixed` sweeps
go by the model's name alone, over tables, and so over shapes, heads and days. Beside Spearman's rank correlation:

    repeats    of the measurements with themselves measured again, by how far repeats of one layout lie apart in that
               source: what a perfect prediction would get. Where nothing was repeated there is no such figure
    afterwards of the predictions times one factor for each tp, each pp and each micro-batch, chosen with the
               measurements in hand: what the order owes to more than the axes one by one
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks._published import Row

Array = NDArray[np.float64]
SHAPE = ("layers", "hidden", "heads", "seq")
MIXED = ("model", "n_gpus", "gpu", "global_batch_seqs", "precision")
SWEEP = ("source", "task", *SHAPE, *MIXED)
LAYOUT = ("tp", "pp", "vp", "cp", "ep", "dp", "micro_batch", "sharding", "recompute")
LEAST = 8
DRAWS = 400


def sweeps(rows: Sequence[Row], predicted: Array, measured: Array) -> dict[str, Any]:
    """Prints a line for each, and returns the figures by name."""
    noise = _noise(rows, measured)
    result: dict[str, Any] = {}
    done: list[list[int]] = []
    for kind, names in (("sweep", SWEEP), ("mixed", MIXED)):
        for places in _groups(rows, names).values():
            layouts = {tuple(rows[place].cells[name] for name in (*SHAPE, *LAYOUT)) for place in places}
            if len(layouts) < LEAST or places in done:
                continue
            done.append(places)
            inside, index = [rows[place] for place in places], np.array(places)
            key = f"{kind} {inside[0].source} " + " ".join(inside[0].cells[name] for name in MIXED)
            result[key] = _figures(inside, predicted[index], measured[index], noise.get(inside[0].source))
    for key, each in result.items():
        repeats = "" if each["repeats"] is None else f", repeats allow {each['repeats']:.2f}"
        print(
            f"rank correlation {each['spearman']:5.2f} of {each['rows']:3}: {key} "
            f"(afterwards {each['afterwards']:.2f}{repeats})"
        )
    return result


def spearman(one: Array, other: Array) -> float:
    return float(np.corrcoef(_ranks(one), _ranks(other))[0, 1])


def _figures(rows: Sequence[Row], predicted: Array, measured: Array, noise: float | None) -> dict[str, Any]:
    return {
        "rows": len(rows),
        "spearman": spearman(predicted, measured),
        "afterwards": spearman(predicted * np.exp(_by_axis(rows, predicted, measured)), measured),
        "repeats": None if noise is None else _with_itself(measured, noise),
    }


def _by_axis(rows: Sequence[Row], predicted: Array, measured: Array) -> Array:
    """Least squares of the errors' logarithm on one constant for each value of each axis."""
    columns = [np.ones(len(rows))]
    for axis in ("tp", "pp", "micro_batch"):
        values = np.array([row.cells[axis] for row in rows])
        columns += [(values == value).astype(np.float64) for value in np.unique(values)[1:]]
    design, errors = np.stack(columns, axis=1), np.log(measured / predicted)
    fitted: Array = design @ np.linalg.lstsq(design, errors, rcond=None)[0]
    return fitted


def _with_itself(measured: Array, noise: float) -> float:
    generator = np.random.default_rng(0)
    draws = np.exp(generator.normal(0.0, noise, (DRAWS, len(measured))))
    return float(np.mean([spearman(measured * draw, measured) for draw in draws]))


def _noise(rows: Sequence[Row], measured: Array) -> dict[str, float]:
    """Standard deviation of a measurement's logarithm, by source, from layouts that one table has more than once."""
    squares: dict[str, list[float]] = {}
    for places in _groups(rows, (*SWEEP, *LAYOUT)).values():
        if len(places) > 1:
            logarithms = np.log(measured[places])
            squares.setdefault(rows[places[0]].source, []).append(float(logarithms.var(ddof=1)))
    return {source: float(np.sqrt(np.mean(each))) for source, each in squares.items()}


def _groups(rows: Sequence[Row], names: Sequence[str]) -> dict[tuple[str, ...], list[int]]:
    groups: dict[tuple[str, ...], list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault((row.source, *(row.cells[name] for name in names)), []).append(place)
    return groups


def _ranks(values: Array) -> Array:
    """Ranks, equal values sharing their mean rank."""
    return np.array([(values < value).sum() + ((values == value).sum() - 1) / 2 for value in values])
