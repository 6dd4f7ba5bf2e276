"""How the engine runs, as one validated value."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Literal

from modelworks.config import UserError, nearest
from modelworks.serve.eviction.policies import Policy

KvDtype = Literal["auto", "fp32", "bf16", "int8", "fp8"]
Native = Literal["auto", "on", "off"]
_KV_DTYPES = ("auto", "fp32", "bf16", "int8", "fp8")
_NATIVE = ("auto", "on", "off")


@dataclass(frozen=True)
class EngineOptions:
    """max_model_len: tokens of prompt and completion together, at most; None is the model's own length, or, where the
    cache cannot hold that, what it can. kv_cache_bytes: size of the KV cache; None is what `memory_share` of the free
    memory leaves beside what a step takes. memory_share: None is 0.9 on a GPU and 0.5 on a CPU. block_size: tokens of a
    block. token_budget: tokens of one step. stall: how many times longer a step may take for the sake of a long prompt,
    while others decode (`serve.pace`); None is no bound but token_budget. max_running: sequences that run at once.
    kv_dtype: of the cache's keys and values; "auto" is the model's. prefix_cache: whether requests share computed
    prefixes. max_waiting, max_waiting_tokens: of the queue; what is over them is refused. ageing_s: seconds of waiting
    worth one step of priority. deadline_s: seconds within which a request ends that names no deadline; None is never.
    batch_invariant: a request's tokens do not depend on what else runs, bit by bit. native: whether our compiled
    kernels compute the steps on a CPU ("on" fails where they cannot). reserve: share of the cache that admission leaves
    free for those who run. seed: of the seeds of requests that name none. eviction: what long contexts forget (see
    `modelworks.serve.eviction`); None is nothing."""

    max_model_len: int | None = None
    kv_cache_bytes: int | None = None
    memory_share: float | None = None
    block_size: int = 16
    token_budget: int = 512
    stall: float | None = 1.6
    max_running: int = 64
    kv_dtype: KvDtype = "auto"
    prefix_cache: bool = True
    max_waiting: int = 1024
    max_waiting_tokens: int = 1_000_000
    ageing_s: float = 10.0
    deadline_s: float | None = 3600.0
    batch_invariant: bool = False
    native: Native = "auto"
    reserve: float = 0.02
    seed: int = 0
    eviction: Policy | None = None

    def __post_init__(self) -> None:
        for name in ("block_size", "token_budget", "max_running", "max_waiting", "max_waiting_tokens"):
            _whole(name, getattr(self, name), 1)
        for name in ("max_model_len", "kv_cache_bytes"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 1)
        _whole("seed", self.seed, 0)
        if self.memory_share is not None:
            _between("memory_share", self.memory_share, 0.0, 1.0, low_too=False)
        _between("reserve", self.reserve, 0.0, 0.5)
        _between("ageing_s", self.ageing_s, 0.0, math.inf, low_too=False)
        if self.stall is not None:
            _between("stall", self.stall, 1.0, math.inf, low_too=False)
        if self.deadline_s is not None:
            _between("deadline_s", self.deadline_s, 0.0, math.inf, low_too=False)
        _choice("kv_dtype", self.kv_dtype, _KV_DTYPES)
        _choice("native", self.native, _NATIVE)
        if self.eviction is not None and not isinstance(self.eviction, Policy):
            raise UserError(f"eviction: got {self.eviction!r}, expected a policy such as SinksAndWindow(), or None")
        for name in ("prefix_cache", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name}: got {getattr(self, name)!r}, expected true or false")
        if self.max_running >= self.token_budget:
            raise UserError(
                f"max_running: got {self.max_running}, expected less than token_budget ({self.token_budget}): a step "
                "has one token of every running sequence, and the rest of it is for prompts"
            )


def _whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{name}: got {value!r}, expected a whole number >= {least}")


def _between(name: str, value: object, low: float, high: float, *, low_too: bool = True) -> None:
    right = isinstance(value, (int, float)) and not isinstance(value, bool)
    right = right and low <= value <= min(high, sys.float_info.max)  # type: ignore[operator]  # a number
    if not right or (value == low and not low_too):
        bounds = f"a number {'>=' if low_too else '>'} {low:g}"
        raise UserError(f"{name}: got {value!r}, expected {bounds}{'' if high == math.inf else f' and <= {high:g}'}")


def _choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        near = nearest(str(value), choices)
        hint = f" (did you mean `{near}`?)" if near else ""
        raise UserError(f"{name}: got {value!r}, expected {', '.join(choices)}{hint}")
