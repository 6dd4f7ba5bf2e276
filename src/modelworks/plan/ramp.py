"""What a run asks of its layout beside steps of its full batch: stages of a batch ramp, and states to go back to.

A layout is chosen for the full batch, which most steps have. With it and its micro-batch the other stages are predicted
one by one; a stage that it cannot divide is a problem, which the trainer would refuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from modelworks.config import HELD_STATES, BatchSizes, UserError
from modelworks.plan.candidate import Candidate, evaluate
from modelworks.plan.worlds import node_size


@dataclass(frozen=True)
class RampStage:
    """rows: of a step. first_step: counted from 0. step_seconds: None where the layout cannot make such a step, and
    then problem says why."""

    rows: int
    first_step: int
    step_seconds: float | None
    problem: str = ""


def ramp_stages(batches: BatchSizes, candidate: Candidate) -> list[RampStage]:
    """Every stage, the full batch last; empty without a ramp."""
    return [_stage(stage.rows, stage.first_step, candidate) for stage in batches.stages] if batches.ramps else []


def ramp_seconds(stages: Sequence[RampStage], steps: int) -> float | None:
    """Of the first `steps` steps; None where one of them cannot be made."""
    ends = [*(after.first_step for _, after in pairwise(stages)), steps]
    total = 0.0
    for stage, end in zip(stages, ends, strict=True):
        made = max(0, min(end, steps) - stage.first_step)
        if made and stage.step_seconds is None:
            return None
        total += made * (stage.step_seconds or 0.0)
    return total


def rollback_bytes(candidate: Candidate) -> float:
    """In the memory of a host whose devices are all as full as the fullest rank: its states to go back to, each the
    parameters and the optimiser's state (see `health.rollback_from`)."""
    at_home = replace(candidate, parallel=candidate.parallel.model_copy(update={"offload": "none"}))
    stored = evaluate(at_home, timeline=False).by_stage
    ranks = min(candidate.n_devices, node_size(candidate.device))
    return float(HELD_STATES * ranks * max(each.parameters + each.optimizer for each in stored))


def _stage(rows: int, first_step: int, candidate: Candidate) -> RampStage:
    each = rows // (candidate.parallel.dp_replicate * candidate.parallel.dp_shard)
    micro_batch = max(1, min(candidate.micro_batch, each))
    try:
        found = evaluate(replace(candidate, global_batch=rows, micro_batch=micro_batch), timeline=False)
    except UserError as error:
        return RampStage(rows, first_step, None, str(error))
    return RampStage(rows, first_step, found.step_seconds)
