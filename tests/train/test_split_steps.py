"""Steps on several ranks in the corners: a stage that holds nothing, a narrow stream, the state of another run."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pool import WorkerPool
from split_jobs import MACHINE
from torch import Tensor

from modelworks.config import RunConfig, dump_yaml, parameter_shapes, parse_run_config
from modelworks.layout import Layout
from modelworks.optim import build_optimizer
from modelworks.parallel import Mesh, split_model
from modelworks.train import PRECISIONS, Precision, compute_gradients, data_rows, hooks, job, micro_batches, one_rank
from modelworks.train.precision import LossScaler
from modelworks.train.reading import CarefulReader
from modelworks.train.state import TrainState
from modelworks.train.step import StepResult, train_step
from modelworks.verify.batches import verification_batch

FLOAT64 = Precision("float64", torch.float64)


def read(*overrides: str) -> RunConfig:
    text = """
        model: {n_layers: 4, d_model: 16, n_heads: 2, n_kv_heads: 2, d_ff: 32, vocab_size: 64, max_seq_len: 16}
        data: {seq_len: 16, tokenizer: none, packing: within-document}
        train: {global_batch: 4, micro_batch: 1}
    """
    return parse_run_config(text, "test", list(overrides))


def steps(mesh: Mesh, overrides: list[str], precision: Precision, count: int = 1) -> list[StepResult]:
    config = read(*overrides)
    model = split_model(config, mesh, dtype=precision.parameter_dtype)
    model.train()
    optimizer = build_optimizer(model.stored.items(), config.optimizer, split=model.split)
    scaler = LossScaler(config.train.loss_scale) if precision.scales_loss else None
    results = []
    for step in range(count):
        batch = verification_batch(config, step).rows(data_rows(model, config.train.global_batch))
        more: dict[str, Any] = {"step": step, "lr": 1e-3, "micro_batch": 1, "precision": precision, "scaler": scaler}
        results.append(train_step(model, optimizer, batch, config, **more))
    return results


def check(workers: WorkerPool, overrides: list[str], precision: Precision, tolerance: float) -> None:
    """The ranks' steps are those of one process."""
    layout = Layout.of(read(*overrides).parallel)
    [expected] = workers.run(steps, Layout(), [one for one in overrides if "parallel" not in one], precision, 2)
    for results in workers.run(steps, layout, overrides, precision, 2):
        for ours, theirs in zip(results, expected, strict=True):
            assert ours.applied
            assert ours.loss == pytest.approx(theirs.loss, rel=tolerance)
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=tolerance)


def test_a_stage_without_parameters_scales_nothing(workers: WorkerPool) -> None:
    overrides = ["parallel.pp=3", "parallel.pp_partition=[2, 0, 2]", "train.precision=fp16"]
    check(workers, overrides, PRECISIONS["fp16"], 2e-2)


def test_without_residual_connections_autocast_narrows_the_stream(workers: WorkerPool) -> None:
    check(workers, ["parallel.pp=2", "model.residual=false"], PRECISIONS["bf16-autocast"], 2e-2)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_activations_on_the_host_beside_sharded_parameters(workers: WorkerPool, recompute: str) -> None:
    overrides = ["parallel.dp_shard=2", "parallel.zero=3", "parallel.offload_activations=true"]
    check(workers, [*overrides, f"train.recompute={recompute}"], FLOAT64, 1e-12)


class OfAnotherPrecision:
    """A checkpoint of a run in bf16, whose master weights are all `VALUE`."""

    VALUE = 0.123456
    label, step, metrics = "a checkpoint", 3, dict[str, float]()
    state = {"updates": 3, "best": None}

    def __init__(self, config: RunConfig) -> None:
        self._shapes = parameter_shapes(config.model)

    def shapes(self, section: str) -> dict[str, tuple[int, ...]]:
        kinds = ("exp_avg", "exp_avg_sq", "master")
        names = self._shapes.items() if section == "optimizer" else ()
        return {f"{name}/{kind}": shape for name, shape in names for kind in kinds}

    def slice(self, section: str, name: str, bounds: Sequence[tuple[int, int]]) -> Tensor:
        return torch.full([stop - start for start, stop in bounds], self.VALUE if name.endswith("master") else 0.0)

    def check_files(self) -> None:
        """There are none."""


