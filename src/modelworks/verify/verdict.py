"""`verify`: proof, for the user's own run, that its layout computes what one process computes.

The run is made small (`shrink`), then run twice from the same seed and batches: split over the ranks of the layout and
whole in one process, in float64. Floating-point addition is not associative, so results differ by rounding, which in
float64 is about 1e-15; a bug is rarely below 1e-6. A bound of 1e-10 leaves no doubt which it is.

In low precision both runs are noisy. There the truth is a float64 run, and the split run may be about as far from it as
the whole run is: what float64 cannot see (master weights, the dtype of sums, loss scaling) shows there.

What a verification does not see: the real size (memory, numbers that only grow large, buckets and chunks of real
length), other devices, their kernels and NCCL, torch.compile, real data and its loader, checkpoints, evaluation, other
steps of the schedule than the first, and a fault that one process has too.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from modelworks.config import RunConfig, UserError, dump_yaml, parse_run_config
from modelworks.layout import Layout
from modelworks.parallel import Mesh, SplitModel, build_mesh, joined, launch, process_group, single_process
from modelworks.train import PRECISIONS, Precision
from modelworks.verify.compare import BOUND_FLOAT64, Comparison, compare
from modelworks.verify.noise import compare_noisy, noisy_run
from modelworks.verify.runs import FLOAT64, run_split, run_whole
from modelworks.verify.shrinking import describe, shrink

VerifyPrecision = Literal["float64", "bf16"]


@dataclass(frozen=True)
class Verdict:
    """How a verification ended. collectives: of one step on rank 0, as (axis, kind, calls, bytes). memory: bytes on
    rank 0 after it. shrunk: what was made small, in words."""

    comparison: Comparison
    shrunk: str
    ranks: int
    steps: int
    precision: str
    collectives: list[dict[str, Any]]
    memory: dict[str, int]
    seconds: float

    @property
    def equal(self) -> bool:
        return self.comparison.equal

    def to_json(self) -> dict[str, Any]:
        """The fields that `--json` prints."""
        found = self.comparison
        return {
            "verdict": "equal" if found.equal else "different",
            "worst_parameter": found.worst_parameter,
            "max_relative_error": found.errors,
            "bounds": found.bounds,
            "first_layer": found.first_layer,
            "first_part": found.first_part,
            "suspects": found.suspects,
            "collectives": self.collectives,
            "memory": self.memory,
            "ranks": self.ranks,
            "steps": self.steps,
            "precision": self.precision,
            "shrunk": self.shrunk,
            "seconds": self.seconds,
        }


def verify(config: RunConfig, *, steps: int = 3, precision: VerifyPrecision = "float64", directory: Path) -> Verdict:
    """Start the ranks of the layout on this machine and compare. directory: for the ranks' output.

    Raises `UserError` where the layout does not fit the run, `RankFailed` where a rank fails.
    """
    started = time.monotonic()
    small = shrink(config)
    if precision == "float64" and steps < (sizes := len(small.batches.sizes)):
        raise UserError(f"--steps: got {steps}, expected at least {sizes}: train.batch_ramp has steps of several sizes")
    layout = Layout.of(small.parallel)
    arguments = {"config": dump_yaml(small), "steps": steps, "precision": precision}
    if layout.world_size == 1:
        found, model = verify_on(single_process(torch.device("cpu")), small, steps=steps, precision=precision)
        assert found is not None
        first = {"comparison": asdict(found), **_measured(model)}
    else:
        first, *_ = launch("modelworks.verify.verdict:verify_rank", layout.world_size, arguments, directory=directory)
    comparison = Comparison(**first.pop("comparison"))
    shrunk, seconds = describe(config, small), time.monotonic() - started
    return Verdict(comparison, shrunk, layout.world_size, steps, precision, seconds=seconds, **first)


def verify_rank(config: str, steps: int, precision: VerifyPrecision) -> dict[str, Any] | None:
    """What each started process runs; the comparison comes back from rank 0."""
    world = joined()
    assert world is not None
    small = parse_run_config(config, "the small run")
    device = torch.device("cpu")
    with process_group(world, device, small.parallel.timeout) as labels:
        mesh = build_mesh(Layout.of(small.parallel), device, n_kv_heads=small.model.n_kv_heads, labels=labels)
        found, model = verify_on(mesh, small, steps=steps, precision=precision)
        return None if found is None else {"comparison": asdict(found), **_measured(model)}


def verify_on(
    mesh: Mesh, small: RunConfig, *, steps: int, precision: VerifyPrecision = "float64"
) -> tuple[Comparison | None, SplitModel]:
    """Both runs and their comparison, which is on rank 0; every rank of the mesh must call it. small: as `shrink`
    makes it."""
    chosen = FLOAT64
    if precision != "float64":
        chosen, small = _own_precision(small), noisy_run(small)
    split, model = run_split(small, steps, chosen, mesh)
    if split is None:
        return None, model
    whole = run_whole(small, steps, chosen)
    if precision == "float64":
        return compare(whole, split, small, BOUND_FLOAT64), model
    return compare_noisy(run_whole(small, steps, FLOAT64), whole, split), model


def _own_precision(config: RunConfig) -> Precision:
    """The run's own precision; bf16 where it was left to the machine, or is float32, of which float64 says enough."""
    name = config.train.precision
    return PRECISIONS["bf16" if name in ("auto", "fp32") else name]


def _measured(model: SplitModel) -> dict[str, Any]:
    collectives = [
        {"axis": axis, "kind": kind, "calls": volume.calls, "bytes": volume.bytes}
        for axis, kind, volume in model.mesh.traffic
    ]
    return {"collectives": collectives, "memory": model.gradients.bytes()}
