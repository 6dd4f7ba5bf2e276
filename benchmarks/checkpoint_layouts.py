"""Checkpoints of one layout that another goes on from, drawn at random: the largest error of the next 20 losses.

    python -m benchmarks.checkpoint_layouts --pairs 30 [--optimizer sgd] [--seed N]

In float64, against the run in one process that never stops, and the loaded tensors against those saved, bit for bit.
The layouts and the model, whose sizes no degree divides, are those of `tests/train/test_reshard.py`, which draws fewer
pairs of fewer steps. Writes results/checkpoint_layouts_<optimizer>.json.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS / "train"), str(TESTS / "parallel")]

BEFORE, AFTER = 3, 20  # steps under the first layout of a pair, and under the second
BOUND = 1e-12  # of a loss, relative


def main() -> None:
    from pool import WorkerPool

    from benchmarks._results import write_results

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-results", action="store_true", help="print only, write no file")
    arguments = parser.parse_args()
    pool, rows = WorkerPool(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as directory:
        for row in compared(pool, Path(directory), arguments.pairs, arguments.optimizer, arguments.seed):
            rows.append(row)
            print(f"{len(rows)} {row['from']} -> {row['to']}: largest error of a loss {row['error']:.1e}", flush=True)
    pool.stop()
    results = {
        "pairs": len(rows),
        "steps_after": AFTER,
        "optimizer": arguments.optimizer,
        "largest_error": max(row["error"] for row in rows),
        "within_bound": sum(row["error"] <= BOUND for row in rows),
        "rows": rows,
    }
    print(f"{results['within_bound']} of {len(rows)} pairs within {BOUND:.0e}")
    if not arguments.no_results:
        print(write_results(f"checkpoint_layouts_{arguments.optimizer}", results))


def compared(pool: Any, directory: Path, pairs: int, optimizer: str, seed: int) -> Any:
    """One row a pair. Raises AssertionError where a loaded tensor is not the saved one."""
    from test_reshard import EXPERTS, LAYOUTS, OF_EXPERTS, Runs, assert_same_tensors

    runs, draw, whole = Runs(pool, directory), random.Random(seed), dict[bool, list[float]]()
    layouts = LAYOUTS | OF_EXPERTS
    for _ in range(pairs):
        experts = draw.random() < 0.5
        first, second = draw.sample([*LAYOUTS, *(OF_EXPERTS if experts else ())], 2)
        model = [*(EXPERTS if experts else []), f"optimizer.name={optimizer}"]
        if experts not in whole:
            whole[experts] = runs([], model, None, BEFORE + AFTER)["losses"]
        before = runs(layouts[first], model, None, BEFORE)
        after = runs(layouts[second], model, before["trained"], AFTER)
        assert_same_tensors(after["loaded"], before["trained"], masters=False)
        losses = before["losses"] + after["losses"]
        error = max(abs(ours / theirs - 1.0) for ours, theirs in zip(losses, whole[experts], strict=True))
        yield {"from": first, "to": second, "experts": experts, "error": error}


if __name__ == "__main__":
    main()
