"""Pipeline parallelism on paper: which layers each stage holds, and schedules as data. No torch.

A schedule is built, validated, drawn and costed here, before it runs; `modelworks.parallel.pipeline` runs it.
"""

from modelworks.layout.pipeline.actions import FULL_GRADIENT, Action, Kind, Program, stage_ranks
from modelworks.layout.pipeline.draw import draw
from modelworks.layout.pipeline.formulas import bubble_formula, peak_formula
from modelworks.layout.pipeline.orders import SCHEDULES, compute_orders, placed_stages, rounds
from modelworks.layout.pipeline.partition import least_maximum, partition_layers, stage_costs, stage_layers
from modelworks.layout.pipeline.program import build_program, forward_program
from modelworks.layout.pipeline.simulate import Costs, Rehearsal, simulate
from modelworks.layout.pipeline.timeline import Timed, Timeline, chrome_trace
from modelworks.layout.pipeline.validate import validate_program

__all__ = [
    "FULL_GRADIENT",
    "SCHEDULES",
    "Action",
    "Costs",
    "Kind",
    "Program",
    "Rehearsal",
    "Timed",
    "Timeline",
    "bubble_formula",
    "build_program",
    "chrome_trace",
    "compute_orders",
    "draw",
    "forward_program",
    "least_maximum",
    "partition_layers",
    "peak_formula",
    "placed_stages",
    "rounds",
    "simulate",
    "stage_costs",
    "stage_layers",
    "stage_ranks",
    "validate_program",
]
