"""The global norm of all gradients, and clipping by it (Pascanu et al. 2013, 1211.5063).

Invariant: the norm is that of the *logical* gradient, every element counted once. A rank that holds shards passes
all its gradients, the names of those that it counts (of several ranks with the same elements one does), and a `reduce`
that combines the ranks' contributions. All ranks get the same norm and scale everything they hold by it.

A norm that is not finite is returned as it is and nothing is scaled: whether to skip, stop or go on is the
caller's decision, and gradients multiplied by NaN would hide where it came from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

# Combines one float64 scalar over all ranks, by sum or by maximum; called once or twice for a norm, the same for all. A
# rank that counts nothing passes a scalar on the CPU, whatever its device.
Reduce = Callable[[Tensor, Literal["sum", "max"]], Tensor]


def clip_gradients(
    named_gradients: Mapping[str, Tensor],
    max_norm: float | None,
    p: float = 2.0,
    reduce: Reduce | None = None,
    counted: Collection[str] | None = None,
    powers: Tensor | None = None,
) -> float:
    """Scale gradients in place so that their global p-norm is at most `max_norm`; returns the norm before.

    named_gradients: full parameter name -> gradient, any shape and floating dtype. max_norm: None measures only.
    p: any positive number, or `math.inf`. reduce: over all ranks that hold a part; None where one holds everything.
    counted: names whose elements this rank adds to the norm; None for all of them. powers: `norm_powers` of those, in
    their order, where they are known already.
    A sparse gradient is densified by nobody and therefore refused by torch.
    """
    if not p > 0:
        raise ValueError(f"the norm's order must be positive, got {p}")
    gradients = [gradient for gradient in named_gradients.values() if gradient.numel()]
    combine = reduce or (lambda value, how: value)
    own = [gradient for name, gradient in named_gradients.items() if counted is None or name in counted]
    norm = _global_norm([gradient for gradient in own if gradient.numel()], p, combine, powers)
    if gradients and max_norm is not None and math.isfinite(norm) and norm > max_norm:
        torch._foreach_mul_(gradients, max_norm / norm)
    return norm


def norm_powers(gradients: Sequence[Tensor], p: float = 2.0, least: torch.dtype = torch.float32) -> Tensor:
    """The p-th power of each tensor's p-norm, (tensors,) in float64 on their device; norms are taken in at least
    `least`."""
    if not gradients:
        return torch.zeros(0, dtype=torch.float64)
    norms = [
        torch.linalg.vector_norm(gradient, ord=p, dtype=torch.promote_types(gradient.dtype, least))
        for gradient in gradients
    ]
    return torch.stack([norm.double() for norm in norms]).pow(p)


def _global_norm(gradients: Sequence[Tensor], p: float, combine: Reduce, powers: Tensor | None) -> float:
    if math.isinf(p):
        return float(_largest(gradients, combine))
    if p not in (1.0, 2.0):
        return _scaled_norm(gradients, p, combine)
    first = norm_powers(gradients, p) if powers is None else powers
    norm = float(combine(first.sum(), "sum").pow(1.0 / p))
    if math.isfinite(norm):
        return norm
    # Squares of large finite float32 values overflow; float64 tells them from a real inf or NaN.
    return float(combine(norm_powers(gradients, p, torch.float64).sum(), "sum").pow(1.0 / p))


def _scaled_norm(gradients: Sequence[Tensor], p: float, combine: Reduce) -> float:
    """The largest value taken out: for a high order p, |g|^p leaves the range even of float64."""
    largest = _largest(gradients, combine)
    if not largest.isfinite() or largest == 0:
        return float(largest)
    powers = [(gradient.double().abs() / largest.to(gradient.device)).pow(p).sum() for gradient in gradients]
    return float(largest * combine(_total(powers), "sum").pow(1.0 / p))


def _largest(gradients: Sequence[Tensor], combine: Reduce) -> Tensor:
    norms = [torch.linalg.vector_norm(gradient, ord=math.inf).double() for gradient in gradients]
    largest = torch.stack(norms).max() if norms else torch.zeros((), dtype=torch.float64)
    # Backends take the maximum over ranks by a comparison, which a NaN may lose; an infinity wins.
    return combine(largest.masked_fill(largest.isnan(), math.inf), "max")


def _total(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).sum() if values else torch.zeros((), dtype=torch.float64)
