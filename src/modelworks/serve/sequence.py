"""A sequence: tokens, how many of them the cache knows, and the blocks that hold those.

There is no prefill phase and no decode phase. A sequence has `n_tokens` tokens, `n_computed` of which have their keys
and values in the cache, and every step lets it catch up by some. The last token's logits give the next one. So a prompt
in chunks, a prefix that was found in the cache, a sequence that was thrown out and comes back, and one token at a time
are the same thing with other numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from modelworks.serve.prefix import PrefixKeys


class Status(Enum):
    WAITING = "waiting"  # in the queue, holds no blocks
    RUNNING = "running"
    FINISHED = "finished"  # holds no blocks


@dataclass(eq=False)
class Sequence:
    """One sequence of a request (a request with n > 1 has several).

    tokens: prompt and what was generated. priority: lower is served first. arrived, deadline: seconds on the
    scheduler's clock; a sequence that has not finished by its deadline ends. max_tokens: of prompt and generation
    together, at most; its blocks must fit the pool. width: sequences that it will be forked into once its prompt is
    computed. reuses_prefix: may share blocks with others, and leaves its own to be found. is_scored: logits are wanted
    of all its tokens, for the time being.
    """

    id: str
    tokens: list[int]
    n_prompt: int
    max_tokens: int
    keys: PrefixKeys
    priority: int = 0
    arrived: float = 0.0
    deadline: float = float("inf")
    width: int = 1
    reuses_prefix: bool = True
    is_scored: bool = False
    status: Status = Status.WAITING
    n_computed: int = 0
    n_from_cache: int = 0  # tokens whose keys and values were found when it was last admitted
    blocks: list[int] = field(default_factory=list)
    n_preempted: int = 0
    n_remembered: int = 0  # full blocks that the index was told of
    n_evicted: int = 0  # full blocks given back, whose keys it sees no more; `blocks` are those that are left
    order: int = 0  # of admission to the queue: breaks ties, first come first served

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def n_pending(self) -> int:
        """Tokens whose keys and values are missing; the last of them gives the next token."""
        return len(self.tokens) - self.n_computed
