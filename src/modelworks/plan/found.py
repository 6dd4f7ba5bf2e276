"""What a search answers: layouts with their predictions, how they compare, and what is missing where none fits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from modelworks.plan.candidate import Candidate, Prediction
from modelworks.plan.columns import Array
from modelworks.plan.job import Job, Limits

TIE = 0.01  # times that differ by less are not told apart: the model is not that exact


@dataclass(frozen=True)
class Found:
    """A layout and what is predicted for it.

    ties: other layouts, up to `TIE` faster or slower, that it stands for because none is simpler; of those simulated.
    default_seconds: of the same layout with `pp_partition: auto`, where it has a partition of its own that is faster.
    """

    candidate: Candidate
    prediction: Prediction
    ties: int = 0
    default_seconds: float | None = None

    @property
    def device_seconds_per_token(self) -> float:
        return self.candidate.n_devices / self.prediction.tokens_per_second


@dataclass(frozen=True)
class Points:
    """Every layout that was looked at, by closed form: seconds of a step, bytes of the fullest rank, and whether that
    fits. Equally long; step is nan where only memory was asked for, because the layout does not fit."""

    step: Array
    memory: Array
    fits: NDArray[np.bool_]


@dataclass(frozen=True)
class Neighbour:
    """A layout one step from the winner. change: the step in words. why: it was not chosen. candidate, prediction: None
    where the trainer refuses it."""

    change: str
    verdict: Literal["refused", "does not fit", "slower", "tie", "faster"]
    why: str
    candidate: Candidate | None = None
    prediction: Prediction | None = None


@dataclass(frozen=True)
class Attempt:
    """What was changed where nothing fits, the layout that needs least memory then, and the bytes it falls short by: 0
    where it fits."""

    change: str
    candidate: Candidate
    prediction: Prediction
    short_by: float

    @property
    def fits(self) -> bool:
        return self.short_by == 0.0


@dataclass(frozen=True)
class Nearest:
    """Where nothing fits. attempts: the first without any change, then each change by itself, the smallest first.
    smallest: the first that fits, None where none does."""

    attempts: list[Attempt]
    smallest: Attempt | None


@dataclass(frozen=True)
class Search:
    """best: ranked, simulated; one for each split, at its best schedule. goals: the best for each end.

    evaluated, fitting: layouts by closed form, and those of them that fit. simulated: predicted in full. left_out:
    reason -> layouts that were not looked at for it. seconds: that the search took.
    """

    job: Job
    limits: Limits
    best: list[Found]
    goals: dict[str, Found]
    neighbours: list[Neighbour]
    nothing_fits: Nearest | None
    evaluated: int
    fitting: int
    simulated: int
    left_out: dict[str, int] = field(default_factory=dict)
    points: Points = field(default_factory=lambda: Points(np.zeros(0), np.zeros(0), np.zeros(0, dtype=np.bool_)))
    seconds: float = 0.0
