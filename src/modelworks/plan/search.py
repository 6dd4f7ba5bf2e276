"""The search: which layouts of a job are best, of all that the trainer accepts, for each end that a user may have.

`table` does it for one number of devices, `worlds` for fewer of them, `neighbours` looks around the winner, and
`nearest` says what is missing where nothing fits.
"""

from __future__ import annotations

import time
from dataclasses import replace

from modelworks.config import UserError
from modelworks.plan.candidate import evaluate
from modelworks.plan.constants import CONSTANTS, Constants
from modelworks.plan.found import Found as Found
from modelworks.plan.found import Nearest, Neighbour
from modelworks.plan.found import Points as Points
from modelworks.plan.found import Search as Search
from modelworks.plan.job import Job, Limits
from modelworks.plan.nearest import nearest_that_fits
from modelworks.plan.neighbours import neighbours_of
from modelworks.plan.placements import Placements
from modelworks.plan.table import Table
from modelworks.plan.worlds import cheapest, fewest


def search(job: Job, limits: Limits | None = None, *, top: int = 10, constants: Constants = CONSTANTS) -> Search:
    """The best layouts of a job. top: how many. Raises UserError where the limits leave none that the trainer accepts.

    Only the first of `best` has its timeline; `evaluate` gives that of any other.
    """
    began = time.perf_counter()
    limits = limits or Limits()
    placements = Placements(job, limits)
    table = Table(job, limits, job.n_devices, constants, placements)
    if not len(table):
        raise UserError(_no_layout(job, limits))
    best = table.best(max(top, 1))
    goals: dict[str, Found] = {}
    around: list[Neighbour] = []
    nothing: Nearest | None = None
    if best:
        whole = evaluate(best[0].candidate, constants, headroom=limits.headroom)
        best[0] = replace(best[0], prediction=whole)
        around = neighbours_of(best[0], job, limits, constants)
        goals = _goals(best, table, job, limits, constants, placements)
    else:
        nothing = nearest_that_fits(job, limits, table, constants)
    return Search(
        job,
        limits,
        best=best,
        goals=goals,
        neighbours=around,
        nothing_fits=nothing,
        evaluated=len(table.points.step),
        fitting=int(table.points.fits.sum()),
        simulated=table.simulated,
        left_out=table.left_out,
        points=table.points,
        seconds=time.perf_counter() - began,
    )


def _goals(
    best: list[Found], table: Table, job: Job, limits: Limits, constants: Constants, placements: Placements
) -> dict[str, Found]:
    least = [each for each in (table.least_memory(), *best) if each is not None and each.prediction.fits]
    goals = {
        "fastest": best[0],
        "least memory": min(least, key=lambda each: (each.prediction.memory, each.prediction.step_seconds)),
    }
    few = fewest(job, limits, constants, placements) or best[0]
    goals["fewest devices"] = few
    goals["cheapest"] = cheapest(job, limits, constants, placements, few, best[0])
    return goals


def _no_layout(job: Job, limits: Limits) -> str:
    fixed = ", ".join(f"{key}={value}" for key, value in limits.fixed.items())
    if limits.max_tp is not None:
        fixed = f"{fixed}, tp at most {limits.max_tp}".removeprefix(", ")
    wish = f" with {fixed}" if fixed else ""
    return (
        f"no layout of {job.n_devices:,} devices{wish} is accepted by the trainer for {job.global_batch:,} rows of "
        f"{job.seq_len:,} tokens: dp_replicate * dp_shard must divide the rows, tp the heads ({job.model.n_heads}); "
        f"pp is at most {job.model.n_layers + 2} for {job.model.n_layers} layers"
    )
