"""Activations that wait in host memory between the forward and the backward pass (Rhu et al. 2016, vDNN, 1602.08124).

Each tensor that autograd keeps inside a block is copied to the host, and back when the backward pass asks for it.
Parameters are not activations: they stay. Invariant: what comes back are the same bits, so no gradient changes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

HOST = torch.device("cpu")


def activations_on_host(block: nn.Module) -> saved_tensors_hooks:
    """A context for the block's forward pass. On a CPU nothing moves: the host is where everything is."""

    @cache
    def parameters() -> set[int]:
        """Not before the forward pass, which may be what gathers them (FSDP2)."""
        return {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}

    def to_host(tensor: Tensor) -> Any:
        if tensor.device == HOST or tensor.untyped_storage().data_ptr() in parameters():
            return tensor
        waiting = torch.empty(tensor.shape, dtype=tensor.dtype, layout=tensor.layout, pin_memory=True)
        waiting.copy_(tensor, non_blocking=True)
        return tensor.device, waiting

    def from_host(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        device, waiting = kept
        return waiting.to(device, non_blocking=True)  # type: ignore[no-any-return]

    return saved_tensors_hooks(to_host, from_host)


class OnHost(torch.autograd.Function):
    """x in host memory; its gradient goes back to where x was. For a block's input under full recomputation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.device = x.device
        return x.to(HOST)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.to(ctx.device)
