"""Numeric precision: which dtype holds the weights, which computes, and how fp16 avoids underflow.

    fp32            everything in float32
    bf16            weights and products in bfloat16, float32 master weights in the optimiser
    bf16-autocast   float32 weights, products in bfloat16
    fp16            float32 weights, products in float16, dynamic loss scaling

bfloat16 has float32's range and needs no scaling. float16's smallest number is 6e-8, so the loss is multiplied by
a power of two before the backward pass and the gradients divided by it after (Micikevicius et al. 2017, 1710.03740).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from modelworks.config import LossScaleConfig

PrecisionName = Literal["fp32", "bf16", "bf16-autocast", "fp16"]


@dataclass(frozen=True)
class Precision:
    """parameter_dtype: of the stored weights. autocast_dtype: of products, None for that of the weights."""

    name: str
    parameter_dtype: torch.dtype
    autocast_dtype: torch.dtype | None = None
    scales_loss: bool = False

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """The context to run a forward pass in."""
        if self.autocast_dtype is None:
            return nullcontext()
        # The weight cache would keep casts alive across micro-batches of one context; each pass enters its own.
        return torch.autocast(device.type, dtype=self.autocast_dtype)


PRECISIONS: dict[str, Precision] = {
    "fp32": Precision("fp32", torch.float32),
    "bf16": Precision("bf16", torch.bfloat16),
    "bf16-autocast": Precision("bf16-autocast", torch.float32, torch.bfloat16),
    "fp16": Precision("fp16", torch.float32, torch.float16, scales_loss=True),
}


class LossScaler:
    """Dynamic loss scale: halves when gradients overflow, doubles after `growth_interval` good steps in a row.

    Scales are powers of two when the initial one is, so that multiplying and dividing are exact. Below
    `SMALLEST` the run is not suffering from fp16's range but from diverging, and `update` says so.
    """

    SMALLEST = 2.0**-14

    def __init__(self, config: LossScaleConfig) -> None:
        self.scale = config.initial
        self.growth_interval = config.growth_interval
        self.good_steps = 0

    def update(self, *, overflowed: bool) -> None:
        """Record one step. Raises FloatingPointError when halving no longer helps."""
        if overflowed:
            self.scale /= 2.0
            self.good_steps = 0
            if self.scale < self.SMALLEST:
                raise FloatingPointError(f"gradients overflow fp16 at every loss scale down to {self.SMALLEST:g}")
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale *= 2.0
            self.good_steps = 0

    def state(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state(self, state: dict[str, float]) -> None:
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
