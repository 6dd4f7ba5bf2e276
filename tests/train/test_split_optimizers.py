"""Optimisers over real process groups: whole matrices put together by messages, scales of shared blocks agreed on."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from optimizer_jobs import read, steps_of
from pool import WorkerPool

from modelworks.layout import Layout

MOE = ["model.family=mixtral", "model.n_experts=4", "model.experts_per_token=2"]
LAYOUTS = {
    "tp2-zero1": ["parallel.tp=2", "parallel.dp_shard=2", "parallel.zero=1"],
    "pp2-zero3-hybrid": ["parallel.pp=2", "parallel.dp_replicate=2", "parallel.dp_shard=2", "parallel.zero=3"],
    "ep2-tp2": [*MOE, "parallel.ep=2", "parallel.tp=2", "parallel.dp_shard=2", "parallel.zero=2"],
}


@cache
def alone(workers: WorkerPool, model: tuple[str, ...], name: str) -> dict[str, torch.Tensor]:
    [held] = workers.run(steps_of, Layout(), [*model, f"optimizer.name={name}"], torch.float64, 3)
    return {full: tensor for full, (_, tensor) in held.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["muon", "adamw8bit"])
def test_the_update_is_that_of_one_process(workers: WorkerPool, name: str, layout: str) -> None:
    overrides = LAYOUTS[layout]
    expected = alone(workers, tuple(one for one in overrides if "parallel" not in one), name)
    if name == "adamw8bit":
        assert expected["blocks.0.attention.q.weight/exp_avg_codes"].unique().numel() > 100
    held = workers.run(steps_of, Layout.of(read(overrides).parallel), [*overrides, f"optimizer.name={name}"],
                       torch.float64, 3)  # fmt: skip
    for own in held:
        for full, (spec, tensor) in own.items():
            if tensor.dtype == torch.uint8:
                assert torch.equal(tensor, expected[full][spec.slices]), full
            else:
                torch.testing.assert_close(tensor, expected[full][spec.slices], rtol=0, atol=1e-12)
