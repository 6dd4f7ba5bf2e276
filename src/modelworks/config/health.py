"""`HealthConfig`: what is watched while a run trains, and what is done about a spike."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from modelworks.config.model import Frozen, Positive
from modelworks.config.quantities import Real, Whole

# What may be done about a spike, from the mildest. The configuration names the highest of them.
Rung = Literal["skip", "clip", "slow", "stop"]
RUNGS: tuple[Rung, ...] = ("skip", "clip", "slow", "stop")


class HealthConfig(Frozen):
    """spikes: `off`; `warn` records them; any other is the highest rung of the answers to them, each with the ones
    before it: the update is skipped; clipped at the usual norm; made at a lower rate; the run stops."""

    spikes: Literal["off", "warn", "skip", "clip", "slow", "stop"] = "warn"
    window: Annotated[Whole, Field(ge=32, le=65536)] = 128  # accepted steps that a step is compared with
    threshold: Annotated[Real, Field(ge=3.0)] = 15.0  # robust standard deviations above the usual
    calm: Positive = 100  # steps without a spike after which answers begin at the mildest; and how long one lasts
    slow_factor: Annotated[Real, Field(gt=0.0, lt=1.0)] = 0.5  # slow: times the schedule's rate
    layers_every: Positive | None = 10  # steps between figures of every layer and rank; null: none
