"""Whole tensors put together from every rank's shards are the ones that were cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pool import WorkerPool

from modelworks.config import ModelConfig, ParallelConfig, parameter_shapes
from modelworks.layout import Layout, ShardSpec, plan_parameters
from modelworks.parallel import Mesh
from modelworks.parallel.logical import Assembler

MODEL = ModelConfig(n_layers=4, d_model=8, n_heads=4, n_kv_heads=1, d_ff=13, vocab_size=11, tie_embeddings=True)


def value(name: str) -> torch.Tensor:
    shape = parameter_shapes(MODEL)[name]
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) + len(name)


def assemble(mesh: Mesh, parallel: ParallelConfig, stages: list[list[int]]) -> dict[str, torch.Tensor]:
    def stored(rank: int) -> dict[str, object]:
        plans = plan_parameters(MODEL, mesh.layout, parallel, rank, stages)
        return {name: plan.stored for name, plan in plans.items()}

    local = {name: value(name)[spec.slices] for name, spec in stored(mesh.rank).items()}  # type: ignore[attr-defined]
    return dict(Assembler(mesh, stored).all(local, list(parameter_shapes(MODEL))))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(tp=2, pp=2),
        ParallelConfig(tp=2, dp_shard=3, zero=1),
        ParallelConfig(pp=2, pp_schedule="zbv", dp_replicate=2, cp=2),
    ],
)
def test_whole_again(workers: WorkerPool, parallel: ParallelConfig) -> None:
    stages = [[0, 1, 2, 3]]
    if parallel.pp > 1:
        stages = [[0], [1], [2], [3]] if parallel.pp_schedule == "zbv" else [[0, 1], [2, 3]]
    first, *others = workers.run(assemble, Layout.of(parallel), parallel, stages)
    assert all(other == {} for other in others)
    assert list(first) == list(parameter_shapes(MODEL))
    for name, tensor in first.items():
        assert torch.equal(tensor, value(name))


def test_slices_travel_on_the_device_of_the_ranks() -> None:
    """Optimiser state that is offloaded lies in host memory, and a backend may carry the device's tensors alone."""
    sent: list[torch.Tensor] = []
    finished = SimpleNamespace(wait=lambda: None)
    world = SimpleNamespace(size=2, send=lambda tensor, place: sent.append(tensor) or finished)
    mesh: Any = SimpleNamespace(rank=1, device=torch.device("meta"), group=lambda name: world)
    spec = ShardSpec.whole("a", (3,))
    assert Assembler(mesh, lambda rank: {"a": spec}).whole("a", torch.ones(3), torch.float32) is None
    assert [tensor.device for tensor in sent] == [mesh.device]
