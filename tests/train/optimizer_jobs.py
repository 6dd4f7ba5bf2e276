"""What ranks do in tests of optimisers over layouts: steps with gradients that every layout is given alike."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from modelworks.config import RunConfig, parse_run_config
from modelworks.layout import ShardSpec
from modelworks.optim import build_optimizer
from modelworks.parallel import Mesh, split_model

# Sizes that neither degrees nor blocks of 256 divide: cuts go through blocks.
TEXT = """
    model: {n_layers: 2, d_model: 96, n_heads: 4, n_kv_heads: 2, d_ff: 150, vocab_size: 64, max_seq_len: 16}
    data: {seq_len: 16, tokenizer: none, packing: within-document}
    train: {global_batch: 4, micro_batch: 1}
"""


def read(overrides: list[str]) -> RunConfig:
    return parse_run_config(TEXT, "test", overrides)


def steps_of(mesh: Mesh, overrides: list[str], dtype: torch.dtype, count: int) -> dict[str, tuple[ShardSpec, Tensor]]:
    """Parameters (`<name>`) and state (`<name>/<kind>`) after some steps: what this rank holds of each."""
    config = read(overrides)
    model = split_model(config, mesh, dtype=dtype)
    optimizer = build_optimizer(model.stored.items(), config.optimizer, split=model.split)
    specs = {name: plan.stored for name, plan in model.plans.items()}
    for step in range(count):
        gradients = {n: gradient(n, s.shape, step, dtype)[s.slices].contiguous() for n, s in specs.items()}
        optimizer.step(gradients, 1e-2)
    states = optimizer.state_specs(specs)
    held = {name: (specs[name], tensor.detach().clone()) for name, tensor in model.stored.items()}
    return held | {name: (states[name], tensor.clone()) for name, tensor in optimizer.named_state()}


def gradient(name: str, shape: tuple[int, ...], step: int, dtype: torch.dtype) -> Tensor:
    """Of a whole parameter; the same in every layout."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + step)
    return torch.randn(shape, generator=generator, dtype=torch.float64).pow(3).to(dtype)
