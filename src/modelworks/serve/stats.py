"""How an engine is doing, as numbers: for the metrics, the health check and people."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Now: running, waiting requests' sequences; tokens of those that wait; blocks of the cache, and those free.

    Since the engine started: prompt tokens that were computed or found in the cache, tokens generated, sequences
    preempted and the tokens lost by it, prompt tokens looked up in the prefix cache and found there, steps, and those
    of them that could not be computed. The last step: its tokens, its seconds."""

    n_running: int = 0
    n_waiting: int = 0
    n_waiting_tokens: int = 0
    n_blocks: int = 0
    n_free_blocks: int = 0
    n_prompt_tokens: int = 0
    n_generated_tokens: int = 0
    n_preempted: int = 0
    n_tokens_lost: int = 0
    n_prefix_queries: int = 0
    n_prefix_hits: int = 0
    n_steps: int = 0
    n_failed_steps: int = 0
    step_tokens: int = 0
    step_seconds: float = 0.0
