"""What each schedule promises, in closed form, with equal stages and free sending.

With p ranks, m micro-batches, v stages on each rank, and f, b, w the times of a stage's forward, input gradient and
weight gradient, every rank computes v m (f + b + w) and stands idle for

    gpipe, 1f1b           (p - 1) (f + b + w)                     Narayanan et al. 2021, section 2.2
    interleaved           the same, of stages 1/v as long         ibid., section 2.2.2; m >= p
    zb-h1, interleaved-zb (p - 1) max(f + b - w, f, b)            Qi et al. 2023, table 2 (f + b - w, for w <= f, b);
                                                                  m >= p
    zbv                   (p - 1) f, only the way in and out      ibid., section 6; f = b = w, m >= 2p - 1
    dualpipev             the same                                f = b = w, m >= 2p

Most micro-batches that rank k (from 0) holds at once, each stage counting one, with r = p or, where p does not divide
m, the size of the first round (the `orders` file):

    gpipe           m
    1f1b            min(p - k, m)
    interleaved     min(v m, (v - 1) r + 2 (p - k) - 1)    rank 0: 1 + (p - 1) / (p v) of 1f1b's memory
    zb-h1           min(p, m)                              Qi et al.: no more than 1f1b's first rank
    interleaved-zb  min(v m, (v - 1) r + p)
    zbv             min(2 m, m + k + 1, 2 p)               of stages half as long: 1f1b's first rank again
    dualpipev       min(2 m, m + k + 1, 2 p + 1)           DeepSeek: one more than there are stages
"""

from __future__ import annotations

from math import isclose

from modelworks.layout.pipeline.orders import placed_stages, rounds
from modelworks.layout.placement import V_SHAPED


def bubble_formula(
    schedule: str,
    pp: int,
    n_micro_batches: int,
    virtual: int = 1,
    *,
    forward: float = 1.0,
    backward_input: float = 1.0,
    backward_weight: float = 1.0,
) -> float | None:
    """The bubble fraction, idle / (idle + computing); None where no closed form is known (use `simulate`).

    forward, backward_input, backward_weight: times of one stage, of which an interleaved rank has several.
    """
    n_stages = len(placed_stages(schedule, pp, virtual)[0])
    if pp == 1:
        return 0.0
    f, b, w = forward, backward_input, backward_weight
    v_shaped = schedule in V_SHAPED
    if n_micro_batches < {"gpipe": 1, "1f1b": 1, "zbv": 2 * pp - 1, "dualpipev": 2 * pp}.get(schedule, pp):
        return None
    if v_shaped and not (isclose(f, b) and isclose(b, w)):
        return None
    idle = (pp - 1) * (f + b + w)
    if schedule in ("zb-h1", "interleaved-zb"):
        idle = (pp - 1) * max(f + b - w, f, b)
    elif v_shaped:
        idle = (pp - 1) * f
    return idle / (idle + n_stages * n_micro_batches * (f + b + w))


def peak_formula(schedule: str, pp: int, n_micro_batches: int, virtual: int = 1, *, rank: int) -> int:
    """Most (stage, micro-batch) pairs whose activations `rank` holds at once; see `Timeline.peak_held_by_rank`."""
    v = len(placed_stages(schedule, pp, virtual)[0])
    m, first_round = n_micro_batches, len(rounds(pp, n_micro_batches)[0])
    if pp == 1:
        return 1
    most = {
        "gpipe": m,
        "1f1b": pp - rank,
        "interleaved": (v - 1) * first_round + 2 * (pp - rank) - 1,
        "zb-h1": pp,
        "interleaved-zb": (v - 1) * first_round + pp,
        "zbv": min(m + rank + 1, 2 * pp),
        "dualpipev": min(m + rank + 1, 2 * pp + 1),
    }[schedule]
    return min(v * m, most)
