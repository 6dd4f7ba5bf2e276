"""What the server's front and the engine's process say to each other: plain values over a pipe of their own.

To the engine go lists of `Submit`, `Abort` and `Stop`; from it come one `Ready` or `Failed`, and then `News`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from modelworks.serve.request import Delta, Request
from modelworks.serve.served_model import ServedModel

if TYPE_CHECKING:
    from modelworks.serve.stats import EngineStats


@dataclass(frozen=True)
class Submit:
    request: Request


@dataclass(frozen=True)
class Abort:
    request_id: str


@dataclass(frozen=True)
class Stop:
    """End at once, whatever still runs."""


@dataclass(frozen=True)
class Ready:
    model: ServedModel


@dataclass(frozen=True)
class Failed:
    """The engine does not run, or no more. by_user: whether it is the user's to fix."""

    message: str
    by_user: bool


@dataclass(frozen=True)
class Refused:
    """A request that the engine did not take. retry_after: seconds, where it is only too busy; None: it never will."""

    request_id: str
    message: str
    retry_after: float | None


@dataclass
class News:
    """What a step brought; between steps, at least every `HEARTBEAT` seconds, that the engine is alive."""

    accepted: list[str] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    stats: EngineStats | None = None


ToEngine = Submit | Abort | Stop
FromEngine = Ready | Failed | News
HEARTBEAT = 0.5  # seconds
