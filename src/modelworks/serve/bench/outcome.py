"""What became of one request, with its times."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class Outcome:
    """Times are seconds on the load's clock.

    due: when it was to be sent; sent: when it was; a client that cannot keep up sends late. arrivals: of each event
    that brought text. ended: when the answer, or the failure, was complete. n_prompt, n_generated, n_cached: tokens as
    the server counted them, None where it did not say; n_cached: of the prompt, found in its cache.
    error: what went wrong, in words that are the same for the same cause; detail: what was said about it.
    """

    index: int
    due: float
    sent: float = 0.0
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    n_prompt: int | None = None
    n_generated: int | None = None
    n_cached: int | None = None
    error: str | None = None
    detail: str = ""

    @property
    def n_tokens(self) -> int:
        """Generated: as counted by the server, else one for each event."""
        return len(self.arrivals) if self.n_generated is None else self.n_generated

    @property
    def first_token_seconds(self) -> float | None:
        """From when it was due, so that a late client cannot hide a wait."""
        return self.arrivals[0] - self.due if self.arrivals else None

    @property
    def seconds(self) -> float:
        """From when it was due until it was complete."""
        return self.ended - self.due

    @property
    def gaps(self) -> list[float]:
        """Between one event with text and the next: what a reader waits for."""
        return [after - before for before, after in pairwise(self.arrivals)]

    @property
    def seconds_per_token(self) -> float | None:
        """Of the tokens after the first; None where there are none."""
        if len(self.arrivals) < 2 or self.n_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.n_tokens - 1)
