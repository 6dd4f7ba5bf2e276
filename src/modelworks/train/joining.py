"""The mesh of a process that is one rank of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from modelworks.config import RunConfig
from modelworks.layout import Layout
from modelworks.parallel import Mesh, World, build_mesh, process_group


@contextmanager
def joined_mesh(config: RunConfig, world: World) -> Iterator[Mesh]:
    """This rank's mesh of `config.parallel`, for the length of the block. All ranks must enter it."""
    device = run_device(config)
    with process_group(world, device, config.parallel.timeout) as labels:
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        yield build_mesh(Layout.of(config.parallel), device, n_kv_heads=config.model.n_kv_heads, labels=labels)


def run_device(config: RunConfig) -> torch.device:
    """What the run computes on: as it says, or a GPU where there is one."""
    if config.train.device != "auto":
        return torch.device(config.train.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
