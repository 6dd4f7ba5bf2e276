"""A batch ramp in `verify`: steps of the full batch and of the smallest stage, and a fault that only the latter has."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from pool import WorkerPool
from runs import as_text, run_of, verified

from modelworks.config import RunConfig, UserError, parse_run_config
from modelworks.layout import Layout
from modelworks.parallel import Mesh
from modelworks.train import step as train_step
from modelworks.verify import verify
from modelworks.verify.batches import of_step
from modelworks.verify.shrinking import describe

RAMP = [{"batch": 8, "until": "100 steps"}, {"batch": 32, "until": "200 steps"}]
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero2-every": ("tied", {"dp_shard": 2, "zero": 2, "accumulate_reduce": "every"}),
    "pp-zero3": ("qwen3", {"pp": 2, "dp_shard": 2, "zero": 3}),
    "interleaved": ("gpt2", {"pp": 2, "pp_schedule": "interleaved", "pp_virtual": 2}),
    "zbv-ep": ("mixtral", {"pp": 2, "pp_schedule": "zbv", "dp_replicate": 2, "ep": 2}),
    "dualpipev": ("gpt2", {"pp": 2, "pp_schedule": "dualpipev"}),
}


def ramped(name: str, **train: Any) -> RunConfig:
    return run_of(*LAYOUTS[name], batch_ramp=RAMP, **train)


@pytest.mark.parametrize(
    ("micro_batch", "sizes"), [("auto", [2, 6]), (4, [2, 6]), (2, [4, 6]), (1, [4, 6])], ids=lambda value: str(value)
)
def test_the_smallest_stage_stays_as_micro_batches(micro_batch: Any, sizes: list[int]) -> None:
    """Of the 8 rows, 4 on each of two ranks; less than the full batch, which is three a rank."""
    small = ramped("zero2-every", micro_batch=micro_batch)
    assert small.batches.sizes == sizes
    assert [of_step(small, step).train.global_batch for step in range(4)] == [6, sizes[0]] * 2
    assert describe(small, small).endswith(f"batch {sizes[0]} to 6 -> {sizes[0]} to 6")
    assert run_of(*LAYOUTS["zero2-every"], micro_batch=micro_batch).batches.sizes == [6]


@pytest.mark.parametrize(
    "name", [name if name == "pp-zero3" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_both_sizes_are_equal(workers: WorkerPool, name: str) -> None:
    run = ramped(name)
    found, *_ = workers.run(verified, Layout.of(run.parallel), as_text(run), n_kv_heads=run.model.n_kv_heads)
    assert found["equal"], found


def with_a_fault_of_few_rows(mesh: Mesh, config: str) -> Any:
    """As if the loss of a step of less than the full batch were divided by the full batch's weight."""
    full = parse_run_config(config, "test").train.global_batch
    compute = train_step.compute_gradients

    def wrong(model: Any, batch: Any, run: RunConfig, **more: Any) -> Any:
        return compute(model, batch, run, **{**more, "loss_scale": more["loss_scale"] * run.train.global_batch / full})

    with mock.patch("modelworks.verify.runs.compute_gradients", wrong):
        return verified(mesh, config)


def test_a_fault_of_the_smallest_stage_is_found(workers: WorkerPool) -> None:
    run = ramped("zero2-every")
    found, *_ = workers.run(with_a_fault_of_few_rows, Layout.of(run.parallel), as_text(run))
    assert not found["equal"]
    assert "steps of 2 rows" in found["suspects"][-1]
    without = run_of(*LAYOUTS["zero2-every"])
    found, *_ = workers.run(with_a_fault_of_few_rows, Layout.of(run.parallel), as_text(without))
    assert found["equal"]


def test_too_few_steps_for_both(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--steps: got 1, expected at least 2: train.batch_ramp has steps"):
        verify(ramped("zero2-every"), steps=1, directory=tmp_path)
