"""Offload: optimiser state and master weights that live in host memory or in files, not on the device.

The update then runs on the CPU, where the state is: what travels are gradients one way and new weights the other
(ZeRO-Offload, Ren et al. 2021, 2101.06840; ZeRO-Infinity, Rajbhandari et al. 2021, 2104.07857). A parameter gets a
master copy in float32 (float64 for float64) whatever its dtype, because the weight on the device is not where the
update happens. Invariant: the arithmetic is the same elementwise update, so results equal those without offload.

Files are mapped into memory: the kernel reads a page when the update reaches it and writes it back when it needs the
room, so a rank's resident memory may be smaller than its state. All blocks are reserved when a file is made: a full
disk is an error then, and not a crash (SIGBUS) in the middle of a step. The files are scratch: checkpoints have all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from modelworks.config import ParallelConfig, UserError

Allocate = Callable[[str, torch.Size, torch.dtype], Tensor]  # (full state name, shape, dtype) -> zeros


def state_allocator(parallel: ParallelConfig, device: torch.device, directory: Path) -> Allocate | None:
    """Where optimiser state goes: None for the device itself. directory: of this rank, for `nvme`; where
    `parallel.offload_path` is set, a directory of the same name in there."""
    if parallel.offload == "none":
        return None
    if parallel.offload == "cpu":
        pin = device.type == "cuda"
        return lambda name, shape, dtype: torch.zeros(shape, dtype=dtype, pin_memory=pin)
    place = Path(parallel.offload_path).expanduser() / directory.name if parallel.offload_path else directory
    files = _Files(place)
    return files.zeros


class _Files:
    """One file a tensor, `<name with dots>.bin`, made anew."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def zeros(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if not shape.numel():
            return torch.zeros(shape, dtype=dtype)
        path = self._directory / f"{name.replace('/', '.')}.bin"
        size = shape.numel() * dtype.itemsize
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise UserError(
                f"parallel.offload: {path} cannot be made with {size:,} bytes ({error.strerror}); free some room, or "
                "set parallel.offload_path to another disk"
            ) from None
        return torch.from_file(str(path), shared=True, size=shape.numel(), dtype=dtype).view(shape)
