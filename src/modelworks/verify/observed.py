"""`Observed`: what a run shows of itself, for comparing one with another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

# Parts of a layer in the order of the forward pass; the input of layer 0 is the embedding.
PARTS = ("input", "attention", "feed_forward", "output")
Place = tuple[int, str]  # layer and part


@dataclass(frozen=True)
class Observed:
    """losses, norms: of each step. initial, final: parameters before and after all steps.

    gradients: of each step, before clipping. hidden: of the first step, in the order of rows and columns of the global
    batch. All tensors are whole and float64. Lists are shorter than asked for where a step was not finite: it is the
    last of them.

    copies, of a split run: before the first and after the last step, parameter -> (largest relative difference between
    the value that counts and a rank's copy of it, that rank).
    """

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    initial: dict[str, Tensor]
    final: dict[str, Tensor]
    hidden: dict[Place, Tensor] = field(default_factory=dict)
    copies: list[dict[str, tuple[float, int]]] = field(default_factory=list)


def changes(run: Observed) -> Mapping[str, Tensor]:
    """What all steps did to each parameter."""
    return {name: run.final[name] - run.initial[name] for name in run.final}
