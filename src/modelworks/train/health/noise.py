"""The gradient noise scale: how large a batch is before more says little new (McCandlish et al. 2018, 1812.06162).

    B_noise = tr(Sigma) / |G|^2        Sigma: covariance of the gradient of one sequence; G: its mean, the true gradient

One step measures both from the parts that its batch is made of anyway, micro-batches on all ranks. Part k adds y_k to
the gradient Y = sum_k y_k and has a share p_k of the batch's target tokens. Let the mean gradient of a part be G plus
noise that is independent between parts and whose covariance goes down with the part's targets. Then

    E |y_k|^2 = p_k^2 |G|^2 + p_k V         E |Y|^2 = |G|^2 + V         V = tr(Sigma) / sequences of the batch

and with Q = sum_k |y_k|^2 and q = sum_k p_k^2 both of these are unbiased, whatever the shares:

    |G|^2 = (|Y|^2 - Q) / (1 - q)           V = (Q - q |Y|^2) / (1 - q)

For equal parts q = 1 / K, which is the published pair of batch sizes. What the assumption leaves out: tokens of one
sequence are not independent, so rows with fewer targets are somewhat less noisy than it says, and a sampler without
replacement makes parts slightly dependent. Where parts have equally many targets neither matters.

Both sums are over elements, so groups of parameters whose parts are cut differently (experts spread over ranks) are
estimated each by its own parts and added.

One step's estimates scatter widely (that of |G|^2 may be negative), and a mean of quotients would be biased: the two
are averaged over steps apart, and then divided.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

MEASUREMENTS = 50  # that the average reaches back over: the time constant of its exponential weights


@dataclass(frozen=True)
class Squares:
    """Of some parameters in one step. large: |Y|^2; small: Q; overlap: q, 1 where there is one part only."""

    large: float
    small: float
    overlap: float


@dataclass(frozen=True)
class NoiseEstimate:
    """trace: tr(Sigma) of one sequence. square: |G|^2, of the loss per target token. targets: target tokens of a
    sequence, the mean of the batch."""

    trace: float
    square: float
    targets: float

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.trace) and math.isfinite(self.square)


def estimate_noise(groups: Iterable[Squares], *, sequences: int, targets: float) -> NoiseEstimate | None:
    """From one step. sequences, targets: of the global batch; targets in loss weight. None where no group has two
    parts."""
    parted = [group for group in groups if group.overlap < 1.0 - 1e-9]  # shares are rounded
    variance = sum((one.small - one.overlap * one.large) / (1 - one.overlap) for one in parted)
    square = sum((one.large - one.small) / (1 - one.overlap) for one in parted)
    if not parted:
        return None
    return NoiseEstimate(variance * sequences, square, targets / sequences)


class NoiseScale:
    """The average over a run's measurements: exponential weights, divided by their sum so that early ones count."""

    def __init__(self) -> None:
        self.measurements = 0
        self._sums = NoiseEstimate(0.0, 0.0, 0.0)

    def add(self, found: NoiseEstimate) -> None:
        keep = math.exp(-1.0 / MEASUREMENTS)
        self.measurements += 1
        self._sums = NoiseEstimate(
            keep * self._sums.trace + (1 - keep) * found.trace,
            keep * self._sums.square + (1 - keep) * found.square,
            keep * self._sums.targets + (1 - keep) * found.targets,
        )

    @property
    def average(self) -> NoiseEstimate | None:
        """None before the first measurement."""
        if not self.measurements:
            return None
        weight = -math.expm1(-self.measurements / MEASUREMENTS)
        sums = self._sums
        return replace(sums, trace=sums.trace / weight, square=sums.square / weight, targets=sums.targets / weight)

    @property
    def sequences(self) -> float | None:
        """B_noise. None while the averages do not allow one: the noise has drowned |G|^2 so far, or there is none."""
        average = self.average
        if average is None or average.square <= 0 or average.trace <= 0:
            return None
        return average.trace / average.square

    @property
    def tokens(self) -> float | None:
        """B_noise in target tokens."""
        sequences, average = self.sequences, self.average
        return None if sequences is None or average is None else sequences * average.targets

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        sums = self._sums
        return {
            "measurements": self.measurements,
            "trace": sums.trace,
            "square": sums.square,
            "targets": sums.targets,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError for what is none."""
        measurements, values = state["measurements"], [state[key] for key in ("trace", "square", "targets")]
        if type(measurements) is not int or measurements < 0:
            raise ValueError("measurements are counted")
        if not all(type(value) in (int, float) and math.isfinite(value) for value in values):
            raise ValueError("not a finite number")
        self.measurements, self._sums = measurements, NoiseEstimate(*map(float, values))
