"""The update of a logical tensor does not depend on who holds which part of it.

Ranks are threads here, each with the slices that the layout gives it and an optimiser of its own; their sums meet at a
barrier. In float64, so that only rounding may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from modelworks.checkpoint.owners import Owners
from modelworks.config import ModelConfig, OptimizerConfig, ParallelConfig, parameter_shapes
from modelworks.config.optimizers import HABITS
from modelworks.layout import Layout, ShardSpec, plan_parameters
from modelworks.optim import Split, build_optimizer, eight_bit
from modelworks.optim.thread_ranks import ThreadRanks

MODEL = ModelConfig(
    family="mixtral", n_layers=4, d_model=12, n_heads=6, n_kv_heads=2, head_dim=2, d_ff=10, vocab_size=18,
    n_experts=4, experts_per_token=2, d_expert=6, dense_layers=[1], tie_embeddings=True,
)  # fmt: skip
SHAPES = parameter_shapes(MODEL)
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero1": {"dp_shard": 3, "zero": 1},
    "zero3-hybrid": {"dp_replicate": 2, "dp_shard": 5, "zero": 3},
    "tp2": {"tp": 2},
    "tp6-sp": {"tp": 6},  # keys and values are copied
    "pp2-tied": {"pp": 2, "dp_replicate": 2},
    "zbv": {"pp": 2, "pp_schedule": "zbv", "dp_shard": 2, "zero": 2},
    "ep2": {"dp_shard": 4, "ep": 2, "zero": 3},
    "all": {"tp": 2, "pp": 2, "ep": 2, "dp_shard": 2, "zero": 1},
}
STEPS = 2


@cache
def values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def config_of(name: str) -> OptimizerConfig:
    more = {"first_moment": 0.9} if name == "adafactor" else {}
    return OptimizerConfig(name=name, weight_decay=0.1, **more)  # type: ignore[arg-type]


def held_by(settings: dict[str, Any]) -> list[dict[str, ShardSpec]]:
    """What each rank of a layout holds."""
    parallel = ParallelConfig(**settings)
    layout = Layout.of(parallel)
    n_stages = 4 if parallel.pp_schedule == "zbv" else parallel.pp
    stages = [list(range(4))[i * 4 // n_stages : (i + 1) * 4 // n_stages] for i in range(n_stages)]
    return [
        {n: plan.stored for n, plan in plan_parameters(MODEL, layout, parallel, rank, stages).items()}
        for rank in range(layout.world_size)
    ]


@pytest.fixture(scope="module", autouse=True)
def narrow_state() -> Iterator[None]:
    """8-bit state of all but the smallest tensors, whose blocks nearly every cut goes through."""
    with patch.object(eight_bit, "SMALL", 32):
        yield


@pytest.fixture(scope="module")
def alone() -> Callable[[str], Any]:
    """Parameters and state of one process that holds everything, by optimiser."""
    made: dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}

    def get(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        if name not in made:
            parameters = {n: tensor.requires_grad_() for n, tensor in deepcopy(values(0)).items()}
            optimizer = build_optimizer(parameters.items(), config_of(name))
            for step in range(STEPS):
                optimizer.step(values(step + 1), 0.01)
            made[name] = {n: t.detach() for n, t in parameters.items()}, dict(optimizer.named_state())
        return made[name]

    return get


@pytest.mark.parametrize("name", HABITS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_update_whole_and_sharded(layout: str, name: str, alone: Callable[[str], Any]) -> None:
    """Parameters, state of every shape, and what checkpoints say who writes."""
    held, (expected, expected_state) = held_by(LAYOUTS[layout]), alone(name)

    any_rank = build_optimizer([], config_of(name), split=Split({}, SHAPES))
    specs = [own | any_rank.state_specs(own) for own in held]

    def job(rank: int, split: Split) -> tuple[dict[str, Tensor], list[Any]]:
        own = {
            n: values(0)[n][s.slices].clone(memory_format=torch.contiguous_format).requires_grad_()
            for n, s in split.specs.items()
        }
        optimizer = build_optimizer(own.items(), config_of(name), split=split)
        for step in range(STEPS):
            optimizer.step({n: values(step + 1)[n][s.slices].contiguous() for n, s in split.specs.items()}, 0.01)
        state = dict(optimizer.named_state())
        for full, tensor in state.items():
            assert tensor.shape == specs[rank][full].local_shape
            close(tensor, expected_state[full][specs[rank][full].slices])
        return {n: t.detach() for n, t in own.items()}, Owners(specs.__getitem__, rank, len(held)).shards(
            "optimizer", state
        )

    written = {full: torch.zeros_like(tensor) for full, tensor in expected_state.items()}
    for rank, (own, shards) in enumerate(ThreadRanks(held, SHAPES).run(job)):
        for full, spec in held[rank].items():
            close(own[full], expected[full][spec.slices])
        for shard in shards:
            written[shard.spec.name][shard.spec.slices] += shard.tensor
    for full, tensor in written.items():  # each element once, by one that has it
        close(tensor, expected_state[full])


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
