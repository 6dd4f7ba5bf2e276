"""A trial: a short run at one rate with one seed; its outcome, as it is stored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["finished", "diverged", "failed"]
STATUSES: tuple[Status, ...] = ("finished", "diverged", "failed")
_CURVE_POINTS = 50  # of a stored curve


@dataclass(frozen=True, order=True)
class Trial:
    """rate: `optimizer.lr`. seed: of the initial weights and the order of the data."""

    rate: float
    seed: int


@dataclass(frozen=True)
class Outcome:
    """What became of a trial. finished: loss is of the validation text at its end, nats/token. diverged: at `steps`,
    for `reason`. failed: nothing is known of its rate, for `reason`.

    train_loss: mean of the last tenth of its steps, None where there was none. curve: (step, mean training loss of the
    steps since the point before), at most 50 points.
    """

    trial: Trial
    status: Status
    loss: float | None
    train_loss: float | None
    steps: int
    seconds: float
    reason: str = ""
    curve: tuple[tuple[int, float], ...] = ()

    def to_row(self) -> dict[str, Any]:
        """What JSON can hold: every number in it is finite."""
        return {
            "rate": self.trial.rate,
            "seed": self.trial.seed,
            "status": self.status,
            "loss": self.loss,
            "train_loss": self.train_loss,
            "steps": self.steps,
            "seconds": round(self.seconds, 3),
            "reason": self.reason,
            "curve": [list(point) for point in self.curve],
        }

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Outcome:
        """Raises KeyError, TypeError or ValueError for what is none."""
        status, loss = row["status"], row["loss"]
        if status not in STATUSES or (status == "finished") != (loss is not None):
            raise ValueError("no outcome of a trial")
        curve = tuple((int(step), float(value)) for step, value in row["curve"])
        train = row["train_loss"]
        return cls(
            Trial(float(row["rate"]), int(row["seed"])),
            status,
            None if loss is None else float(loss),
            None if train is None else float(train),
            int(row["steps"]),
            float(row["seconds"]),
            str(row["reason"]),
            curve,
        )


def last_loss(losses: Sequence[float]) -> float | None:
    """The mean of the last tenth of the finite losses, of eight at least; None where there is none."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    tail = finite[-max(8, len(finite) // 10) :]
    return sum(tail) / len(tail) if tail else None


def thin(losses: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """The curve of a trial for its store: means over even spans of its steps, the finite ones of them."""
    count = min(len(losses), _CURVE_POINTS)
    points = []
    for place in range(count):
        first, end = place * len(losses) // count, (place + 1) * len(losses) // count
        span = [loss for loss in losses[first:end] if math.isfinite(loss)]
        if span:
            points.append((end, round(sum(span) / len(span), 5)))
    return tuple(points)
