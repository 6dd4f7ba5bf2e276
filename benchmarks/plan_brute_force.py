"""How often the search of layouts misses the best one: small spaces, drawn at random, against evaluating all of them.

    python -m benchmarks.plan_brute_force --spaces 100 [--seed N]

Dense models and models of experts of few layers, 2 to 8 devices, up to 1,500 layouts each, without partitions of their
own. The memory limit is drawn among the layouts' own needs, so that it binds. A layout within 1 % of the best is a tie
and no miss. Writes results/plan_brute_force.json.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

from benchmarks._results import write_results
from modelworks.config import ModelConfig, UserError
from modelworks.hardware import device
from modelworks.plan import Job, Limits, evaluate, search
from modelworks.plan.spaces import splits, with_schedules

TIE = 0.01
MOST_LAYOUTS = 1500
DEFAULT_PARTITION = {"pp_partition": "auto"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spaces", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-results", action="store_true", help="print only, write no file")
    arguments = parser.parse_args()
    draw, rows = random.Random(arguments.seed), list[dict[str, Any]]()
    while len(rows) < arguments.spaces:
        row = compared(draw)
        if row:
            rows.append(row)
            print(f"{len(rows)} {row['layouts']} layouts, {row['fitting']} fit: {described(row['slower'])}", flush=True)
    gaps = [row["slower"] for row in rows if row["slower"] is not None]
    results = {
        "spaces": len(rows),
        "layouts": sum(row["layouts"] for row in rows),
        "missed": sum(gap > TIE for gap in gaps),
        "none_found": len(rows) - len(gaps),
        "worst": max(gaps),
        "rows": rows,
    }
    print({key: value for key, value in results.items() if key != "rows"})
    if not arguments.no_results:
        print(write_results("plan_brute_force", results))


def described(slower: float | None) -> str:
    return "the search found none" if slower is None else f"found {slower:.2%} slower than the best"


def compared(draw: random.Random) -> dict[str, Any] | None:
    """slower: the found layout's step over the best one's, less one; None where none was found. None for a space that
    is empty, too large or without a layout that fits."""
    job = drawn_job(draw)
    try:
        every = with_schedules(job, Limits(DEFAULT_PARTITION, headroom=0.0), splits(job, Limits(), job.n_devices))
    except UserError:
        return None
    if not 0 < len(every) <= MOST_LAYOUTS:
        return None
    predictions = [evaluate(every.candidate(job, index, {}), timeline=False) for index in range(len(every))]
    needs = sorted(prediction.memory for prediction in predictions)
    limit = needs[int(draw.random() ** 2 * (len(needs) - 1))] * (1.0 + 1e-9)  # more often a tight one
    headroom = max(0.0, 1.0 - limit / (job.device.memory_gb * 1e9))
    fitting = [
        each.step_seconds for each in predictions if each.memory <= (1.0 - headroom) * job.device.memory_gb * 1e9
    ]
    if not fitting:
        return None
    found = search(job, Limits(DEFAULT_PARTITION, headroom=headroom)).best
    slower = found[0].prediction.step_seconds / min(fitting) - 1.0 if found else None
    return {"devices": job.n_devices, "layouts": len(every), "fitting": len(fitting), "slower": slower}


def drawn_job(draw: random.Random) -> Job:
    n_heads = draw.choice([2, 4, 8])
    width = n_heads * draw.choice([64, 128])
    experts: dict[str, Any] = {"n_experts": 4, "d_expert": width} if draw.random() < 0.25 else {}
    model = ModelConfig(
        n_layers=draw.choice([3, 4, 6, 8]),
        d_model=width,
        n_heads=n_heads,
        vocab_size=draw.choice([1000, 32_000, 128_000]),
        max_seq_len=65_536,
        **experts,
    )
    return Job(
        model,
        device(draw.choice(["A100", "H100"])),
        draw.choice([2, 3, 4, 6, 8]),
        draw.choice([512, 2048, 8192, 32_768]),
        draw.choice([4, 8, 12, 16]),
    )


if __name__ == "__main__":
    main()
