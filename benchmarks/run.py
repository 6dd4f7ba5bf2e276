"""Runs the benchmarks one after another; each prints its figures and writes `results/<name>.json`.

    python -m benchmarks.run                 # those that take minutes
    python -m benchmarks.run --all           # also ARC-Easy, question by question
    python -m benchmarks.run loader          # only these

Measure on an idle machine: another process on the same cores makes every figure meaningless.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

MINUTES = {
    "checkpoint_layouts": 5,
    "checkpoint_load": 3,
    "checkpoint_planning": 1,
    "checkpoint_save": 5,
    "loader": 1,
    "loss_memory": 4,
    "parallel": 14,
    "plan_here": 10,
    "plan_brute_force": 4,
    "plan_search": 1,
    "residual_depth": 6,
    "train_throughput": 12,
    "verify_random": 4,
}
LONG = {"arc_easy_parity": 20, "checkpoint_crashes": 10, "serve_fuzz": 10, "serve_load": 17}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join([*MINUTES, *LONG])}")
    parser.add_argument("--all", action="store_true", help="also the long ones")
    arguments = parser.parse_args()
    known = {**MINUTES, **LONG}
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}")
    names = arguments.names or list(known if arguments.all else MINUTES)
    failed = []
    for name in names:
        print(f"== {name} (about {known[name]} min)", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"]).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
