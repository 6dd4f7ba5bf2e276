"""Spikes of a curve, by its own recent past: robust, one-sided, and the same on every rank.

The window of accepted values before a step has a trend, a line through the medians of its two halves (Tukey's resistant
line, 1977), and a usual value: the median of its newer half, or the trend's next value where that is higher. A value is
a spike where all of this holds:

    it is more than `threshold` deviations above the usual value; a deviation is 1.4826 x the median absolute distance
        from the trend, which estimates the standard deviation of a normal distribution and does not move with outliers
        (Hampel 1974)
    it is above it by more than 1.5 times the farthest distance in the window: a curve with heavy tails has shown them
        before
    it is above it by `least`, which no one would overlook

Spikes stay out of the window, so that a row of them is judged by what was normal. `PATIENCE` in a row are no spikes
but a new level (another part of the data): they begin a new window. What is not finite is always a spike.

A slow divergence is no spike: every value is close to the one before. `Drift` compares medians of blocks with the
lowest of them so far.

Both are functions of the values alone. Loss and gradient norm are reduced over all ranks, so that all ranks decide
alike without asking each other.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

DEVIATION = 1.4826  # of a normal distribution, over its median absolute deviation
LEAST_VALUES = 32  # accepted values before anything but a value that is not finite is judged
BEYOND = 1.5  # times the farthest value of the window
PATIENCE = 8  # spikes in a row that are a new level
WARMUP = 2.0  # times the threshold while the rate rises: curves are at their steepest


@dataclass(frozen=True)
class Spike:
    """value and typical: of the curve. deviations: above the typical value; infinite where the value is not finite."""

    curve: str
    value: float
    typical: float | None
    deviations: float

    def __str__(self) -> str:
        name = self.curve.replace("_", " ")
        if not math.isfinite(self.value):
            return f"{name} {self.value}"
        return f"{name} {self.value:.4g}, {self.deviations:.0f} deviations above {self.typical:.4g}"


@dataclass
class Window:
    """Accepted values of one curve. logarithmic: whether deviations are ratios, as a gradient norm's are.

    least: how far above the usual value a spike is at least, as a share of it.
    """

    curve: str
    size: int
    threshold: float
    least: float
    logarithmic: bool
    values: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self.values = deque(maxlen=self.size)

    @property
    def typical(self) -> float | None:
        """The median of the newer half of the window; None before there are values."""
        values = list(self.values)
        return statistics.median(values[len(values) // 2 :]) if values else None

    def judge(self, value: float, *, warming_up: bool) -> Spike | None:
        if not math.isfinite(value):
            return Spike(self.curve, value, self.typical, math.inf)
        typical = self.typical
        if typical is None or len(self.values) < LEAST_VALUES or value <= typical:
            return None
        seen = [self._scale(each) for each in self.values]
        half, n = len(seen) // 2, len(seen)
        older, newer = statistics.median(seen[:half]), statistics.median(seen[half:])
        slope = (newer - older) / (n / 2)  # between the middles of the halves
        begin = older - slope * (half - 1) / 2
        usual = max(newer, begin + slope * n)
        distances = [abs(each - (begin + slope * place)) for place, each in enumerate(seen)]
        deviation = DEVIATION * statistics.median(distances)
        least = math.log1p(self.least) if self.logarithmic else self.least * abs(usual)
        above = self._scale(value) - usual
        limit = self.threshold * (WARMUP if warming_up else 1.0) * deviation
        if above <= max(limit, BEYOND * max(distances), least):
            return None
        return Spike(self.curve, value, typical, above / deviation if deviation else math.inf)

    def _scale(self, value: float) -> float:
        return math.log(max(value, 1e-300)) if self.logarithmic else value


@dataclass
class Detector:
    """Judges the loss (nats per token) and the gradient norm of each step together."""

    size: int
    threshold: float
    loss: Window = field(init=False)
    norm: Window = field(init=False)
    refused: list[tuple[float, float]] = field(default_factory=list)  # finite spikes since the last accepted step

    def __post_init__(self) -> None:
        self.loss = Window("loss", self.size, self.threshold, least=0.1, logarithmic=False)
        self.norm = Window("gradient_norm", self.size, self.threshold, least=1.0, logarithmic=True)

    def judge(self, loss: float, norm: float, *, warming_up: bool = False) -> list[Spike]:
        """What is a spike in this step; nothing where the step is accepted, which makes it part of the past."""
        spikes = [
            spike
            for window, value in ((self.loss, loss), (self.norm, norm))
            if (spike := window.judge(value, warming_up=warming_up))
        ]
        if not spikes:
            self._accept(loss, norm)
        elif math.isfinite(loss) and math.isfinite(norm):
            self.refused.append((loss, norm))
        return spikes

    def take_new_level(self) -> bool:
        """Whether the last steps were no spikes but a new level, from where the window now begins."""
        if len(self.refused) < PATIENCE:
            return False
        level, self.refused = self.refused, []
        self.loss.values.clear()
        self.norm.values.clear()
        for loss, norm in level:
            self._accept(loss, norm)
        return True

    def _accept(self, loss: float, norm: float) -> None:
        self.loss.values.append(loss)
        self.norm.values.append(norm)
        self.refused = []

    def state(self) -> dict[str, Any]:
        """For a checkpoint: numbers and lists."""
        return {
            "loss": list(self.loss.values),
            "norm": list(self.norm.values),
            "refused": [list(pair) for pair in self.refused],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError for what is none. A smaller window keeps the newest values."""
        loss, norm = _numbers(state["loss"]), _numbers(state["norm"])
        refused = [_numbers(pair) for pair in state["refused"]]
        if len(loss) != len(norm) or any(len(pair) != 2 for pair in refused):
            raise ValueError("loss and norm belong together")
        self.loss.values, self.norm.values = deque(loss, self.size), deque(norm, self.size)
        self.refused = [(pair[0], pair[1]) for pair in refused]


