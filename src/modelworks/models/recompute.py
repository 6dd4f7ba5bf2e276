"""Recomputation: what a block keeps from its forward pass for its backward pass (Chen et al. 2016).

none       keep everything autograd asks for.
selective  keep the results of matrix products and attention, make the cheap elementwise ones again
           (norms, rotation, activations): most of the memory for a few per cent of the time (Korthikanti et al. 2022).
full       keep only the block's input and run it again: least memory, about a third more compute.

Invariant: the same operations run again on the same values, so gradients do not change by a bit on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from modelworks.models.layers.grouped import grouped_mm
from modelworks.models.offload import OnHost, activations_on_host

Recompute = Literal["none", "selective", "full"]

_KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    grouped_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]


def run_block(block: nn.Module, recompute: Recompute, offload: bool, *inputs: Any) -> Tensor:
    """`block(*inputs)`, keeping for the backward pass what `recompute` says, in host memory with `offload`."""
    if not torch.is_grad_enabled():
        return block(*inputs)  # type: ignore[no-any-return]
    if recompute == "none":
        with activations_on_host(block) if offload else nullcontext():
            return block(*inputs)  # type: ignore[no-any-return]
    if offload:
        return _recomputed_from_host(block, *inputs)
    extra: dict[str, Any] = {}
    if recompute == "selective":
        extra["context_fn"] = partial(create_selective_checkpoint_contexts, _KEPT)
    # Our dropout is a function of its place, not of a generator: there is no random state to keep.
    return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False, **extra)  # type: ignore[no-any-return]


def _recomputed_from_host(block: nn.Module, x: Tensor, *others: Any) -> Tensor:
    """Full recomputation from an input that waits in host memory."""
    device = x.device

    def run(waiting: Tensor) -> Tensor:
        return block(waiting.to(device), *others)  # type: ignore[no-any-return]

    waiting = OnHost.apply(x)  # type: ignore[no-untyped-call]
    return checkpoint(run, waiting, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]


def activation_bytes(forward: Callable[[], Tensor], excluded: list[Tensor]) -> int:
    """Bytes that stay allocated between a forward pass and its backward pass.

    forward: runs the model and returns the tensor to differentiate. excluded: parameters and inputs, which live
    anyway. Counts each storage made during the call and still alive after it once, whatever keeps it alive.
    """
    seen: dict[int, tuple[StorageWeakRef, int]] = {}
    with _StorageRecorder(seen):
        result = forward()
    known = {tensor.untyped_storage().data_ptr() for tensor in [*excluded, result]}
    total = 0
    for pointer, (reference, size) in seen.items():
        if pointer not in known and not reference.expired():  # type: ignore[no-untyped-call]
            total += size
    return total


class _StorageRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every storage that an operation returns, without keeping it alive."""

    def __init__(self, seen: dict[int, tuple[StorageWeakRef, int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                # An address that is used again belongs to a storage whose predecessor is gone.
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self.seen[storage.data_ptr()] = (reference, storage.nbytes())
        return result
