"""How the server behaves towards the outside, as one validated value."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from modelworks.config import UserError


@dataclass(frozen=True)
class ServerOptions:
    """api_key: that requests must bring; None: none. body_limit: bytes of a request's body. client_timeout: seconds
    that a client may take to send a request's head, then its body, and to read on where its answer waits for it.
    max_connections: at once. deadline: seconds by which a request ends that names no `timeout` of its own.
    longest_deadline: the longest that it may name. grace: seconds that running requests have to finish at a shutdown.
    stall: seconds without a word from the engine after which it does not count as alive. max_choices: prompts times
    completions of one request. log_requests: one line each, on stderr."""

    api_key: str | None = field(default=None, repr=False)
    body_limit: int = 4 * 2**20
    client_timeout: float = 60.0
    max_connections: int = 2048
    deadline: float = 600.0
    longest_deadline: float = 3600.0
    grace: float = 30.0
    stall: float = 60.0
    max_choices: int = 128
    log_requests: bool = False

    def __post_init__(self) -> None:
        for name in (
            "body_limit",
            "client_timeout",
            "max_connections",
            "deadline",
            "longest_deadline",
            "stall",
            "max_choices",
        ):
            if not 0 < getattr(self, name) < math.inf:  # not a number neither
                raise UserError(f"{name}: got {getattr(self, name)}, expected more than 0")
        if not 0 <= self.grace < math.inf:
            raise UserError(f"grace: got {self.grace}, expected 0 or more seconds")
        if self.deadline > self.longest_deadline:
            raise UserError(f"deadline: got {self.deadline}, expected at most longest_deadline {self.longest_deadline}")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise UserError("api_key: expected printable ASCII characters, at least one: it travels in a header")
