"""What a run would cost on machines that are not rented yet: memory, time and exchanges, as arithmetic. No torch.

`evaluate` predicts one `Candidate` with everything that explains it. `step_time` and `memory` work on columns: one
model against arrays of layouts, or a table of measurements; see `columns`.
"""

from modelworks.plan.candidate import Candidate, Prediction, evaluate, work_of
from modelworks.plan.columns import Shape, Split
from modelworks.plan.compute import Work, model_flops
from modelworks.plan.constants import CONSTANTS, Constants
from modelworks.plan.explain import explain
from modelworks.plan.found import Attempt, Found, Nearest, Neighbour, Points, Search
from modelworks.plan.job import HEADROOM, Job, Limits
from modelworks.plan.machine import Machine, Numerics
from modelworks.plan.memory import Memory, layer_activations, memory
from modelworks.plan.search import search
from modelworks.plan.software import (
    FSDP,
    MEGATRON_2021,
    MEGATRON_CORE,
    MEGATRON_DEEPSPEED,
    MODELWORKS,
    ZERO3_2021,
    Software,
)
from modelworks.plan.step_time import StepTime, step_time
from modelworks.plan.stored import Stored, stored

__all__ = [
    "CONSTANTS",
    "FSDP",
    "HEADROOM",
    "MEGATRON_2021",
    "MEGATRON_CORE",
    "MEGATRON_DEEPSPEED",
    "MODELWORKS",
    "ZERO3_2021",
    "Attempt",
    "Candidate",
    "Constants",
    "Found",
    "Job",
    "Limits",
    "Machine",
    "Memory",
    "Nearest",
    "Neighbour",
    "Numerics",
    "Points",
    "Prediction",
    "Search",
    "Shape",
    "Software",
    "Split",
    "StepTime",
    "Stored",
    "Work",
    "evaluate",
    "explain",
    "layer_activations",
    "memory",
    "model_flops",
    "search",
    "step_time",
    "stored",
    "work_of",
]
