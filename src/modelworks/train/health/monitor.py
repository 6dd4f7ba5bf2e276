"""`Monitor`: judges every step before its update, and decides what is done about a spike.

The answers are rungs of a ladder, each with those before it, up to the one that `health.spikes` names:

    skip    the update of this step is left out: weights, optimiser state and its count of updates stay as they are
    clip    and for `calm` steps gradients are clipped at the usual norm, where that is below train.grad_clip
    slow    and for `calm` steps the rate is `slow_factor` times the schedule's
    stop    and the run ends, with the steps, their batches and their documents in the record

A spike climbs one rung; after `calm` steps without one the next begins at the bottom. A skipped step keeps its place in
the schedule and in the data: its batch is consumed. Everything is a function of losses and norms, which are the same on
every rank, and of the state, which is saved with each checkpoint: a resumed run decides as the uninterrupted one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from modelworks.config import RUNGS, HealthConfig, Rung
from modelworks.train.health.detector import PATIENCE, Detector, Drift, Spike


@dataclass(frozen=True)
class Judgement:
    """Of one step. spikes: empty in a healthy one. answer: None where nothing is done. applied: whether its update may
    be made. reason: in words. steps: the steps (from 1) of the present row of answers. drift: (loss now, lowest)."""

    spikes: list[Spike] = field(default_factory=list)
    answer: Rung | None = None
    applied: bool = True
    reason: str = ""
    steps: tuple[int, ...] = ()
    new_level: bool = False
    drift: tuple[float, float] | None = None

    @property
    def stops(self) -> bool:
        return self.answer == "stop"


class Monitor:
    """One run's. warmup_steps: of the schedule. grad_clip: `train.grad_clip`."""

    def __init__(self, config: HealthConfig, *, warmup_steps: int, grad_clip: float | None) -> None:
        if config.spikes == "off":
            raise ValueError("nothing is to be watched")
        self.config = config
        self._warmup_steps, self._grad_clip = warmup_steps, grad_clip
        self._detector, self._drift = Detector(config.window, config.threshold), Drift()
        self._rung: int | None = None  # the last one taken
        self._steps: list[int] = []  # of the spikes since the ladder's bottom
        self._not_finite = 0  # in a row
        self._clip: tuple[int, float] | None = None  # (last step, norm)
        self._slow_until = 0

    def rate_factor(self, step: int) -> float:
        """Times the schedule's rate. step: from 1."""
        return self.config.slow_factor if step <= self._slow_until else 1.0

    def clip_at(self, step: int) -> float | None:
        """The norm at which gradients of this step are clipped; None: they are not. step: from 1."""
        if self._clip is None or step > self._clip[0]:
            return self._grad_clip
        return self._clip[1] if self._grad_clip is None else min(self._clip[1], self._grad_clip)

    def judge(self, step: int, loss: float, norm: float) -> Judgement:
        """step: from 1. loss: nats per token. norm: of the gradients before clipping. Called once a step, in order."""
        spikes = self._detector.judge(loss, norm, warming_up=step <= self._warmup_steps)
        drift = self._drift.add(loss)
        finite = math.isfinite(loss) and math.isfinite(norm)
        self._not_finite = 0 if finite else self._not_finite + 1
        if not spikes:
            return Judgement(drift=drift)
        reason = "; ".join(map(str, spikes))
        if self._detector.take_new_level():
            reason = f"{PATIENCE} steps in a row above what was usual: taken for a new level ({reason})"
            return Judgement(spikes, reason=reason, new_level=True, drift=drift)
        if self.config.spikes == "warn":
            return Judgement(spikes, reason=reason, drift=drift)
        answer = self._climb(step)
        if self._not_finite >= PATIENCE:
            answer, reason = "stop", f"{PATIENCE} steps in a row were not finite ({reason})"
        return Judgement(spikes, answer, False, reason, tuple(self._steps), drift=drift)

    def _climb(self, step: int) -> Rung:
        top = RUNGS.index(self.config.spikes)
        if self._rung is None or step - self._steps[-1] > self.config.calm:
            self._rung, self._steps = 0, []
        else:
            self._rung = min(self._rung + 1, top)
        self._steps = [*self._steps, step][-PATIENCE:]
        usual = self._detector.norm.typical
        if self._rung >= RUNGS.index("clip") and usual is not None:
            self._clip = (step + self.config.calm, usual)
        if self._rung >= RUNGS.index("slow"):
            self._slow_until = step + self.config.calm
        return RUNGS[self._rung]

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "detector": self._detector.state(),
            "drift": self._drift.state(),
            "rung": self._rung,
            "steps": list(self._steps),
            "not_finite": self._not_finite,
            "clip": self._clip and list(self._clip),
            "slow_until": self._slow_until,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError for what is none."""
        self._detector.load_state(state["detector"])
        self._drift.load_state(state["drift"])
        rung, steps, clip = state["rung"], [_count(step) for step in state["steps"]], state["clip"]
        if (rung is None) != (not steps) or (rung is not None and _count(rung) >= len(RUNGS)):
            raise ValueError("a rung is a place in the ladder, and comes with its steps")
        self._clip = None
        if clip is not None:
            until, norm = clip
            if not 0 < float(norm) < math.inf:
                raise ValueError("a norm is above 0")
            self._clip = (_count(until), float(norm))
        self._rung, self._steps = rung, steps
        self._not_finite, self._slow_until = _count(state["not_finite"]), _count(state["slow_until"])


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("not a whole number")
    return value
