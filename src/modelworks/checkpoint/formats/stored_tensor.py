"""A tensor that lies in a file of another program, read whole or in part when it is needed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from modelworks.checkpoint.errors import CheckpointError
from modelworks.checkpoint.formats.safetensors_files import byte_view
from modelworks.checkpoint.local_storage import read_into


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. begin, end: bytes of its storage there; offset: of its first element, in elements."""

    path: Path
    begin: int
    end: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def read(self) -> Tensor:
        """The tensor, in memory of its own."""
        if self._contiguous():
            return self.flat(0, self.numel).view(self.shape)
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return self._elements(self.offset, span).as_strided(self.shape, self.stride).contiguous()

    def flat(self, start: int, count: int) -> Tensor:
        """Elements `start` to `start + count` of the tensor, which must be contiguous, in row-major order."""
        if not self._contiguous() or not 0 <= start <= start + count <= self.numel:
            raise CheckpointError(f"{self.path}: elements {start:,} + {count:,} of a tensor of shape {self.shape}")
        return self._elements(self.offset + start, count)

    def _contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return self.numel == 0
            expected *= size
        return True

    def _elements(self, start: int, count: int) -> Tensor:
        """`count` elements of the storage from `start`."""
        out = torch.empty(count, dtype=self.dtype)
        buffer = memoryview(byte_view(out))
        if read_into(self.path, self.begin + start * self.dtype.itemsize, buffer) < len(buffer):
            raise CheckpointError(f"{self.path}: ends inside a tensor; the file is truncated")
        return out
