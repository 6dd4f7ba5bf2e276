"""Pipelines with sharded data parallelism and tensor parallelism: two steps, gradients of every shard against one
process in float64. Split backward passes are reduced by hand, whole ones by their hooks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from pool import WorkerPool
from torch import Tensor

from modelworks.config import ModelConfig, RunConfig
from modelworks.layout import Layout, plan_parameters
from modelworks.layout.pipeline import build_program, placed_stages, stage_layers
from modelworks.models import CausalContext, Transformer, default_dtype, initialize
from modelworks.parallel import Mesh, shard_tensor
from modelworks.parallel.gradients import build_gradient_store
from modelworks.parallel.pipeline import PipelineExecutor, build_parts, share_embedding
from modelworks.train.loss import vocabulary_loss

ROWS, LENGTH, STEPS = 2, 8, 2


@dataclass(frozen=True)
class Case:
    schedule: str
    parallel: dict[str, Any]
    micro_batches: int = 3
    recompute: str = "none"
    model: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> RunConfig:
        sizes = {"n_layers": 4, "d_model": 16, "n_heads": 2, "n_kv_heads": 2, "d_ff": 24, "vocab_size": 50}
        virtual = 1 if self.schedule in ("1f1b", "zb-h1") else 2
        return RunConfig(
            model=ModelConfig(**{**sizes, "init_std": 0.3, "tie_embeddings": True, **self.model}),
            data={"seq_len": LENGTH, "tokenizer": "none.json"},
            train={"recompute": self.recompute},
            parallel={"pp": 2, "pp_schedule": self.schedule, "pp_virtual": virtual, **self.parallel},
        )


def batch(index: int) -> Tensor:
    """Row group `index` of the global batch, (ROWS, LENGTH + 1)."""
    return torch.randint(0, 50, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(index))


def loss(part: Transformer, hidden: Tensor, index: int, groups: int, **split: Any) -> Tensor:
    scale = 1.0 / (groups * ROWS * LENGTH)
    weights = torch.ones(ROWS, LENGTH, dtype=torch.float64)
    return vocabulary_loss(hidden, part.head_weight(), batch(index)[:, 1:], weights, scale=scale, **split).objective


POSITIONS = torch.arange(LENGTH).expand(ROWS, -1)


def one_process(case: Case, groups: int) -> dict[str, Tensor]:
    with default_dtype(torch.float64):
        model = Transformer(case.config.model)
    initialize(model, 0)
    for index in range(groups):
        loss(model, model(batch(index)[:, :-1], POSITIONS, CausalContext()), index, groups).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}  # type: ignore[misc]


def steps(mesh: Mesh, case: Case) -> list[dict[str, tuple[Any, Tensor]]]:
    """Each step's gradients of this rank's shards, with their places; parameters never change."""
    config, here = case.config, mesh.place("pp")
    parallel, model = config.parallel, config.model
    virtual, stages = parallel.pp_virtual, stage_layers(config)
    plans = plan_parameters(model, mesh.layout, parallel, mesh.rank, stages)
    with default_dtype(torch.float64):
        parts = build_parts(model, stages, placed_stages(case.schedule, 2, virtual)[here])
    for part in parts.values():
        initialize(part, 0)
        part.set_recompute(config.train.recompute)
        shard_tensor(part, plans, mesh, sequence_parallel=parallel.sequence_parallel)
    share_embedding(parts)
    store = build_gradient_store(list(parts.values()), plans, mesh, parallel)
    program = build_program(
        case.schedule,
        2,
        case.micro_batches,
        virtual,
        zero3=parallel.zero == 3,
        gather=parallel.pp_gather,
        accumulate_reduce=parallel.accumulate_reduce,
    )
    executor = PipelineExecutor(mesh, program, parts, store)
    groups = case.micro_batches * mesh.size("dp")
    head = plans.get("embedding.weight" if model.tie_embeddings else "head.weight")
    split = {"group": mesh.group("tp"), "vocabulary": head.computed} if mesh.size("tp") > 1 and head else {}

    def forward(stage: int, part: Transformer, micro_batch: int, inputs: dict[str, Tensor]) -> Any:
        index = mesh.place("dp") * case.micro_batches + micro_batch
        hidden = part(inputs.get("hidden", batch(index)[:, :-1]), POSITIONS, CausalContext())
        return ({}, loss(part, hidden, index, groups, **split)) if part.part.last else ({"hidden": hidden}, None)

    edges = {"hidden": ((ROWS, LENGTH // mesh.size("tp"), 16), torch.float64)}
    results = []
    for _ in range(STEPS):
        store.begin_step(case.micro_batches)
        executor.run(case.micro_batches, forward, training=True, edge_shapes=edges)
        gradients = {name: gradient.clone() for name, gradient in store.finish().items()}
        results.append({name: (plans[name].stored.slices, gradient) for name, gradient in gradients.items()})
        store.after_update()
        store.end_step()
        executor.run(2, forward, training=False, edge_shapes=edges)
    return results


TWO = {"dp_shard": 2}
CASES = {
    "ddp, 1f1b": Case("1f1b", {"dp_replicate": 2}),
    "ddp, dualpipev": Case("dualpipev", {"dp_replicate": 2}, 5),
    "zero 1, zb-h1": Case("zb-h1", {**TWO, "zero": 1}, recompute="full"),
    "zero 2 every, zb-h1": Case("zb-h1", {**TWO, "zero": 2, "accumulate_reduce": "every"}),
    "zero 2 every, dualpipev": Case("dualpipev", {**TWO, "zero": 2, "accumulate_reduce": "every"}, 5),
    "zero 2, interleaved": Case("interleaved", {**TWO, "zero": 2}, 4),
    "zero 3, 1f1b": Case("1f1b", {**TWO, "zero": 3}),
    "zero 3, zb-h1": Case("zb-h1", {**TWO, "zero": 3}, recompute="full"),
    "zero 3 per micro-batch, 1f1b": Case("1f1b", {**TWO, "zero": 3, "pp_gather": "micro-batch"}),
    "zero 3 per micro-batch every, zb-h1": Case(
        "zb-h1", {**TWO, "zero": 3, "pp_gather": "micro-batch", "accumulate_reduce": "every"}
    ),
    "zero 3 per micro-batch, zbv": Case("zbv", {**TWO, "zero": 3, "pp_gather": "micro-batch"}, 4),
    "zero 3, dualpipev": Case("dualpipev", {**TWO, "zero": 3}, 5),
    "tp, zb-h1": Case("zb-h1", {"tp": 2}, recompute="full"),
    "tp, zbv": Case("zbv", {"tp": 2}, 4),
    "tp, interleaved": Case("interleaved", {"tp": 2}, 3, model={"family": "gpt2"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_every_shard_are_those_of_one_process(workers: WorkerPool, name: str) -> None:
    case = CASES[name]
    layout = Layout.of(case.config.parallel)
    expected = one_process(case, case.micro_batches * layout.dp_replicate * layout.dp_shard)
    seen = set()
    for results in workers.run(steps, layout, case):
        for gradients in results:
            for parameter, (slices, gradient) in gradients.items():
                whole = expected[parameter][slices]
                torch.testing.assert_close(gradient, whole, rtol=0, atol=1e-12, msg=lambda m, n=parameter: f"{n}: {m}")
                seen.add(parameter)
    assert seen == set(expected)
