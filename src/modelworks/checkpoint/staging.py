"""The copy of a rank's shards that is written while training goes on.

One buffer in host memory, made at the first save and used again by all that follow: what a step pays for is a copy at
memory's speed. For a CUDA device the buffer is page-locked, which makes the copy several times as fast.

The invariant: after `take` has returned, nothing that happens to the shards' tensors reaches what it returned.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from modelworks.checkpoint.owners import Shard

_ALIGNMENT = 64  # bytes: a cache line, and a multiple of every element size


@dataclass(frozen=True)
class Taken:
    """staged: copies. live: shards beyond the limit, the very tensors that training changes."""

    staged: list[Shard]
    live: list[Shard]


class Staging:
    """limit: bytes of the buffer at most; None: as many as it takes."""

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        self._device, self._limit = device, limit
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._plan: list[tuple[torch.dtype, tuple[int, ...]]] = []
        self._copies: list[Tensor] = []

    @property
    def bytes(self) -> int:
        """Of the buffer."""
        return self._buffer.numel()

    @torch.no_grad()
    def take(self, shards: Sequence[Shard]) -> Taken:
        """Copy what fits, in the order given. The copies are valid until the next call."""
        fits, live, used = [], [], 0
        for shard in shards:
            size = _aligned(shard.bytes)
            if self._limit is not None and used + size > self._limit:
                live.append(shard)
                continue
            fits.append(shard)
            used += size
        tensors = [shard.tensor.detach() for shard in fits]
        self._make_copies(tensors, used)
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return Taken([replace(s, tensor=copy) for s, copy in zip(fits, self._copies, strict=True)], live)

    def _make_copies(self, tensors: Sequence[Tensor], size: int) -> None:
        plan = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
        if plan == self._plan:
            return
        self._plan, self._copies = [], []
        if size > self._buffer.numel():
            self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old one first
            self._buffer = _page_locked(size) if self._device.type == "cuda" else torch.empty(size, dtype=torch.uint8)
        start = 0
        for (dtype, shape), tensor in zip(plan, tensors, strict=True):
            size = tensor.numel() * tensor.element_size()
            self._copies.append(self._buffer[start : start + size].view(dtype).view(shape))
            start += _aligned(size)
        self._plan = plan


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _page_locked(size: int) -> Tensor:
    """Host memory that a device copies to directly. torch's own allocator would take the next power of two.

    Where the system does not allow so much of it, ordinary memory: slower, but it works.
    """
    buffer = torch.empty(size, dtype=torch.uint8)
    runtime, address = torch.cuda.cudart(), buffer.data_ptr()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(address, size, 0)) == 0:
        # Before the memory goes: unlocking what has been given to someone else would be an error.
        weakref.finalize(buffer, runtime.cudaHostUnregister, address)
    return buffer
