"""A tensor that is made when it is needed, so that neither writing nor converting ever holds a whole model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LazyTensor:
    """load: makes the tensor, of that dtype and shape; called each time that it is needed."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], Tensor]


def loaded(value: Tensor | LazyTensor) -> Tensor:
    return value.load() if isinstance(value, LazyTensor) else value
