"""Spikes of a curve, by its own recent past: robust, one-sided, and the same on every rank.

The window of accepted values before a step has a trend, a line through the medians of its two halves (Tukey's resistant
line, 1977), and a usual value: the median of its newer half, or the trend's next value where that is higher. A value
jumps where all of this holds:

    it is more than `threshold` deviations above the usual value; a deviation is 1.4826 x the median absolute distance
        from the trend, which estimates the standard deviation of a normal distribution and does not move with outliers
        (Hampel 1974)
    it is above it by more than 1.5 times the farthest distance in the window: a curve with heavy tails has shown them
        before
    it is above it by `least`, which no one would overlook

A loss that jumps is a spike. A gradient norm that jumps alone need not be one: norms of small batches have tails that
no window of a hundred steps shows, since what makes them is a batch in thousands, and clipping takes their size away.
It is an outlier, accepted and kept in mind, unless something else speaks for trouble:

    the loss of that step is above half of its own limits, or that of one of the next `PATIENCE` steps is, for which
        half is enough then
    it jumps for the `PERSISTENT`th time in a row, or right behind a spike
    more than `UNBOUNDED` times the usual norm is left of it after clipping
    it is more than `UNBELIEVABLE` times the usual norm

Spikes stay out of the window, so that a row of them is judged by what was normal. `PATIENCE` in a row are no spikes
but a new level (another part of the data): they begin a new window. What is not finite is always a spike.

A slow divergence is no spike: every value is close to the one before. `Drift` compares medians of blocks with the
lowest of them so far.

All are functions of the values alone. Loss and gradient norm are reduced over all ranks, so that all ranks decide
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
SUSPECTED = 0.5  # times the limits of the loss where the norm has jumped
PERSISTENT = 3  # jumps of the norm in a row
UNBOUNDED = 10.0  # times the usual norm, after clipping
UNBELIEVABLE = 50.0  # and before it


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

    def judge(self, value: float, *, warming_up: bool, suspected: bool = False) -> Spike | None:
        """Whether it jumps. suspected: half of the limits are enough."""
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
        above, share = self._scale(value) - usual, SUSPECTED if suspected else 1.0
        limit = self.threshold * (WARMUP if warming_up else 1.0) * deviation
        if above <= max(share * limit, BEYOND * max(distances), share * least):
            return None
        return Spike(self.curve, value, typical, above / deviation if deviation else math.inf)

    def _scale(self, value: float) -> float:
        return math.log(max(value, 1e-300)) if self.logarithmic else value


@dataclass(frozen=True)
class Seen:
    """In one step. outlier: a gradient norm that jumps alone, of a step that is accepted."""

    spikes: list[Spike] = field(default_factory=list)
    outlier: Spike | None = None


@dataclass
class Detector:
    """Judges the loss (nats per token) and the gradient norm of each step together."""

    size: int
    threshold: float
    loss: Window = field(init=False)
    norm: Window = field(init=False)
    refused: list[tuple[float, float]] = field(default_factory=list)  # finite spikes since the last accepted step
    outliers: list[tuple[float, float]] = field(default_factory=list)  # in a row until now: not yet in the windows
    suspected: int = 0  # steps to come in which half of the loss's limits are enough

    def __post_init__(self) -> None:
        self.loss = Window("loss", self.size, self.threshold, least=0.1, logarithmic=False)
        self.norm = Window("gradient_norm", self.size, self.threshold, least=1.0, logarithmic=True)

    def judge(self, loss: float, norm: float, *, clip_at: float | None, warming_up: bool = False) -> Seen:
        """A step without spikes is accepted, which makes it part of the past. norm: before clipping at `clip_at`."""
        jump = self.norm.judge(norm, warming_up=warming_up)
        suspected = jump is not None or self.suspected > 0
        high = self.loss.judge(loss, warming_up=warming_up, suspected=suspected)
        self.suspected = max(0, self.suspected - 1)
        if jump and not high and self._is_lone(jump, clip_at):
            self.outliers.append((loss, norm))
            self.suspected = PATIENCE
            return Seen(outlier=jump)
        spikes = [spike for spike in (high, jump) if spike]
        if not spikes:
            self._accept(loss, norm)
        else:
            self.refused += self.outliers
            self.outliers = []
            if math.isfinite(loss) and math.isfinite(norm):
                self.refused.append((loss, norm))
        return Seen(spikes)

    def take_new_level(self) -> bool:
        """Whether the last steps were no spikes but a new level, from where the window now begins."""
        if len(self.refused) < PATIENCE:
            return False
        level, self.refused = self.refused, []
        self.loss.values.clear()
        self.norm.values.clear()
        for loss, norm in level:
            self._accept(loss, norm)
        self.suspected = 0
        return True

    def _is_lone(self, jump: Spike, clip_at: float | None) -> bool:
        """Whether nothing but the norm's size speaks for trouble, and that is bounded."""
        if not math.isfinite(jump.value) or jump.typical is None:
            return False
        left = jump.value if clip_at is None else min(jump.value, clip_at)
        bounded = left <= UNBOUNDED * jump.typical and jump.value <= UNBELIEVABLE * jump.typical
        return bounded and not self.refused and len(self.outliers) < PERSISTENT - 1

    def _accept(self, loss: float, norm: float) -> None:
        for one, other in [*self.outliers, (loss, norm)]:
            self.loss.values.append(one)
            self.norm.values.append(other)
        self.refused, self.outliers = [], []

    def state(self) -> dict[str, Any]:
        """For a checkpoint: numbers and lists."""
        return {
            "loss": list(self.loss.values),
            "norm": list(self.norm.values),
            "refused": [list(pair) for pair in self.refused],
            "outliers": [list(pair) for pair in self.outliers],
            "suspected": self.suspected,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError for what is none. A smaller window keeps the newest values."""
        loss, norm = _numbers(state["loss"]), _numbers(state["norm"])
        refused = [_numbers(pair) for pair in state["refused"]]
        outliers = [_numbers(pair) for pair in state.get("outliers", [])]
        if len(loss) != len(norm) or any(len(pair) != 2 for pair in [*refused, *outliers]):
            raise ValueError("loss and norm belong together")
        suspected = state.get("suspected", 0)
        if type(suspected) is not int or not 0 <= suspected <= PATIENCE:
            raise ValueError("not a number of steps")
        self.loss.values, self.norm.values = deque(loss, self.size), deque(norm, self.size)
        self.refused = [(pair[0], pair[1]) for pair in refused]
        self.outliers, self.suspected = [(pair[0], pair[1]) for pair in outliers], suspected


@dataclass
class Drift:
    """A loss that rises over many steps. Blocks of `size` finite losses are compared by their medians; two in a row
    above the lowest so far, by `SURE` standard errors and a tenth, are a divergence. It is told once, and again only
    after the loss has come back."""

    SURE = 8.0
    LEAST = 0.1

    size: int = 32
    block: list[float] = field(default_factory=list)
    begun: int = 0  # steps made before the block
    lowest: float | None = None
    level: float | None = None  # of the last block
    high: int = 0  # blocks in a row that were too high
    fine: int = 0  # steps made before the last block that was at most half that far above the lowest

    @property
    def risen(self) -> tuple[float, float] | None:
        """(level now, lowest level) of a divergence, as long as the loss has not come back."""
        if self.high < 2 or self.level is None or self.lowest is None:
            return None
        return self.level, self.lowest

    def add(self, step: int, loss: float) -> tuple[float, float] | None:
        """(level now, lowest level) at the step (from 1) at which a divergence is certain."""
        if not math.isfinite(loss):
            return None
        if not self.block:
            self.begun = step - 1
        self.block.append(loss)
        if len(self.block) < self.size:
            return None
        level = self.level = statistics.median(self.block)
        deviation = DEVIATION * statistics.median(abs(each - level) for each in self.block)
        # Of a median: sqrt(pi / 2) times that of a mean; of a difference of two: sqrt(2) times that.
        error = math.sqrt(math.pi / self.size) * deviation
        lowest = self.lowest
        self.block = []
        if lowest is None or level <= lowest:
            self.lowest, self.high, self.fine = level, 0, self.begun
            return None
        limit = max(self.SURE * error, self.LEAST * abs(lowest))
        if level - lowest <= limit / 2:
            self.fine = self.begun
        self.high = self.high + 1 if level - lowest > limit else 0
        return (level, lowest) if self.high == 2 else None

    def begin_anew(self, step: int) -> None:
        """Behind that step: what was lowest says nothing of what comes."""
        self.block, self.lowest, self.level, self.high, self.fine = [], None, None, 0, step

    def state(self) -> dict[str, Any]:
        names = ("begun", "lowest", "level", "high", "fine")
        return {"block": list(self.block), **{name: getattr(self, name) for name in names}}

    def load_state(self, state: dict[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError for what is none."""
        block, high, begun, fine = _numbers(state["block"]), state["high"], state.get("begun", 0), state.get("fine", 0)
        if len(block) >= self.size or any(type(count) is not int or count < 0 for count in (high, begun, fine)):
            raise ValueError("a block has fewer values, and a count is a whole number")
        levels = [None if each is None else _numbers([each])[0] for each in (state["lowest"], state.get("level"))]
        self.block, self.high, self.begun, self.fine = block, high, begun, fine
        self.lowest, self.level = levels


def _numbers(values: Sequence[Any]) -> list[float]:
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        raise TypeError("not a number")
    if not all(math.isfinite(value) for value in values):
        raise ValueError("not finite")
    return [float(value) for value in values]
