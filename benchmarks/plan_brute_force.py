"""How often the search of layouts misses the best one: small spaces, drawn at random, against evaluating all of them.

    python -m benchmarks.plan_brute_force --spaces 50 --seeds 3

Dense models and models of experts of few layers (tied, with grouped keys, with learned positions), 2 to 8 devices, up
to 1,500 layouts each (`--layouts`), without partitions of their own. The memory limit is drawn among the layouts' own
needs, so that it binds. Fewer devices are searched and evaluated too. Each goal is held against the best of all
layouts: the fastest, the one of least memory, the fewest devices, and the fewest device-seconds. A layout within 1 % of
the best is a tie and no miss. Writes results/plan_brute_force.json.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

from benchmarks._results import write_results
from modelworks.config import ModelConfig, UserError
from modelworks.hardware import device
from modelworks.plan import Candidate, Job, Limits, Prediction, Search, evaluate, search
from modelworks.plan.found import TIE
from modelworks.plan.spaces import splits, with_schedules

DEFAULT_PARTITION = {"pp_partition": "auto"}
GOALS = ("fastest", "least memory", "fewest devices", "cheapest")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spaces", type=int, default=50, help="of each seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--layouts", type=int, default=1500, help="the most of a space with so many devices")
    parser.add_argument("--no-results", action="store_true", help="print only, write no file")
    arguments = parser.parse_args()
    rows = list[dict[str, Any]]()
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        draw, found = random.Random(seed), list[dict[str, Any]]()
        while len(found) < arguments.spaces:
            if row := compared(draw, arguments.layouts):
                found.append({"seed": seed, **row})
                print(found[-1], flush=True)
        rows += found
    results = {
        "spaces": len(rows),
        "layouts": sum(row["layouts"] for row in rows),
        "none_found": sum(row["over"] is None for row in rows),
        "missed": {name: sum(row["over"] is not None and row["over"][name] > TIE for row in rows) for name in GOALS},
        "worst": {name: max(row["over"][name] for row in rows if row["over"] is not None) for name in GOALS},
        "rows": rows,
    }
    print({key: value for key, value in results.items() if key != "rows"})
    if not arguments.no_results:
        print(write_results("plan_brute_force", results))


def compared(draw: random.Random, most: int) -> dict[str, Any] | None:
    """over: by how much each goal of the search is above the best of all layouts, as a share; None where nothing was
    found. None for a space that is empty, too large or without a layout that fits."""
    job = drawn_job(draw)
    layouts = {job.n_devices: every_layout(job, job.n_devices, most)}
    if not layouts[job.n_devices]:
        return None
    layouts |= {size: every_layout(job, size, most) for size in sizes(job)[:-1]}
    needs = sorted(prediction.memory for _, prediction in layouts[job.n_devices])
    limit = needs[int(draw.random() ** 2 * (len(needs) - 1))] * (1.0 + 1e-9)  # more often a tight one
    headroom = max(0.0, 1.0 - limit / (job.device.memory_gb * 1e9))
    limit = (1.0 - headroom) * job.device.memory_gb * 1e9
    fitting = {
        size: [each for _, each in mine if each.memory <= limit]
        for size, mine in layouts.items()
        if any(each.memory <= limit for _, each in mine)
    }
    if job.n_devices not in fitting:
        return None
    found = search(job, Limits(DEFAULT_PARTITION, headroom=headroom))
    return {
        "devices": job.n_devices,
        "layouts": sum(map(len, layouts.values())),
        "fitting": len(fitting[job.n_devices]),
        "over": over(found, fitting, job.n_devices) if found.best else None,
    }


def over(found: Search, fitting: dict[int, list[Prediction]], n_devices: int) -> dict[str, float]:
    """By how much each goal is above the best there is; of the fewest devices both the number and its seconds."""
    goals, mine = found.goals, fitting[n_devices]
    few = min(fitting)
    seconds = {size: min(each.step_seconds for each in each_of) for size, each_of in fitting.items()}
    least = min(each.memory for each in mine)
    devices = goals["fewest devices"].candidate.n_devices / few - 1.0
    cost = goals["cheapest"].candidate.n_devices * goals["cheapest"].prediction.step_seconds
    return {
        "fastest": found.best[0].prediction.step_seconds / seconds[n_devices] - 1.0,
        "least memory": goals["least memory"].prediction.memory / least - 1.0,
        "fewest devices": devices or goals["fewest devices"].prediction.step_seconds / seconds[few] - 1.0,
        "cheapest": cost / min(size * each for size, each in seconds.items()) - 1.0,
    }


def every_layout(job: Job, n_devices: int, most: int) -> list[tuple[Candidate, Prediction]]:
    """All of them, predicted in full; none where there are too many."""
    try:
        every = with_schedules(job, Limits(DEFAULT_PARTITION, headroom=0.0), splits(job, Limits(), n_devices))
    except UserError:
        return []
    if len(every) > most:
        return []
    candidates = [every.candidate(job, index, {}) for index in range(len(every))]
    return [(each, evaluate(each, timeline=False)) for each in candidates]


def sizes(job: Job) -> list[int]:
    """Numbers of devices that the search compares: the job's own, and those below it that divide a node."""
    return [size for size in (1, 2, 4) if size < job.n_devices] + [job.n_devices]


def drawn_job(draw: random.Random) -> Job:
    n_heads = draw.choice([2, 4, 8])
    width = n_heads * draw.choice([64, 128])
    n_layers = draw.choice([3, 4, 6, 8])
    options: dict[str, Any] = {"n_experts": 4, "d_expert": width} if draw.random() < 0.25 else {}
    if options and draw.random() < 0.3:
        options["dense_layers"] = [0]
    if draw.random() < 0.3:
        options["tie_embeddings"] = True
    if draw.random() < 0.3:
        options["n_kv_heads"] = n_heads // 2
    if not options and draw.random() < 0.3:
        options["family"] = "gpt2"
    model = ModelConfig(
        n_layers=n_layers,
        d_model=width,
        n_heads=n_heads,
        vocab_size=draw.choice([1000, 32_000, 128_000]),
        max_seq_len=65_536,
        **options,
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