@dataclass
class Drift:
    """A loss that rises over many steps. Blocks of `size` finite losses are compared by their medians; two in a row
    above the lowest so far, by `SURE` standard errors and a tenth, are a divergence. It is told once, and again only
    after the loss has come back."""

    SURE = 8.0
    LEAST = 0.1

    size: int = 32
    block: list[float] = field(default_factory=list)
    lowest: float | None = None
    high: int = 0  # blocks in a row that were too high

    def add(self, loss: float) -> tuple[float, float] | None:
        """(level now, lowest level) at the step at which a divergence is certain."""
        if not math.isfinite(loss):
            return None
        self.block.append(loss)
        if len(self.block) < self.size:
            return None
        level = statistics.median(self.block)
        deviation = DEVIATION * statistics.median(abs(each - level) for each in self.block)
        # Of a median: sqrt(pi / 2) times that of a mean; of a difference of two: sqrt(2) times that.
        error = math.sqrt(math.pi / self.size) * deviation
        lowest = self.lowest
        self.block = []
        if lowest is None or level <= lowest:
            self.lowest, self.high = level, 0
            return None
        risen = level - lowest > max(self.SURE * error, self.LEAST * abs(lowest))
        self.high = self.high + 1 if risen else 0
        return (level, lowest) if self.high == 2 else None

    def state(self) -> dict[str, Any]:
        return {"block": list(self.block), "lowest": self.lowest, "high": self.high}

    def load_state(self, state: dict[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError for what is none."""
        block, lowest, high = _numbers(state["block"]), state["lowest"], state["high"]
        if len(block) >= self.size or type(high) is not int or high < 0:
            raise ValueError("a block has fewer values, and a count is a whole number")
        self.block, self.lowest, self.high = block, None if lowest is None else _numbers([lowest])[0], high


def _numbers(values: Sequence[Any]) -> list[float]:
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        raise TypeError("not a number")
    if not all(math.isfinite(value) for value in values):
        raise ValueError("not finite")
    return [float(value) for value in values]
