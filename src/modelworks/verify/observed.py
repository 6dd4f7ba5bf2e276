"""`Observed`: what a run shows of itself, for comparing one with another."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Observed:
    """losses, norms: of each step. initial, final: parameters before and after all steps.

    gradients: of each step, before clipping. hidden: of the first step, each layer's output in the order of rows and
    columns of the global batch (layer -1 is the embedding's). All tensors are whole and float64.
    """

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    initial: dict[str, Tensor]
    final: dict[str, Tensor]
    hidden: dict[int, Tensor] = field(default_factory=dict)
