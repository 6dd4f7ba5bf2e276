"""Which blocks of a long context to forget: pure decisions, given what each block's keys have been attended to.

    SinksAndWindow   the first tokens, which draw attention whatever they are, and the last (StreamingLLM: Xiao et al.
                     2023, 2309.17453)
    HeavyHitters     those that drew the most attention so far, and the last (H2O: Zhang et al. 2023, 2306.14048)
    SnapKV           once, when the prompt is computed: those that its last tokens attend to, and these (Li et al. 2024,
                     2404.14469); what is generated afterwards is all kept

Only a whole block frees memory, and a block holds tokens in all heads and layers; so a decision is for all of them,
where the papers decide by head. A block's attention is summed over its tokens, which takes the place of SnapKV's
pooling over neighbours. Keys keep the positions they were rotated by (StreamingLLM moves them together instead, which
reaches beyond the trained length; this does not).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from modelworks.config import UserError, nearest


@dataclass(frozen=True)
class Table:
    """What a policy sees of a sequence. n_keys: kept ones. mass: attention that each kept block has drawn, where the
    policy watches. begins: the prompt has just been computed, nothing was decided before."""

    n_keys: int
    block_size: int
    mass: Sequence[float]
    begins: bool

    @property
    def n_full(self) -> int:
        return self.n_keys // self.block_size


@runtime_checkable
class Policy(Protocol):
    """watches: whether the policy decides by attention, so that an executor must show it."""

    @property
    def watches(self) -> bool: ...

    def n_watched(self, start: int, count: int, n_prompt: int) -> int:
        """Of a sequence's tokens `start` to `start + count`: of how many of the last the attention must be noted."""

    def to_free(self, table: Table) -> list[int]:
        """Places of full blocks to forget, ascending. Asked after each step, once the prompt is computed."""


@dataclass(frozen=True)
class SinksAndWindow:
    """sinks, window: tokens at the beginning and at the end that are kept, at least (blocks are whole)."""

    sinks: int = 4
    window: int = 1024
    watches = False

    def __post_init__(self) -> None:
        _whole("sinks", self.sinks, 0)
        _whole("window", self.window, 1)

    def n_watched(self, start: int, count: int, n_prompt: int) -> int:
        return 0

    def to_free(self, table: Table) -> list[int]:
        first = max(0, table.n_keys - self.window) // table.block_size
        return list(range(-(-self.sinks // table.block_size), first))


@dataclass(frozen=True)
class HeavyHitters:
    """budget: tokens that are kept, rounded up to blocks. recent: the last of them, whatever attention they drew."""

    budget: int = 1024
    recent: int = 512
    watches = True

    def __post_init__(self) -> None:
        _budget(self.budget, "recent", self.recent)

    def n_watched(self, start: int, count: int, n_prompt: int) -> int:
        return count

    def to_free(self, table: Table) -> list[int]:
        return _least(table, self.budget, self.recent)


@dataclass(frozen=True)
class SnapKV:
    """budget: tokens of the prompt that are kept, rounded up to blocks. observed: last tokens of the prompt, which are
    kept and whose attention decides about the others."""

    budget: int = 1024
    observed: int = 32
    watches = True

    def __post_init__(self) -> None:
        _budget(self.budget, "observed", self.observed)

    def n_watched(self, start: int, count: int, n_prompt: int) -> int:
        if start + count > n_prompt:
            return (
                0 if start >= n_prompt else count
            )  # a sequence that was thrown out: its tokens are all computed at once
        return max(0, start + count - max(start, n_prompt - self.observed))

    def to_free(self, table: Table) -> list[int]:
        return _least(table, self.budget, self.observed) if table.begins else []


_BY_NAME: dict[str, type[SinksAndWindow] | type[HeavyHitters] | type[SnapKV]] = {
    "window": SinksAndWindow,
    "h2o": HeavyHitters,
    "snapkv": SnapKV,
}


def parse_policy(text: str) -> Policy:
    """`window`, `h2o` or `snapkv`, alone or with its two numbers: `window:4,1024` is SinksAndWindow(4, 1024).

    Raises UserError for anything else.
    """
    name, _, numbers = text.partition(":")
    expected = "window:SINKS,WINDOW, h2o:BUDGET,RECENT or snapkv:BUDGET,OBSERVED"
    if name not in _BY_NAME:
        near = nearest(name, tuple(_BY_NAME))
        raise UserError(f"eviction: got {text!r}, expected {expected}{f' (did you mean `{near}`?)' if near else ''}")
    given = numbers.split(",") if numbers else []
    if len(given) > 2 or not all(number.isdecimal() for number in given):
        raise UserError(f"eviction: got {text!r}, expected {expected}")
    return _BY_NAME[name](*map(int, given))


def _least(table: Table, budget: int, recent: int) -> list[int]:
    """The blocks before the last `recent` tokens that drew the least attention, so many that `budget` tokens are left;
    of equal ones the older."""
    n_blocks = -(-table.n_keys // table.block_size)
    surplus = n_blocks - -(-budget // table.block_size)
    candidates = range(min(table.n_full, max(0, table.n_keys - recent) // table.block_size))
    return sorted(sorted(candidates, key=lambda place: table.mass[place])[: max(0, surplus)])


def _budget(budget: int, name: str, recent: int) -> None:
    _whole("budget", budget, 1)
    _whole(name, recent, 1)
    if recent >= budget:
        raise UserError(f"{name}: got {recent}, expected less than the budget ({budget}), which it is part of")


def _whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{name}: got {value!r}, expected a whole number >= {least}")
