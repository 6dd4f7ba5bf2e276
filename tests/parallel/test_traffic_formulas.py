"""What a training step sends, measured on every rank, equals the formulas exactly: calls and bytes, on every axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pool import WorkerPool

from modelworks.config import RunConfig
from modelworks.layout import Layout
from modelworks.layout.traffic import step_traffic
from modelworks.optim import build_optimizer
from modelworks.parallel import Mesh, agree, split_model
from modelworks.train import PRECISIONS, data_rows
from modelworks.train.health import Watch
from modelworks.train.step import apply_gradients, compute_gradients
from modelworks.verify.batches import verification_batch

SHAPE: dict[str, Any] = {
    "n_layers": 4,
    "d_model": 16,
    "n_heads": 4,
    "n_kv_heads": 2,
    "d_ff": 24,
    "vocab_size": 50,
    "max_seq_len": 16,
}
EXPERTS: dict[str, Any] = {
    "family": "mixtral",
    "n_experts": 4,
    "experts_per_token": 2,
    "router_aux_loss": 0.01,
    "dense_layers": [1],
}
TIED = {"tie_embeddings": True}
BUCKETS = {"bucket_size": 3000}

# name: parallel, model, train
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "dp": ({"dp_replicate": 2}, {}, {}),
    "dp, every": ({"dp_replicate": 2, "accumulate_reduce": "every"}, TIED, {}),
    "zero 1": ({"dp_shard": 2, "zero": 1}, {}, {}),
    "zero 2, every, hybrid": ({"dp_replicate": 2, "dp_shard": 2, "zero": 2, "accumulate_reduce": "every"}, TIED, {}),
    "zero 3": ({"dp_shard": 2, "zero": 3}, {}, {}),
    "zero 3, recompute, uneven": (
        {"dp_shard": 2, "zero": 3}, {"family": "gpt2"}, {"recompute": "full", "micro_batch": 3},
    ),
    "zero 3, every, hybrid": ({"dp_replicate": 2, "dp_shard": 2, "zero": 3, "accumulate_reduce": "every"}, TIED, {}),
    "tp": ({"tp": 2}, {}, {}),
    "tp, plain, recompute": ({"tp": 2, "sequence_parallel": False}, {"family": "gpt2"}, {"recompute": "selective"}),
    "tp, copies, recompute": ({"tp": 4}, TIED, {"recompute": "full"}),
    "tp, dropout, recompute": ({"tp": 2}, {"family": "gpt2", "dropout": 0.1}, {"recompute": "full"}),
    "cp ring, tp": ({"cp": 2, "tp": 2}, {}, {"recompute": "full"}),
    "cp ring of 4": ({"cp": 4}, {}, {"precision": "bf16"}),
    "cp ulysses": ({"cp": 2, "cp_mode": "ulysses"}, {}, {"grad_clip_norm": 3.0}),
    "pp, tied": ({"pp": 2}, TIED, {}),
    "pp, tp": ({"pp": 2, "tp": 2, "pp_schedule": "gpipe"}, {}, {}),
    "interleaved, zero 3": (
        {"pp": 2, "dp_shard": 2, "zero": 3, "pp_schedule": "interleaved", "pp_virtual": 2}, TIED, {},
    ),
    "zbv, zero 3, each use": (
        {"pp": 2, "dp_shard": 2, "zero": 3, "pp_schedule": "zbv", "pp_gather": "micro-batch"}, TIED, {},
    ),
    "1f1b, zero 3, each use": ({"pp": 2, "dp_shard": 2, "zero": 3, "pp_gather": "micro-batch"}, {}, {}),
    "dualpipev, zero 1, every": (
        {"pp": 2, "dp_shard": 2, "zero": 1, "pp_schedule": "dualpipev", "accumulate_reduce": "every"}, TIED, {},
    ),
    "ep": ({"dp_replicate": 2, "ep": 2}, EXPERTS, {"recompute": "full"}),
    "ep, zero 3, cp": ({"dp_shard": 2, "cp": 2, "zero": 3, "ep": 2}, EXPERTS | {"expert_capacity": 4.0}, {}),
    "ep, tp, pp": (
        {"dp_replicate": 2, "ep": 2, "tp": 2, "pp": 2}, EXPERTS | {"router_bias": True, "router_aux_loss": 0.0}, {},
    ),
    "autocast": ({"tp": 2, "cp": 2}, {}, {"precision": "bf16-autocast"}),
}  # fmt: skip


def run_config(name: str) -> RunConfig:
    parallel, model, train = CASES[name]
    rows = 16 if {"dp_replicate", "dp_shard"} & parallel.keys() else 8  # four micro-batches on a rank, or two
    return RunConfig.model_validate(
        {
            "model": SHAPE | ({"n_kv_heads": 4} if model.get("family") == "gpt2" else {}) | model,
            "data": {"seq_len": 16, "tokenizer": "tokenizer.json"},
            "train": {"global_batch": rows, "micro_batch": 2, "grad_clip": 0.1, "precision": "fp32"} | train,
            "parallel": BUCKETS | parallel,
        }
    )


def micro_batches(config: RunConfig) -> list[int]:
    """Rows of each on one rank."""
    rows = config.train.global_batch // (config.parallel.dp_replicate * config.parallel.dp_shard)
    size = int(config.train.micro_batch)
    return [min(size, rows - start) for start in range(0, rows, size)]


def trained(mesh: Mesh, name: str) -> dict[str, Any]:
    """Two steps on a worker: traffic of the second, and the rows that this rank's tokens sent to each expert rank."""
    config = run_config(name)
    precision = PRECISIONS[str(config.train.precision)]
    model = split_model(
        config,
        mesh,
        dtype=precision.parameter_dtype,
    )
    model.train()
    optimizer = build_optimizer(model.stored.items(), config.optimizer, split=model.split)
    watch = Watch(config, model, optimizer, warmup_steps=0)
    rows = torch.zeros(mesh.size("ep"), dtype=torch.int64)
    for step in range(2):
        mesh.traffic.take()
        watch.begin(step + 1)
        batch = verification_batch(config, step).rows(data_rows(model, config.train.global_batch))
        gradients = compute_gradients(
            model, batch, config, step=step, micro_batch=int(config.train.micro_batch), precision=precision, watch=watch
        )
        apply_gradients(model, optimizer, gradients, config, lr=1e-3, watch=watch)
        agree(False, mesh)
    sent = {key: (volume.calls, volume.bytes) for key, volume in mesh.traffic.take().items()}
    for routing in gradients.micro.routings:
        for note in routing.notes.values():
            rows += note.loads.view(mesh.size("ep"), -1).sum(1)
    leaving = mesh.group("ep").gather_objects(rows.tolist()) if mesh.size("ep") > 1 else [[0]]
    here = mesh.place("ep")
    left = sum(leaving[here]) - leaving[here][here]
    came = sum(row[here] for place, row in enumerate(leaving) if place != here)
    return {"sent": sent, "routed": (left, came)}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_measured_equals_the_formula(workers: WorkerPool, name: str) -> None:
    config = run_config(name)
    precision = PRECISIONS[str(config.train.precision)]
    layout = Layout.of(config.parallel)
    results = workers.run(trained, layout, name, n_kv_heads=config.model.n_kv_heads)
    for rank, result in enumerate(results):
        expected = step_traffic(
            config,
            rank,
            micro_batches(config),
            precision.parameter_dtype.itemsize,
            product_itemsize=precision.autocast_dtype.itemsize if precision.autocast_dtype else None,
            routed=result["routed"],
        )
        assert_same(result["sent"], expected, f"rank {rank}")


def assert_same(measured: dict[Any, Sequence[float]], expected: dict[Any, Sequence[float]], where: str) -> None:
    def rounded(sent: dict[Any, Sequence[float]]) -> dict[Any, tuple[int, float]]:
        return {key: (int(calls), round(size, 6)) for key, (calls, size) in sorted(sent.items())}

    assert rounded(measured) == rounded(expected), where
