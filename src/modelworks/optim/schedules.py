"""Learning-rate schedules as pure functions of the number of updates done.

Update `s` (counted from 0, so `s` updates are done) is made with `rate(s)`. With peak P, W warmup steps, T total
steps and floor share f:

    warmup        P0 + (P - P0) (s + 1) / W              for s < W: the first update is not wasted on rate 0. P0 is 0,
                  or the rate of a base batch that P was scaled from: Goyal et al. 2017 (1706.02677)
    after it      P (f + (1 - f) shape(x)),              x = (s - W) / (T - W) in [0, 1]
    cosine        shape = (1 + cos pi x) / 2             Loshchilov & Hutter 2016 (1608.03983)
    linear        shape = 1 - x
    wsd           shape = 1 until T - D, then falls over the last D steps: Hu et al. 2024 (2404.06395);
                  one-minus-sqrt is the shape of Haegele et al. 2024 (2405.18392)
    inverse-sqrt  P sqrt(W / s), not below the floor     Vaswani et al. 2017 (1706.03762)
    constant      P

Under a batch ramp s, W, T and D count samples instead of steps, so that a rate belongs to so much data seen, as in
GPT-3 and Megatron-LM; where all steps are of one size that is the same.

The floor is reached where the run ends (s = T), so that a floor of 0 wastes no update either. Beyond T the rate
stays there. A rate depends on nothing but `s`, which is why a schedule has no state to save.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from modelworks.config import ScheduleConfig

Schedule = Callable[[int], float]


def build_schedule(
    config: ScheduleConfig,
    *,
    peak: float,
    total_steps: int,
    warmup_steps: int,
    decay_steps: int = 0,
    start: float = 0.0,
    done: Callable[[int], int] = int,
) -> Schedule:
    """The rate for each update. `decay_steps` is the length of the last phase of `wsd`; others ignore it. start: the
    rate that the warmup rises from.

    done: what `step` steps have done, in the unit of the lengths. The steps themselves, or, where steps are not of one
    size, the samples they have seen.
    """
    if total_steps < 0 or warmup_steps < 0 or decay_steps < 0:
        raise ValueError("a schedule's lengths cannot be negative")
    floor = config.floor
    # The decay of wsd begins after the warmup, whatever was asked, so that no step belongs to both.
    decay_start = max(warmup_steps, total_steps - decay_steps)

    def rate(step: int) -> float:
        now = done(step)
        if now < warmup_steps:
            return start + (peak - start) * min(done(step + 1), warmup_steps) / warmup_steps
        if config.name == "constant":
            return peak
        if config.name == "inverse-sqrt":
            timescale = max(warmup_steps, 1)
            return peak * max(floor, math.sqrt(timescale / max(now, timescale)))
        if config.name == "wsd":
            shape = _shape(config.decay_shape, _progress(now, decay_start, total_steps))
        else:
            shape = _shape(config.name, _progress(now, warmup_steps, total_steps))
        return peak * (floor + (1.0 - floor) * shape)

    return rate


def _progress(now: int, start: int, end: int) -> float:
    """0 at `start`, 1 at `end` and beyond; 0 throughout where there is no room for a decay."""
    return min(1.0, max(0, now - start) / (end - start)) if end > start else 0.0


def _shape(name: str, progress: float) -> float:
    """From 1 at progress 0 to 0 at progress 1."""
    if name == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    if name == "linear":
        return 1.0 - progress
    if name == "one-minus-sqrt":
        return 1.0 - math.sqrt(progress)
    raise ValueError(f"no decay shape named {name!r}")
