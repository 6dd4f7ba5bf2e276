"""The global norm of all gradients, and clipping by it (Pascanu et al. 2013, 1211.5063).

Invariant: the norm is that of the *logical* gradient, every element counted once. A rank that holds shards passes
the gradients it owns and a `reduce` that combines the ranks' contributions; the arithmetic is the same.

A norm that is not finite is returned as it is and nothing is scaled: whether to skip, stop or go on is the
caller's decision, and gradients multiplied by NaN would hide where it came from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

# Combines one float64 scalar over all shards, by sum (finite p) or by maximum (p = inf).
Reduce = Callable[[Tensor, Literal["sum", "max"]], Tensor]


def clip_gradients(
    named_gradients: Mapping[str, Tensor], max_norm: float | None, p: float = 2.0, reduce: Reduce | None = None
) -> float:
    """Scale gradients in place so that their global p-norm is at most `max_norm`; returns the norm before.

    named_gradients: full parameter name -> gradient, any shape and floating dtype. max_norm: None measures only.
    p: any positive number, or `math.inf`. A sparse gradient is densified by nobody and therefore refused by torch.
    """
    if not p > 0:
        raise ValueError(f"the norm's order must be positive, got {p}")
    gradients = list(named_gradients.values())
    norm = _global_norm(gradients, p, reduce, torch.float32)
    if not math.isfinite(norm):
        # Squares of large finite float32 values overflow; float64 tells them from a real inf or NaN.
        norm = _global_norm(gradients, p, reduce, torch.float64)
    if max_norm is not None and math.isfinite(norm) and norm > max_norm:
        torch._foreach_mul_(gradients, max_norm / norm)
    return norm


def _global_norm(gradients: Iterable[Tensor], p: float, reduce: Reduce | None, least: torch.dtype) -> float:
    """Each tensor's norm in at least `least`, combined in float64."""
    norms = [
        torch.linalg.vector_norm(gradient, ord=p, dtype=torch.promote_types(gradient.dtype, least)).double()
        for gradient in gradients
        if gradient.numel()
    ]
    total = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64)
    if math.isinf(p):
        largest = total.max()
        return float(largest if reduce is None else reduce(largest, "max"))
    powers = total.pow(p).sum()
    return float((powers if reduce is None else reduce(powers, "sum")).pow(1.0 / p))