def computed_after_restoring(mesh: Mesh, overrides: list[str]) -> dict[str, bool]:
    """Whether what each parameter computes with is the master weight of the run before, in all its elements."""
    config = read(*overrides)
    model = split_model(config, mesh, dtype=torch.float32)
    optimizer = build_optimizer(model.stored.items(), config.optimizer, split=model.split)
    checkpoint: Any = OfAnotherPrecision(config)
    TrainState(model, optimizer).restore(CarefulReader(checkpoint))
    return {name: bool((leaf == checkpoint.VALUE).all()) for name, leaf in model.gradients.leaves().items()}


@pytest.mark.parametrize("zero", [1, 2])
def test_restored_master_weights_reach_every_rank(workers: WorkerPool, zero: int) -> None:
    overrides = ["parallel.dp_shard=2", f"parallel.zero={zero}"]
    for found in workers.run(computed_after_restoring, Layout(dp_shard=2), overrides):
        assert found
        assert all(found.values())


def contexts_alive(mesh: Mesh, overrides: list[str]) -> tuple[int, int]:
    """(contexts that the micro-batches of a step made, those still alive at its end)."""
    config, made = read(*overrides), []

    class Noted(micro_batches.DocumentContext):  # type: ignore[misc, name-defined]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            made.append(weakref.ref(self))

    model = split_model(config, mesh, dtype=torch.float32)
    with patch.object(micro_batches, "DocumentContext", Noted):
        batch, more = verification_batch(config, 0), {"step": 0, "micro_batch": 1, "precision": PRECISIONS["fp32"]}
        gradients = compute_gradients(model, batch, config, **more)  # type: ignore[arg-type]
        alive = sum(context() is not None for context in made)
    assert gradients.loss > 0
    return len(made), alive


@pytest.mark.parametrize("more", [[], ["train.recompute=full"]])
@pytest.mark.parametrize("layout", [[], ["parallel.pp=2", "parallel.pp_schedule=zbv"]])
def test_masks_are_freed_with_their_micro_batch(workers: WorkerPool, layout: list[str], more: list[str]) -> None:
    config = read(*layout)
    assert workers.run(contexts_alive, Layout.of(config.parallel), [*layout, *more])[0] == (4, 0)


def met_meanwhile(mesh: Mesh, config: str, run_dir: str) -> list[bool]:
    """On rank 0: whether the ranks met while it compressed texts, and while it drew samples. Nothing elsewhere."""
    met, told, real = threading.Event(), [], one_rank.agree

    def agree(flag: bool, mesh: Mesh) -> bool:
        said = real(flag, mesh)
        met.set()
        return said

    def work(*_: Any, **__: Any) -> dict[str, Any]:
        met.clear()
        told.append(met.wait(10.0))
        return {}

    with (
        patch.object(one_rank, "agree", agree),
        patch.object(job, "compression_baselines", work),
        patch.object(hooks, "sample_texts", work),
    ):
        job.train(parse_run_config(config, "test"), Path(run_dir), machine=MACHINE, mesh=mesh)
    return told


@pytest.mark.slow
def test_samples_and_compressors_may_take_longer_than_others_may_wait(
    workers: WorkerPool, tiny_config: Any, tmp_path: Path
) -> None:
    config = tiny_config("train.duration=1 steps", "evaluate.samples=1", "parallel.dp_replicate=2")
    found = workers.run(met_meanwhile, Layout(dp_replicate=2), dump_yaml(config), str(tmp_path / "run"))
    assert found == [[True, True], []]
