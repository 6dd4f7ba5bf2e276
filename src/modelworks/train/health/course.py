"""`Course`: how loss and gradient norm have gone over a whole run, in few numbers, and a law that extends it.

Steps are put together in blocks, of which there are never more than `MOST`: when they are full, each two become one. So
a block is a fixed share of the run, and what is asked of the last quarter of the steps means the same early and late.

    L(s) = E + A s^-a        the power law with a floor that losses follow (Hestness et al. 2017, 1712.00409;
                             Kaplan et al. 2020, 2001.08361), fitted to blocks by least squares
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

SMALLEST = 16  # steps of a block at first
MOST = 64  # blocks
DEVIATION = 1.4826  # of a normal distribution, over its median absolute deviation
_FLOORS = 48  # tried in a fit
_SURE = 3.0  # standard errors


@dataclass(frozen=True)
class Block:
    """step: of its middle. loss: median, nats per token. norm: median of the logarithm of the gradient norm."""

    step: float
    loss: float
    norm: float


@dataclass
class Course:
    """Of the steps that were accepted. size: steps of a block."""

    size: int = SMALLEST
    blocks: list[Block] = field(default_factory=list)
    _open: list[tuple[int, float, float]] = field(default_factory=list)

    def add(self, step: int, loss: float, norm: float) -> bool:
        """step: from 1. Returns whether a block is complete with it."""
        if not (math.isfinite(loss) and math.isfinite(norm) and norm > 0):
            return False
        self._open.append((step, loss, math.log(norm)))
        if len(self._open) < self.size:
            return False
        steps, losses, norms = zip(*self._open, strict=True)
        self.blocks.append(Block(statistics.fmean(steps), statistics.median(losses), statistics.median(norms)))
        self._open = []
        if len(self.blocks) == MOST:
            pairs = zip(self.blocks[::2], self.blocks[1::2], strict=True)
            self.blocks = [_joined(one, other) for one, other in pairs]
            self.size *= 2
        return True

    @property
    def level(self) -> float | None:
        """The loss of the last few steps; None before there is a block."""
        return statistics.median(block.loss for block in self.blocks[-4:]) if self.blocks else None

    def state(self) -> dict[str, Any]:
        """For a checkpoint: numbers and lists."""
        return {
            "size": self.size,
            "blocks": [[block.step, block.loss, block.norm] for block in self.blocks],
            "open": [list(row) for row in self._open],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError for what is none."""
        size, opened = state["size"], [(int(step), float(loss), float(norm)) for step, loss, norm in state["open"]]
        blocks = [Block(float(step), float(loss), float(norm)) for step, loss, norm in state["blocks"]]
        if type(size) is not int or size < SMALLEST or len(blocks) >= MOST or len(opened) >= size:
            raise ValueError("more than a course holds")
        self.size, self.blocks, self._open = size, blocks, opened


@dataclass(frozen=True)
class Law:
    """What the law says of some later steps: their mean loss between `low` and `high`, sure by 3 standard errors.

    floor, exponent: of the best fit. deviation: of a block's loss from it."""

    low: float
    high: float
    floor: float
    exponent: float
    deviation: float


def fit_law(blocks: Sequence[Block], later: Sequence[Block]) -> Law | None:
    """Fit to `blocks`, at least 8, and say what the losses of `later` should be. None where no fit falls."""
    logs, losses = [math.log(block.step) for block in blocks], [block.loss for block in blocks]
    lowest = min(losses)
    if lowest <= 0:
        return None
    # From 0 to nearly the lowest loss: how close to it the floor lies is what shapes the end of the curve.
    fits = [_fit(logs, losses, lowest * (1 - 10 ** (-3 * place / (_FLOORS - 1)))) for place in range(_FLOORS)]
    found = [fit for fit in fits if fit is not None and fit.slope < 0]
    if not found:
        return None
    best = min(found, key=lambda fit: fit.squares)
    variance = best.squares / (len(blocks) - 3)
    wide = [fit for fit in found if fit.squares <= best.squares + _SURE**2 * variance]
    said = [fit.at([math.log(block.step) for block in later], variance) for fit in wide]
    low, high = min(mean - error for mean, error in said), max(mean + error for mean, error in said)
    return Law(low, high, best.floor, -best.slope, math.sqrt(variance))


@dataclass(frozen=True)
class _Fit:
    """log(loss - floor) = intercept + slope log(step), weighted by (loss - floor)^2, which makes deviations those of
    the loss. squares: their sum."""

    floor: float
    slope: float
    centre: float  # of log(step), and the value there
    value: float
    weight: float
    spread: float
    squares: float

    def at(self, logs: Sequence[float], variance: float) -> tuple[float, float]:
        """Mean loss there, and what it may be off by."""
        heights = [math.exp(self.value + self.slope * (x - self.centre)) for x in logs]
        mean, far = statistics.fmean(heights), statistics.fmean(logs) - self.centre
        error = mean * math.sqrt(variance * (1 / self.weight + far**2 / self.spread))
        return self.floor + mean, _SURE * error


def _fit(logs: Sequence[float], losses: Sequence[float], floor: float) -> _Fit | None:
    heights = [loss - floor for loss in losses]
    if min(heights) <= 0:
        return None
    weights, values = [height**2 for height in heights], [math.log(height) for height in heights]
    weight = sum(weights)
    centre = sum(w * x for w, x in zip(weights, logs, strict=True)) / weight
    value = sum(w * y for w, y in zip(weights, values, strict=True)) / weight
    spread = sum(w * (x - centre) ** 2 for w, x in zip(weights, logs, strict=True))
    if spread <= 0:
        return None
    slope = sum(w * (x - centre) * y for w, x, y in zip(weights, logs, values, strict=True)) / spread
    modelled = (floor + math.exp(value + slope * (x - centre)) for x in logs)
    squares = sum((loss - own) ** 2 for loss, own in zip(losses, modelled, strict=True))
    return _Fit(floor, slope, centre, value, weight, spread, squares)


def _joined(one: Block, other: Block) -> Block:
    return Block((one.step + other.step) / 2, (one.loss + other.loss) / 2, (one.norm + other.norm) / 2)
