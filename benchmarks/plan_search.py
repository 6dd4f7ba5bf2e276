"""How fast layouts are searched: listed and predicted in closed form on one core, and whole searches of 1,024 devices.

    python -m benchmarks.plan_search

Each figure is the best of three. Seconds of the processor: for busy machines. Writes `results/plan_search.json`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from benchmarks._results import write_results
from modelworks.config import preset
from modelworks.hardware import device
from modelworks.plan import Job, Limits, Search, explain, search, step_time, work_of
from modelworks.plan.columns import Array
from modelworks.plan.constants import CONSTANTS
from modelworks.plan.held import in_flight_over_step, most_held
from modelworks.plan.pipeline import seconds_of_step
from modelworks.plan.placements import Placements
from modelworks.plan.table import Table

T = TypeVar("T")
JOBS = {"llama-3-70b": (512, 8192), "gpt3-175b": (1536, 2048)}


def main() -> None:
    results = {}
    for name, (rows, seq_len) in JOBS.items():
        job = Job(preset(name), device("H100"), 1024, seq_len, rows)
        clock, processor, seconds = _best(_closed_forms, job)
        whole, computing, found = _best(_answer, job)
        results[name] = {
            "layouts_per_second": round(len(seconds) / clock),
            "layouts_per_processor_second": round(len(seconds) / processor),
            "search_seconds": round(whole, 2),
            "search_processor_seconds": round(computing, 2),
            "evaluated": found.evaluated,
            "simulated": found.simulated,
            "winner_step_seconds": found.best[0].prediction.step_seconds,
        }
        print(name, results[name])
    print(write_results("plan_search", results))


def _closed_forms(job: Job) -> Array:
    """Seconds of a step of every layout, listed, with the bytes of its fullest rank."""
    table = Table(job, Limits(), job.n_devices, CONSTANTS)
    work, stages = work_of(job.model, table.space.split(job), job.device), Placements(job, Limits()).stages(table.space)
    return np.asarray(step_time(work, stages).total)


def _answer(job: Job) -> Search:
    """With goals, neighbours and the explanation."""
    found = search(job)
    explain(found)
    return found


def _best(run: Callable[[Job], T], job: Job) -> tuple[float, float, T]:
    """(seconds on the clock, seconds of the processor), the least of each; and what was answered."""
    times = []
    for _ in range(3):
        for each in (seconds_of_step, most_held, in_flight_over_step):
            each.cache_clear()  # nothing may be remembered from the run before
        began = time.perf_counter(), time.process_time()
        found = run(job)
        times.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    return min(clock for clock, _ in times), min(processor for _, processor in times), found


if __name__ == "__main__":
    main()
