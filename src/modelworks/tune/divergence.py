"""Whether a trial has diverged, from its losses and the judgements of the run's own health monitor.

A trial has diverged where, in one of its steps,

    loss or gradients are not finite (the step itself refuses then)
    the monitor finds a loss that rises over many steps, or a row of spikes that does not end
    the same comparison with blocks short enough for a trial, which knows the loss before the first update as well,
        finds two blocks above the lowest so far by a tenth and by eight standard errors

or where it ends so: its last block is that far above the lowest. A loss that stays where it was is none: a rate at
which nothing is learnt is a bad one, and its loss says so. A single spike that the run gets over is none either.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from modelworks.train.health import Drift, Judgement

_BLOCKS = 12  # of a trial
_SHORTEST = 4  # steps of a block
_LONGEST = 32


@dataclass
class Divergence:
    """Of one trial. total_steps: it will have. losses: of the steps so far, nats/token."""

    total_steps: int
    losses: list[float] = field(default_factory=list)
    _drift: Drift = field(init=False)

    def __post_init__(self) -> None:
        self._drift = Drift(size=min(_LONGEST, max(_SHORTEST, self.total_steps // _BLOCKS)))

    def add(self, loss: float, judgement: Judgement | None) -> str | None:
        """Why it has diverged at this step; None where it has not."""
        if not self.losses:
            self._drift.lowest = loss  # of the weights that it begins with
        self.losses.append(loss)
        risen = self._drift.add(len(self.losses), loss) or (judgement.drift if judgement else None)
        if risen:
            return f"the loss rose from {risen[1]:.4g} to {risen[0]:.4g}"
        if judgement and judgement.new_level and any(spike.curve == "loss" for spike in judgement.spikes):
            return judgement.reason
        return None

    def at_end(self, validation_loss: float) -> str | None:
        """Why a trial that made all its steps has diverged nevertheless."""
        lowest = self._drift.lowest
        if self._drift.high:
            return f"it ended above its lowest loss, {lowest:.4g}"
        if not validation_loss < self.losses[0] * (1 + Drift.LEAST):
            return (
                f"the validation loss is {validation_loss:.4g} at its end, and the first loss was {self.losses[0]:.4g}"
            )
        return None
