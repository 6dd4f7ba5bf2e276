"""Random layouts against one process, in float64: how many are equal, and the largest errors.

    python -m benchmarks.verify_random --examples 100 [--seed N] [--ranks N]

Layouts and the settings they touch are drawn by hypothesis (`tests/verify/random_runs.py`), kept where the layout fits
the run, and verified on a pool of workers. Writes results/verify_random.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS / "verify"), str(TESTS / "parallel")]


def main() -> None:
    from hypothesis import HealthCheck, Phase, given, seed, settings
    from pool import WorkerPool
    from random_runs import small_runs
    from runs import as_text, verified

    from benchmarks._results import write_results
    from modelworks.config import RunConfig
    from modelworks.layout import Layout
    from modelworks.layout.feasible import describe

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=8, help="at most so many")
    parser.add_argument("--no-results", action="store_true", help="print only, write no file")
    arguments = parser.parse_args()
    pool, rows = WorkerPool(), list[dict[str, Any]]()

    @seed(arguments.seed)
    @given(run=small_runs(arguments.ranks))
    @settings(
        max_examples=arguments.examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def verify(run: RunConfig) -> None:
        text, begin = as_text(run), time.perf_counter()
        row: dict[str, Any] = {"layout": describe(run.parallel), "family": run.model.family}
        try:
            found, *_ = pool.run(verified, Layout.of(run.parallel), text, n_kv_heads=run.model.n_kv_heads)
            row |= {"equal": found["equal"], "errors": found["errors"], "suspects": found["suspects"]}
        except AssertionError as error:  # a rank that raised or hung
            row |= {"equal": False, "errors": {}, "suspects": [str(error)[-2000:]]}
        if not row["equal"]:
            row["config"] = text
        rows.append(row)
        print(f"{len(rows)} {row['layout']} {row['family']} {'equal' if row['equal'] else 'DIFFERENT'} "
              f"({time.perf_counter() - begin:.1f} s) {row['suspects'] or ''}", flush=True)  # fmt: skip

    verify()
    pool.stop()
    quantities = {name for row in rows for name in row["errors"]}
    results = {
        "examples": len(rows),
        "equal": sum(row["equal"] for row in rows),
        "layouts": len({row["layout"] for row in rows}),
        "largest_errors": {q: max(row["errors"][q] for row in rows if row["errors"]) for q in sorted(quantities)},
        "different": [row for row in rows if not row["equal"]],
    }
    print({key: value for key, value in results.items() if key != "different"})
    if not arguments.no_results:
        print(write_results("verify_random", results))


if __name__ == "__main__":
    main()
