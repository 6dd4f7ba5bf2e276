"""How right the planner is: predicted beside measured step time and memory, on a table of published measurements.

    python -m benchmarks.plan_accuracy FILE.csv [--json] [--rows] [--fit] [--correction] [--source NAME] [--record NAME]

FILE.csv has a row for each measurement and the columns that `_published` reads. Scored are rows that were measured,
whose configuration is complete and that contradict nothing (tiers A and B; B-mem for memory). One model, one
catalogue of devices, one set of constants for all rows. `--fit` fits the constants again and predicts each source with
those of the others. `--correction` says whether a learned correction helps rows that it has not seen (it needs
scikit-learn, and three minutes). `--json` prints an object of the same figures as its last line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks._plan_correction import accuracy
from benchmarks._plan_fit import fit, left_out, report, weights_of, with_values
from benchmarks._plan_sweeps import sweeps
from benchmarks._published import GIB, Row, read_rows, stack
from benchmarks._results import write_results
from modelworks.config import UserError
from modelworks.plan import CONSTANTS, Work, memory, model_flops, step_time

Array = NDArray[np.float64]
HEADROOM = 0.94  # of the device's memory, what a tuned run fills
NOTHING: dict[str, Any] = {"rows": 0, "mean_ape": None, "median_ape": None, "worst_ape": None, "by_source": {}}
SHARES = (0.0, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0)  # `Split.recompute`, least first


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--json", action="store_true", help="the figures as one object, on the last line")
    parser.add_argument("--rows", action="store_true", help="a line for each row")
    parser.add_argument(
        "--fit", action="store_true", help="fit the constants again, and leave out one source at a time"
    )
    parser.add_argument("--correction", action="store_true", help="the learned correction, on what it has not seen")
    parser.add_argument("--source", help="rows of this source only")
    parser.add_argument("--record", metavar="NAME", help="write the figures to results/NAME.json")
    options = parser.parse_args(arguments)
    try:
        rows, skipped = read_rows(options.file)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = [row for row in rows if options.source in (None, row.source)]
    timed = [row for row in rows if row.step_time and not row.out_of_memory]
    weighed = [row for row in rows if row.memory and not row.out_of_memory]
    for reason, count in sorted(skipped.items()):
        print(f"not scored: {count} rows, {reason}")
    if not timed and not weighed:
        print("error: no row of the file can be scored", file=sys.stderr)
        return 2
    result: dict[str, Any] = {"step_time": dict(NOTHING), "memory": dict(NOTHING), "not_scored": skipped}
    if timed:
        try:
            result["step_time"] = _step_time(timed, options.rows, options.fit, options.correction)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    if weighed:
        result["memory"] = _memory(weighed, options.rows)
    if options.record:
        print(write_results(options.record, result))
    if options.json:
        print(json.dumps(result))
    return 0


def prepared(rows: Sequence[Row]) -> Work:
    """The rows as columns. What a row does not print about recomputation is the least that fits the device."""
    work = stack(rows)
    unknown = np.array([row.recompute == "" for row in rows])
    chosen = np.full(len(rows), SHARES[-1])
    for share in reversed(SHARES):
        trial = replace(work, split=work.split.with_(recompute=np.full(len(rows), share)))
        chosen = np.where(memory(trial).total <= HEADROOM * work.machine.memory, share, chosen)
    return replace(work, split=work.split.with_(recompute=np.where(unknown, chosen, work.split.recompute)))


def _step_time(rows: Sequence[Row], each: bool, again: bool, correction: bool) -> dict[str, Any]:
    measured = np.array([float(row.step_time or 0.0) for row in rows])
    work = prepared(rows)
    predicted = np.broadcast_to(np.asarray(step_time(work).total, dtype=np.float64), measured.shape)
    if each:
        _print_rows(rows, work, predicted, measured)
    print("\nstep time, seconds")
    result = _scores(rows, predicted, measured)
    result["rank_correlation"] = sweeps(rows, predicted, measured)
    if again:
        names = np.array([_family(row.source) for row in rows])
        values = fit(work, measured, weights_of(names))
        print("\nconstants fitted on all rows\n" + "\n".join(report(values, CONSTANTS)))
        fitted = np.asarray(step_time(with_values(work, values)).total)
        print("\nstep time with these")
        result["fitted"] = _scores(rows, fitted, measured)
        print("\nstep time, each source with constants fitted on the others")
        # without the figures of the catalogue that were fitted on these very rows (what Blackwell sustains)
        bare = replace(work, machine=work.machine.with_(sustained=np.ones(len(rows))))
        result["left_out"] = _scores(
            rows, left_out(lambda mask: _part(work, mask), lambda mask: _part(bare, mask), names, measured), measured
        )
    if correction:
        sources, models = [_family(row.source) for row in rows], [row.cells["model"] for row in rows]
        result["correction"] = accuracy(lambda mask: _part(work, mask), predicted, measured, sources, models)
    return result


def _memory(rows: Sequence[Row], each: bool) -> dict[str, Any]:
    measured = np.array([float(row.memory or 0.0) for row in rows])
    work = prepared(rows)
    predicted = np.broadcast_to(np.asarray(memory(work).total, dtype=np.float64), measured.shape)
    if each:
        for row, bytes_, truth in zip(rows, predicted, measured, strict=True):
            print(f"{row.id:20} memory {bytes_ / GIB:7.1f} GiB  measured {truth / GIB:7.1f}  {bytes_ / truth - 1:+.1%}")
    print("\nmemory")
    return _scores(rows, predicted, measured)


def _print_rows(rows: Sequence[Row], work: Work, predicted: Array, measured: Array) -> None:
    per_token, _ = model_flops(work)
    split = work.split
    for index, row in enumerate(rows):
        tokens = split.global_batch[index] * split.seq_len[index]
        devices = float(row.cells["n_gpus"])
        peak = work.machine.peak[index] * devices
        seconds, truth = predicted[index], measured[index]
        rates = " / ".join(f"{tokens / time / devices:8.0f} tokens/s {per_token[index] * tokens / time / peak:6.1%}"
                           for time in (seconds, truth))  # fmt: skip
        print(
            f"{row.id:20} {seconds:9.3f} s  measured {truth:9.3f}  {seconds / truth - 1:+7.1%}  a device: {rates} MFU"
        )


def _scores(rows: Sequence[Row], predicted: Array, measured: Array) -> dict[str, Any]:
    errors = predicted / measured - 1.0
    by_source: dict[str, Any] = {}
    for name in dict.fromkeys(row.source for row in rows):
        by_source[name] = _score(errors[[row.source == name for row in rows]])
    total = _score(errors)
    print(f"{'source':>16} {'rows':>5} {'mean':>7} {'median':>7} {'worst':>7} {'bias':>7}")
    for name, score in (*by_source.items(), ("all", total)):
        figures = " ".join(f"{score[key]:7.1%}" for key in ("mean_ape", "median_ape", "worst_ape", "bias"))
        print(f"{name:>16} {score['rows']:5} {figures}")
    return {**total, "by_source": by_source}


def _score(errors: Array) -> dict[str, Any]:
    sizes = np.abs(errors)
    return {
        "rows": len(errors),
        "mean_ape": float(sizes.mean()),
        "median_ape": float(np.median(sizes)),
        "worst_ape": float(sizes.max()),
        "bias": float(errors.mean()),
    }


def _part(work: Work, mask: NDArray[np.bool_]) -> Work:
    names = ("shape", "split", "machine", "numerics", "software")

    def take(columns: Any) -> Any:
        return type(columns)(**{key: None if value is None else value[mask] for key, value in vars(columns).items()})

    return replace(work, **{name: take(getattr(work, name)) for name in names})


def _family(source: str) -> str:
    """Editions of the same tables count as one source."""
    return source.removesuffix("_old")


if __name__ == "__main__":
    sys.exit(main())
