"""Bytes of each rank along the pipeline, by what they hold.

`memory` looks at the first and the last rank, in closed forms. Here each rank has the layers that the trainer gives it,
what it stores to the byte, and the micro-batches that the simulated schedule has in flight there.
"""

from __future__ import annotations

from dataclasses import fields

from modelworks.layout import Layout, stages_of
from modelworks.plan.candidate import Candidate, Prediction, work_of
from modelworks.plan.columns import Split
from modelworks.plan.constants import CONSTANTS, Constants
from modelworks.plan.memory import rank_memory
from modelworks.plan.stored import stages


def stage_bytes(
    candidate: Candidate, prediction: Prediction, constants: Constants = CONSTANTS
) -> list[dict[str, float]]:
    """For each rank along the pipeline, bytes by the names of `Prediction.bytes`."""
    model, parallel = candidate.model, candidate.parallel
    if prediction.timeline is None:
        return [dict(prediction.bytes)]
    split = Split.of(
        parallel,
        micro_batch=candidate.micro_batch,
        global_batch=candidate.global_batch,
        seq_len=candidate.seq_len,
        recompute=candidate.recompute,
    )
    work = work_of(
        model, split, candidate.device, precision=candidate.precision, software=candidate.software, constants=constants
    )
    placed, peaks = stages(model, parallel, candidate.seq_len), prediction.timeline.peak_held
    layout, found = Layout(pp=parallel.pp), []
    for rank, stored in enumerate(prediction.by_stage):
        mine = stages_of(layout, parallel, rank)
        layers = sum(len(placed[stage]) for stage in mine)
        kept = sum(len(placed[stage]) * peaks[stage] for stage in mine)  # layers times micro-batches
        has_loss = float(len(placed) - 1 in mine)
        held = rank_memory(work, layers=float(layers), held=kept / max(layers, 1), ends=1.0, has_loss=has_loss)
        bytes_of = {field.name: float(getattr(held, field.name)) for field in fields(held)}
        bytes_of |= {
            "parameters": float(stored.parameters),
            "gradients": float(stored.gradients),
            "optimizer": float(stored.optimizer),
        }
        found.append(bytes_of)
    return found
