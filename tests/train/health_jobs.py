"""What a worker of the pool does in the tests of a run's health: steps with figures, and runs with poisoned batches."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from split_jobs import MACHINE

from modelworks.config import parse_run_config
from modelworks.optim import build_optimizer
from modelworks.parallel import Mesh, split_model
from modelworks.train import PRECISIONS, TrainingFailed, data_rows, loop, train
from modelworks.train.health import Watch
from modelworks.train.precision import Precision
from modelworks.train.step import train_step
from modelworks.verify.batches import verification_batch

FLOAT64 = Precision("float64", torch.float64)
STEPS = """
    model: {n_layers: 2, d_model: 96, n_heads: 4, n_kv_heads: 2, d_ff: 128, vocab_size: 64, max_seq_len: 16}
    data: {seq_len: 16, tokenizer: none, packing: within-document}
    train: {global_batch: 4, micro_batch: 1, grad_clip: 0.5}
    health: {layers_every: 1, spikes: "off"}
"""


def figures(mesh: Mesh, overrides: list[str], precision: str = "float64") -> list[dict[str, Any]]:
    """Of every layer in two steps; of one process also computed plainly, from whole tensors."""
    config = parse_run_config(STEPS, "test", overrides)
    exact = FLOAT64 if precision == "float64" else PRECISIONS[precision]
    model = split_model(config, mesh, dtype=exact.parameter_dtype)
    model.train()
    optimizer = build_optimizer(model.stored.items(), config.optimizer, split=model.split)
    watch = Watch(config, model, optimizer, warmup_steps=0)
    assert watch.layers is not None
    found = []
    for step in range(2):
        watch.begin(step + 1)
        batch = verification_batch(config, step).rows(data_rows(model, config.train.global_batch))
        before = {name: tensor.detach().clone() for name, tensor in model.stored.items()}
        result = train_step(
            model, optimizer, batch, config, step=step, lr=1e-2, micro_batch=1, precision=exact, watch=watch
        )
        sums = mesh.group("world").all_reduce_(watch.layers.sums.clone())
        row = {**asdict(watch.layers.figures(sums)), "norm": result.grad_norm}
        if mesh.layout.world_size == 1:
            row["moved"] = {n: float((model.stored[n].detach() - before[n]).norm()) for n in before}
            row["weights"] = {n: float(before[n].norm()) for n in before}
        found.append(row)
    return found


def poisoned(mesh: Mesh, config: str, run_dir: str, bad: dict[int, str], **flags: Any) -> dict[str, Any]:
    """A run whose batches of some steps (from 1) are not what they should be. Returns its result, or why it failed."""
    read = parse_run_config(config, "test")
    with patch.object(loop, "train_step", _with_poison(bad, read.model.vocab_size)):
        try:
            return asdict(train(read, Path(run_dir), machine=MACHINE, mesh=mesh, **flags))
        except TrainingFailed as error:
            return {"failed": str(error)}


def _with_poison(bad: dict[int, str], vocabulary: int) -> Any:
    real = loop.train_step

    def step_(model: Any, optimizer: Any, batch: Any, *arguments: Any, **named: Any) -> Any:
        kind = bad.get(named["step"] + 1)
        # The last rows of the whole batch, which the last data-parallel rank holds.
        if kind and model.mesh.place("dp") == model.mesh.size("dp") - 1:
            if kind == "garbage":
                draw = torch.Generator().manual_seed(named["step"])
                shape = batch.targets[-2:].shape
                batch.tokens[-2:] = torch.randint(vocabulary, shape, generator=draw)
                batch.targets[-2:] = torch.randint(vocabulary, shape, generator=draw)
            else:
                batch.loss_weights[-1] = torch.nan
        return real(model, optimizer, batch, *arguments, **named)

    return step_


def kinds(steps: Collection[int]) -> dict[int, str]:
    return dict.fromkeys(steps, "garbage")
