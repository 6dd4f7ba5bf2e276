"""How often a job of so many devices is interrupted, how often to save, and how much of the time is training.

A job stops when any of its devices does: failures come at the rate of one device times their number, at random
(exponential times between them). A run that saves after t seconds of work, standing still for C seconds each time, then
takes for each such piece, with R seconds from a failure until it works again and M between failures (Daly 2006,
doi:10.1016/j.future.2004.11.016),

    t work + C saving + M (e^((t + C) / M) - 1) - t - C lost work + (e^((t + C) / M) - 1) M (e^(R / M) - 1) restarting

seconds, restarts that fail themselves included. Goodput is t over all of it. t and its bounds are the trainer's own
(`modelworks.config.best_interval`). Where a save is written while training goes on, the work since the copy was made is
lost too if the write did not end: R is longer by that.

Published rates differ sixfold (`REPORTS`), so a range goes with the answer. What is not in it: slow devices that do not
fail, hangs until they are noticed (part of R), failures that come together, and spare devices running out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from modelworks.config import PUBLISHED_DEVICE_HOURS, FailureRate, UserError, best_interval, describe_seconds


@dataclass(frozen=True)
class Report:
    """A published count of interruptions: device_hours between two of them. read: at the source, for this table."""

    name: str
    device_hours: float
    counted: str
    source: str
    read: bool = False


REPORTS = (
    Report(
        "Llama 3 405B, 16,384 H100",
        PUBLISHED_DEVICE_HOURS,
        "419 unexpected interruptions in 54 days, 78 % of them hardware",
        "2407.21783 section 3.3.4",
    ),
    Report(
        "OPT-175B, 992 A100",
        992 * 60 * 24 / 105,
        "35 manual and an estimated 70 automatic restarts for hardware in two months",
        "2205.01068 section 2.5",
    ),
    Report("BLOOM, 384 A100", 384 * 7 * 24 / 1.5, "one or two failures of GPUs a week", "2211.05100"),
    Report(
        "Meta's research cluster 1, 16,000 A100",
        8 * 24 * 1000 / 6.50,
        "6.50 failures of a node of eight in 1,000 node-days",
        "2410.21680",
    ),
    Report(
        "Meta's research cluster 2, 8,000 A100",
        8 * 24 * 1000 / 2.34,
        "2.34 failures of a node of eight in 1,000 node-days",
        "2410.21680",
    ),
    Report(
        "a cluster of 504 B200",
        504 * 55 * 24 / 10,
        "10 failures of GPUs in 55 days (nothing else counted)",
        "2605.09370 abstract",
        read=True,
    ),
)


@dataclass(frozen=True)
class Reliability:
    """goodput: part of the time that is training and not lost again. goodput_range: with the most and the least
    failures published. lost: the other parts, `saving`, `lost work` and `restarting`; with goodput they sum to 1."""

    mean_hours_between_failures: float
    save_every_seconds: float
    goodput: float
    goodput_range: tuple[float, float]
    lost: dict[str, float]
    reasons: list[str]


def reliability(
    n_devices: int,
    save_seconds: float,
    restart_seconds: float,
    per_device_hours: float | None = None,
    *,
    write_seconds: float | None = None,
) -> Reliability:
    """What a long run on so many devices loses to failures and to guarding against them.

    save_seconds: for which training stands still in each save. restart_seconds: from a failure until training goes on:
    noticing it, replacing the device, starting, loading. per_device_hours: between failures of one device, where the
    user knows; else as published of Llama 3. write_seconds: from the beginning of a save to its end, where training
    goes on meanwhile; at least save_seconds.
    Raises UserError for numbers that are not positive.
    """
    write = save_seconds if write_seconds is None else write_seconds
    _check(n_devices, save_seconds, restart_seconds, per_device_hours, write)
    rate = _rate(n_devices, per_device_hours)
    interval = best_interval(save_seconds, write, rate, measured=False)
    redone = restart_seconds + write - save_seconds
    goodput, lost = _shares(interval.seconds, save_seconds, redone, rate.seconds)
    extremes = [_rate(n_devices, report.device_hours) for report in REPORTS]
    others = [
        _shares(best_interval(save_seconds, write, each, measured=False).seconds, save_seconds, redone, each.seconds)[0]
        for each in extremes
    ]
    reasons = [
        interval.reason,
        f"{goodput:.1%} of the time is training: {_listed(lost)}",
        f"with the failure rates of other published runs, from {min(others):.1%} to {max(others):.1%}",
    ]
    bounds = min(goodput, *others), max(goodput, *others)
    return Reliability(rate.seconds / 3600, interval.seconds, goodput, bounds, lost, reasons)


def _rate(n_devices: int, per_device_hours: float | None) -> FailureRate:
    seconds = (per_device_hours or PUBLISHED_DEVICE_HOURS) * 3600 / n_devices
    devices = "1 device" if n_devices == 1 else f"{n_devices:,} devices"
    if per_device_hours is None:
        why = f"{REPORTS[0].name}: {REPORTS[0].counted}, {REPORTS[0].source}"
    else:
        why = f"{describe_seconds(per_device_hours * 3600)} for one device, as given"
    return FailureRate(seconds, f"one failure in {describe_seconds(seconds)} for {devices} ({why})")


def _shares(interval: float, save: float, restart: float, mean: float) -> tuple[float, dict[str, float]]:
    """Goodput and what is lost, as parts of the time."""
    piece = interval + save
    if piece + restart > 500 * mean:  # e^500: no piece is ever finished
        return 0.0, {"saving": 0.0, "lost work": 0.0, "restarting": 1.0}
    interruptions = math.expm1(piece / mean)
    seconds = {
        "saving": save,
        "lost work": max(0.0, mean * interruptions - piece),
        "restarting": interruptions * mean * math.expm1(restart / mean),
    }
    total = interval + sum(seconds.values())
    return interval / total, {name: value / total for name, value in seconds.items()}


def _listed(lost: dict[str, float]) -> str:
    return ", ".join(f"{value:.1%} {name}" for name, value in sorted(lost.items(), key=lambda item: -item[1]))


def _check(n_devices: int, save: float, restart: float, hours: float | None, write: float) -> None:
    if n_devices < 1:
        raise UserError(f"devices: got {n_devices}, expected at least 1")
    if not (math.isfinite(save) and save > 0):
        raise UserError(f"save_seconds: got {save}, expected seconds, more than 0")
    for name, value in (("restart_seconds", restart), ("write_seconds", write)):
        if not (math.isfinite(value) and value >= 0):
            raise UserError(f"{name}: got {value}, expected seconds, 0 or more")
    if write < save:
        raise UserError(f"write_seconds: got {write}, expected at least save_seconds ({save})")
    if hours is not None and not (math.isfinite(hours) and hours > 0):
        raise UserError(f"per_device_hours: got {hours}, expected hours between failures of one device, such as 50000")
