"""How fast layouts are searched: closed forms a second on one core, and whole searches of 1,024 devices.

    python -m benchmarks.plan_search

Each figure is the best of three. Seconds of the processor: for busy machines. Writes `results/plan_search.json`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks._results import write_results
from modelworks.config import preset
from modelworks.hardware import device
from modelworks.plan import Job, Limits, Search, explain, memory, search, step_time, work_of
from modelworks.plan.pipeline import most_held, seconds_of_step
from modelworks.plan.spaces import Placements, splits

JOBS = {"llama-3-70b": (512, 8192), "gpt3-175b": (1536, 2048)}


def main() -> None:
    results = {}
    for name, (rows, seq_len) in JOBS.items():
        job = Job(preset(name), device("H100"), 1024, seq_len, rows)
        space = splits(job, Limits(), 1024)
        stages, work = Placements(job, Limits()).stages(space), work_of(job.model, space.split(job), job.device)
        clock, processor = _best(
            lambda work=work, stages=stages: (step_time(work, stages).total, memory(work, stages).total)
        )
        found: list[Any] = []
        whole, computing = _best(lambda job=job, found=found: found.append(_answer(job)))
        results[name] = {
            "layouts_per_second": round(len(space) / clock),
            "layouts_per_processor_second": round(len(space) / processor),
            "search_seconds": round(whole, 2),
            "search_processor_seconds": round(computing, 2),
            "evaluated": found[-1].evaluated,
            "simulated": found[-1].simulated,
            "winner_step_seconds": found[-1].best[0].prediction.step_seconds,
        }
        print(name, results[name])
    print(write_results("plan_search", results))


def _answer(job: Job) -> Search:
    """With goals, neighbours and the explanation."""
    found = search(job)
    explain(found)
    return found


def _best(run: Callable[[], Any]) -> tuple[float, float]:
    """(seconds on the clock, seconds of the processor), the least of each."""
    times = []
    for _ in range(3):
        seconds_of_step.cache_clear()  # nothing may be remembered from the run before
        most_held.cache_clear()
        began = time.perf_counter(), time.process_time()
        run()
        times.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    return min(clock for clock, _ in times), min(processor for _, processor in times)


if __name__ == "__main__":
    main()
