"""Host memory for saves, as predicted, against the shares that ranks really write."""

from __future__ import annotations

from typing import Any

import pytest

from modelworks.checkpoint.owners import share_out
from modelworks.config import RunConfig, count_parameters
from modelworks.layout import Layout, plan_parameters
from modelworks.layout.pipeline import stage_layers
from modelworks.train.rank_memory import saved_bytes, staged_bytes


def config(checkpoint: dict[str, Any] | None = None, **parallel: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"n_layers": 6, "d_model": 512, "n_heads": 8, "vocab_size": 4000, "max_seq_len": 64},
            "data": {"seq_len": 64, "tokenizer": {"vocab_size": 4000}},
            "train": {"global_batch": 16, "micro_batch": 1},
            "parallel": parallel,
            "checkpoint": checkpoint or {},
        }
    )


LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "replicas": {"dp_replicate": 4},
    "zero 1": {"dp_shard": 4, "zero": 1},
    "zero 3, hybrid": {"dp_replicate": 2, "dp_shard": 2, "zero": 3},
    "tensor": {"tp": 4},
    "pipeline": {"pp": 2, "dp_replicate": 2},
    "tensor and pipeline": {"tp": 2, "pp": 2, "dp_shard": 2, "zero": 2},
    "context": {"cp": 2},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_fullest_rank_copies_what_was_predicted(name: str) -> None:
    run = config(**LAYOUTS[name])
    layout, stages = Layout.of(run.parallel), stage_layers(run)
    held = [
        {name: plan.stored for name, plan in plan_parameters(run.model, layout, run.parallel, rank, stages).items()}
        for rank in range(layout.world_size)
    ]
    elements = max(sum(part.n_local for parts in own.values() for part in parts) for own in share_out(held))
    real = elements * saved_bytes(run, precision="bf16")
    assert staged_bytes(run, precision="bf16") == pytest.approx(real, rel=0.1)


def test_bytes_of_a_parameter_and_the_bound() -> None:
    run = config()
    parameters = count_parameters(run.model).total
    assert staged_bytes(run, precision="bf16") == 14 * parameters  # the weight, its master, two moments
    assert staged_bytes(run, precision="fp32") == 12 * parameters
    assert staged_bytes(config({"staging": "1MiB"}), precision="fp32") == 2**20
    assert staged_bytes(config({"async": False}), precision="fp32") == 0
