"""The ranks of a server: this process is the first, and starts the others.

Every rank reads the model from where it lies and keeps its share, one whole tensor at a time. A connection may be
silent for as long as nobody asks anything, so no operation has a limit; what is stuck is noticed by whoever watches
the server's heartbeat, and followers never outlive rank 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from modelworks.checkpoint import ModelSource, open_model
from modelworks.config import ModelConfig, UserError
from modelworks.data import Tokenizer
from modelworks.layout import Layout
from modelworks.models import Transformer, load_routing_state
from modelworks.parallel import (
    Host,
    Mesh,
    build_mesh,
    initialize_process_group,
    joined,
    leave_process_group,
    shard_tensor,
)
from modelworks.serve.tensor_parallel.executor import ParallelExecutor, follow
from modelworks.serve.tensor_parallel.shares import HeadShare, check_ranks, serving_plans
from modelworks.serve.torch_executor import TorchExecutor

_WITHOUT_END = 10 * 365 * 86400.0  # seconds


@dataclass(frozen=True)
class ModelOnRanks:
    """A model to be served by `ranks` processes. path: as `load_model` takes it."""

    path: str
    config: ModelConfig
    tokenizer: Tokenizer | None
    source: str
    ranks: int
    dtype: torch.dtype
    device: str

    def start(
        self, *, n_blocks: int, block_size: int, kv_dtype: str = "auto", batch_invariant: bool = False
    ) -> ParallelExecutor:
        """Start the other ranks, read this one's share, and meet. Raises UserError as `load_model` does."""
        options = {
            "n_blocks": n_blocks,
            "block_size": block_size,
            "kv_dtype": kv_dtype,
            "batch_invariant": batch_invariant,
        }
        where = {"path": self.path, "dtype": str(self.dtype).removeprefix("torch."), "device": self.device}
        host = Host(
            "modelworks.serve.tensor_parallel.processes:serve_share",
            self.ranks,
            {**where, "options": options},
            device=self.device,
        )
        try:
            mesh = host.meet(Layout(tp=self.ranks), _own_device(self.device, 0), _WITHOUT_END)
            own = share_executor(open_model(self.path), mesh, self.dtype, options)
        except BaseException:
            lost = host.lost()
            host.close()
            if lost is not None:
                raise RuntimeError(f"the ranks did not meet: {lost}") from None
            raise
        return ParallelExecutor(self.config, own, mesh.group("tp"), why_lost=host.lost, at_close=host.close)


def model_on_ranks(path: str, ranks: int, *, dtype: torch.dtype, device: str = "cpu") -> ModelOnRanks:
    """Raises UserError where the model cannot be split so, or this process belongs to a group of ranks already."""
    source = open_model(path)
    check_ranks(source.config, ranks)
    if joined() is not None:
        raise UserError(f"tp: got {ranks}, but this process is a rank of a run already (RANK is set); unset RANK")
    return ModelOnRanks(path, source.config, source.tokenizer, source.origin, ranks, dtype, device)


def serve_share(path: str, dtype: str, device: str, options: dict[str, Any]) -> None:
    """What a rank that `ModelOnRanks.start` started does."""
    world = joined()
    assert world is not None
    initialize_process_group(world, torch.device(device), _WITHOUT_END)
    mesh = build_mesh(Layout(tp=world.size), _own_device(device, world.local_rank))
    source = open_model(path, notify=lambda text: None)  # rank 0 says it
    follow(share_executor(source, mesh, getattr(torch, dtype), options), mesh.group("tp"))
    leave_process_group()


def load_share(source: ModelSource, mesh: Mesh, dtype: torch.dtype) -> Transformer:
    """This tp rank's share of the model, in evaluation mode. Memory: the share, and one whole tensor more."""
    group = mesh.group("tp")
    plans = serving_plans(source.config, group.size, group.index)
    with torch.device("meta"):
        model = Transformer(source.config)
    shard_tensor(model, plans, mesh, sequence_parallel=False)
    model = model.to(dtype).to_empty(device=mesh.device)
    source.load_into(dict(model.named_parameters()), {name: plan.computed for name, plan in plans.items()})
    load_routing_state(model, {name: bias.load() for name, bias in source.biases.items()})
    return model.eval()


def share_executor(source: ModelSource, mesh: Mesh, dtype: torch.dtype, options: dict[str, Any]) -> TorchExecutor:
    config, group = source.config, mesh.group("tp")
    heads = HeadShare.of(config.n_heads, config.n_kv_heads, group.size, group.index)
    return TorchExecutor(load_share(source, mesh, dtype), heads=heads, **options)


def _own_device(device: str, local_rank: int) -> torch.device:
    return torch.device(device, local_rank) if device == "cuda" else torch.device(device)
