"""`HealthConfig`: what is watched while a run trains, and what is done about a spike."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from modelworks.config.model import Frozen, Positive
from modelworks.config.quantities import Real, Whole

# What may be done about a spike, from the mildest. The configuration names the highest of them.
Rung = Literal["skip", "clip", "slow", "rollback", "stop"]
LADDERS: dict[str, tuple[Rung, ...]] = {
    "skip": ("skip",),
    "clip": ("skip", "clip"),
    "slow": ("skip", "clip", "slow"),
    "rollback": ("skip", "clip", "slow", "rollback"),  # and stop, after so many
    "stop": ("skip", "clip", "slow", "stop"),
}

HELD_STATES = 2  # in host memory for rollbacks: the one to go back to, and the one that may become it


class HealthConfig(Frozen):
    """spikes: `off`; `warn` records them; any other is the highest rung of the answers to them, each with the ones
    before it: the update is skipped; clipped at the usual norm; made at a lower rate; then the run goes back to an
    earlier state and on with other data, or stops."""

    spikes: Literal["off", "warn", "skip", "clip", "slow", "rollback", "stop"] = "warn"
    window: Annotated[Whole, Field(ge=32, le=65536)] = 128  # accepted steps that a step is compared with
    threshold: Annotated[Real, Field(ge=3.0)] = 15.0  # robust standard deviations above the usual
    calm: Positive = 100  # steps without a spike after which answers begin at the mildest; and how long one lasts
    slow_factor: Annotated[Real, Field(gt=0.0, lt=1.0)] = 0.5  # slow: times the schedule's rate
    rollback_from: Literal["auto", "memory", "disk"] = "auto"  # where earlier states are kept
    rollback_limit: Positive = 3  # rollbacks for the same trouble, after which the run stops
    judgements: bool = True  # of the course of the run: plateaus, layers that die, losses off their law
    overfitting: Literal["off", "warn", "stop"] = "warn"  # the training loss falls, and that of validation rises
    layers_every: Positive | None = 10  # steps between figures of every layer and rank; null: none
