"""`Monitor`: judges every step before its update, and decides what is done about a spike.

The answers are rungs of a ladder, each with those before it, up to the one that `health.spikes` names:

    skip    the update of this step is left out: weights, optimiser state and its count of updates stay as they are
    clip    and for `calm` steps gradients are clipped at the usual norm, where that is below train.grad_clip
    slow    and for `calm` steps the rate is `slow_factor` times the schedule's
    rollback  the run goes back to the state after an earlier step, and leaves out the data from there to `calm` batches
            after this step; after `rollback_limit` times for the same trouble it stops
    stop    the run ends, with the steps, their batches and their documents in the record

A spike climbs one rung; after `calm` steps without one the next begins at the bottom. A skipped step keeps its place in
the schedule and in the data: its batch is consumed.

A divergence, a loss that rises over many steps, is no fault of one batch. So leaving one out is no answer to it, and
what is done begins at the rungs that last: clip and slow, as far as the ladder goes, and again after `calm` steps while
the loss has not come back. A ladder up to stop ends the run that second time. One up to rollback goes back at once, to
the last multiple of `calm` before the loss began to rise, and on with other data at the lower rate until `calm` steps
behind where it was told.

The step to go back to is the last multiple of `calm` that lies at least `calm` steps before the first spike of the row:
what has ruined the weights may have done so some steps before it showed. Going back about 100 steps and leaving out 200
to 500 batches is what PaLM did (Chowdhery et al. 2022, 2204.02311, section 5.1), which saw no spike again at the same
place.

Everything is a function of losses and norms, which are the same on every rank, and of the state, which is saved with
each checkpoint: a resumed run decides as the uninterrupted one. The state of going back outlives it: a run that is back
at an earlier step still knows how often it went back, and from where.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from modelworks.config import LADDERS, HealthConfig, Rung
from modelworks.train.health.detector import PATIENCE, Detector, Drift, Spike


@dataclass(frozen=True)
class Judgement:
    """Of one step. spikes: empty in a healthy one. answer: None where nothing is done. applied: whether its update may
    be made. reason: in words. steps: the steps (from 1) of the present row of answers. good: of a rollback, the steps
    whose state is to be gone back to. outlier: a gradient norm far from usual that is no spike. drift: (loss now,
    lowest) of a divergence; against: what is done about it."""

    spikes: list[Spike] = field(default_factory=list)
    answer: Rung | None = None
    applied: bool = True
    reason: str = ""
    steps: tuple[int, ...] = ()
    good: int | None = None
    new_level: bool = False
    outlier: Spike | None = None
    drift: tuple[float, float] | None = None
    against: Rung | None = None

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
        self._slow = (0, 0)  # behind that step, until that one
        self._answered: int | None = None  # where the present divergence was, last
        self.rollbacks: list[int] = []  # the spikes (from 1) that the run went back from, of the present trouble

    def rate_factor(self, step: int) -> float:
        """Times the schedule's rate. step: from 1."""
        behind, until = self._slow
        return self.config.slow_factor if behind < step <= until else 1.0

    def clip_at(self, step: int) -> float | None:
        """The norm at which gradients of this step are clipped; None: they are not. step: from 1."""
        if self._clip is None or step > self._clip[0]:
            return self._grad_clip
        return self._clip[1] if self._grad_clip is None else min(self._clip[1], self._grad_clip)

    def judge(self, step: int, loss: float, norm: float) -> Judgement:
        """step: from 1. loss: nats per token. norm: of the gradients before clipping. Called once a step, in order."""
        seen = self._detector.judge(loss, norm, clip_at=self.clip_at(step), warming_up=step <= self._warmup_steps)
        spikes = seen.spikes
        finite = math.isfinite(loss) and math.isfinite(norm)
        self._not_finite = 0 if finite else self._not_finite + 1
        course = self._judge_course(step, loss)
        if course.answer:
            return replace(course, spikes=spikes)
        if not spikes:
            return replace(course, outlier=seen.outlier)
        reason = "; ".join(map(str, spikes))
        if self._detector.take_new_level():
            self._drift.begin_anew(step)
            reason = f"{PATIENCE} steps in a row above what was usual: taken for a new level ({reason})"
            return replace(course, spikes=spikes, reason=reason, new_level=True)
        if self.config.spikes == "warn":
            return replace(course, spikes=spikes, reason=reason)
        answer = self._climb(step)
        if self._not_finite >= PATIENCE:
            answer, reason = "stop", f"{PATIENCE} steps in a row were not finite ({reason})"
        found = replace(course, spikes=spikes, answer=answer, applied=False, steps=tuple(self._steps), reason=reason)
        return self._going_back(found, step, self.good_before(step)) if answer == "rollback" else found

    def _judge_course(self, step: int, loss: float) -> Judgement:
        """What is done about a divergence: an answer where the run does not go on from here."""
        told, risen = self._drift.add(step, loss), self._drift.risen
        if risen is None:
            self._answered = None
            return Judgement()
        ladder = LADDERS.get(self.config.spikes, ())
        again = self._answered is not None and step - self._answered >= self.config.calm
        if not (told or (again and "clip" in ladder)):
            return Judgement()
        self._answered = step
        now, lowest = risen
        reason = f"the loss has risen to {now:.4g} from {lowest:.4g}, the lowest level so far"
        found = Judgement(reason=reason, drift=risen)
        if "rollback" in ladder:
            found = replace(found, answer="rollback", applied=False, against="rollback")
            return self._going_back(found, step, self.good_course(step))
        if "stop" in ladder and again:
            return replace(found, answer="stop", applied=False, against="stop")
        self._tighten(step, ladder)
        lasting: list[Rung] = [rung for rung in ("clip", "slow") if rung in ladder]
        return replace(found, against=lasting[-1] if lasting else None)

    def _going_back(self, found: Judgement, step: int, good: int) -> Judgement:
        """To that step, or nowhere any more."""
        self.rollbacks = [*self._of_this_trouble(step), step]
        if len(self.rollbacks) <= self.config.rollback_limit:
            return replace(found, good=good)
        reason = f"{found.reason}; {self.config.rollback_limit} rollbacks have not helped"
        against: Rung | None = "stop" if found.against else None
        return replace(found, answer="stop", against=against, reason=reason)

    def went_back(self, judgement: Judgement, rollbacks: list[int]) -> None:
        """What outlives going back: how often, and of a divergence the lower rate. It begins behind the good step, so
        that steps from an older state up to there are made as they were."""
        assert judgement.good is not None
        self.rollbacks = rollbacks
        if judgement.against:
            self._slow = (judgement.good, rollbacks[-1] + self.config.calm)

    def good_before(self, step: int) -> int:
        """Steps whose state is from before the damage, should `step` (from 1) be a spike. It never falls while the run
        goes on, so older states are not needed any more."""
        first = self._steps[0] if self.in_a_row(step) else step
        return max(0, first - 1 - self.config.calm) // self.config.calm * self.config.calm

    def good_course(self, step: int) -> int:
        """Steps whose state is from before the loss began to rise, and before any damage of a spike at `step`. It never
        falls either."""
        return min(self.good_before(step), self._drift.fine // self.config.calm * self.config.calm)

    def in_a_row(self, step: int) -> bool:
        """Whether a spike at this step (from 1) would be one of the present row."""
        return self._rung is not None and step - self._steps[-1] <= self.config.calm

    def _of_this_trouble(self, step: int) -> list[int]:
        """The rollbacks so far, where a spike at this step is at most `calm` steps later than the last one's."""
        return self.rollbacks if self.rollbacks and step - self.rollbacks[-1] <= self.config.calm else []

    def _climb(self, step: int) -> Rung:
        ladder = LADDERS[self.config.spikes]
        if self.in_a_row(step):
            assert self._rung is not None
            self._rung = min(self._rung + 1, len(ladder) - 1)
        else:
            self._rung, self._steps = 0, []
        self._steps = [*self._steps, step][-PATIENCE:]
        self._tighten(step, ladder[: self._rung + 1])
        return ladder[self._rung]

    def _tighten(self, step: int, reached: Sequence[Rung]) -> None:
        """For the `calm` steps that come, as far as these rungs say."""
        usual, until = self._detector.norm.typical, step + self.config.calm
        if "clip" in reached and usual is not None:
            self._clip = (until, usual)
        if "slow" in reached:
            self._slow = (step, until)

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "detector": self._detector.state(),
            "drift": self._drift.state(),
            "rung": self._rung,
            "steps": list(self._steps),
            "not_finite": self._not_finite,
            "clip": self._clip and list(self._clip),
            "slow": list(self._slow),
            "answered": self._answered,
            "rollbacks": list(self.rollbacks),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError for what is none."""
        self._detector.load_state(state["detector"])
        self._drift.load_state(state["drift"])
        rung, steps, clip = state["rung"], [_count(step) for step in state["steps"]], state["clip"]
        if (rung is None) != (not steps) or (rung is not None and _count(rung) > 3):
            raise ValueError("a rung is a place in the ladder, and comes with its steps")
        self._clip = None
        if clip is not None:
            until, norm = clip
            if not 0 < float(norm) < math.inf:
                raise ValueError("a norm is above 0")
            self._clip = (_count(until), float(norm))
        self._rung, self._steps = rung, steps
        self.rollbacks = [_count(step) for step in state.get("rollbacks", [])]
        self._not_finite, answered = _count(state["not_finite"]), state.get("answered")
        behind, until = state["slow"] if "slow" in state else (0, state["slow_until"])
        self._slow = (_count(behind), _count(until))
        self._answered = None if answered is None else _count(answered)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("not a whole number")
    return value
