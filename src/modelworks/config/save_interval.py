"""How often to save: the interval that loses the least time, and the reason in words. Pure arithmetic.

With saves that cost C seconds each and failures that come M seconds apart on average, at random (Young 1974; Daly 2006,
"A higher order estimate of the optimum checkpoint interval for restart dumps", doi:10.1016/j.future.2004.11.016), a
run that saves after every t seconds of work takes, for each second of it,

    e^(R / M) · M · (e^((t + C) / M) - 1) / t        R: seconds that a restart takes, which do not change the best t

seconds. The best t is close to the square root of 2 C M (Young), closer to Daly's series of it.

C is the time for which training *stands still*: with asynchronous saves the copy into staging memory, not the write.
The write bounds the interval from below, because a save cannot begin before the one before it has ended.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Unexpected interruptions of a large job, as published: 419 in 54 days on 16,384 GPUs (The Llama 3 Herd of Models,
# Llama team, 2024, arXiv:2407.21783, section 3.3.4). A single device is then interrupted every 5.8 years.
_PUBLISHED_DEVICES, _PUBLISHED_DAYS, _PUBLISHED_FAILURES = 16_384, 54, 419
PUBLISHED_DEVICE_HOURS = _PUBLISHED_DEVICES * _PUBLISHED_DAYS * 24 / _PUBLISHED_FAILURES  # between two of them

# Whatever the formula says, nobody loses more than half an hour: failures of a machine at home have no statistics.
LONGEST = 1800.0

# Bytes per second that a save is taken to reach before one has been measured: a plain disk.
ASSUMED_BANDWIDTH = 200e6


@dataclass(frozen=True)
class FailureRate:
    """seconds: mean time between failures of the whole job. reason: where the figure is from."""

    seconds: float
    reason: str


@dataclass(frozen=True)
class Interval:
    """seconds: from the beginning of one save to that of the next. reason: how it came about, in one line."""

    seconds: float
    reason: str


def failure_rate(n_devices: int, hours: float | None = None) -> FailureRate:
    """Mean time between failures of a job on so many devices. hours: as configured; None: from published figures."""
    if hours is not None:
        return FailureRate(hours * 3600.0, f"one failure in {describe_seconds(hours * 3600.0)} (as configured)")
    seconds = PUBLISHED_DEVICE_HOURS * 3600.0 / n_devices
    devices = "1 device" if n_devices == 1 else f"{n_devices:,} devices"
    published = f"{_PUBLISHED_FAILURES} in {_PUBLISHED_DAYS} days on {_PUBLISHED_DEVICES:,} GPUs, arXiv:2407.21783"
    return FailureRate(seconds, f"one failure in {describe_seconds(seconds)} assumed for {devices} ({published})")


def best_interval(stall: float, write: float, rate: FailureRate, *, measured: bool = True) -> Interval:
    """The interval that loses the least time, within bounds.

    stall: seconds for which training stands still in each save; write: seconds from its beginning to its end, `stall`
    included. measured: whether these are, or are only an estimate.
    """
    wanted = daly_interval(stall, rate.seconds)
    known = "measured" if measured else "estimated"
    reason = (
        f"a save stops training for {describe_seconds(stall)} ({known}), {rate.reason}: Daly's interval is "
        f"{describe_seconds(wanted)}"
    )
    shortest = max(write, stall)
    if wanted < shortest:
        return Interval(shortest, f"{reason}, but a save takes {describe_seconds(shortest)} to be written")
    if wanted > max(LONGEST, shortest):
        return Interval(
            max(LONGEST, shortest), f"{reason}, but never more than {describe_seconds(LONGEST)} of work is at stake"
        )
    return Interval(wanted, reason)


def daly_interval(cost: float, mean_time_between_failures: float) -> float:
    """Seconds of work between saves that cost `cost` seconds each: Daly's higher-order estimate of the optimum.

    Where a save takes longer than twice the time between failures nothing helps much; the estimate is then that time.
    """
    if cost <= 0:
        return 0.0
    ratio = cost / (2 * mean_time_between_failures)
    if ratio >= 1:
        return mean_time_between_failures
    young = math.sqrt(2 * cost * mean_time_between_failures)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def expected_slowdown(interval: float, cost: float, mean_time_between_failures: float, restart: float = 0.0) -> float:
    """Seconds that one second of work takes on average, with saves and failures: what `daly_interval` minimises."""
    mean = mean_time_between_failures
    return math.exp(restart / mean) * mean * math.expm1((interval + cost) / mean) / interval


def assumed_seconds(n_bytes: int) -> float:
    """How long a save of so many bytes by one writer is taken to last before one has been measured."""
    return n_bytes / ASSUMED_BANDWIDTH


def describe_seconds(seconds: float) -> str:
    """A length of time for people: `0.04 s`, `95 s`, `12 min`, `3.1 h`, `5.8 years`."""
    for unit, name, least in ((31_557_600.0, "years", 1.0), (86_400.0, "days", 2.0), (3600.0, "h", 2.0)):
        if seconds >= least * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 60:.3g} min" if seconds >= 120 else f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
