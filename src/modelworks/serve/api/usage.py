"""`usage`: each prompt counted once, and every token generated for the choices that are returned."""

from __future__ import annotations

from typing import Any

from modelworks.serve.request import Delta


class Usage:
    """counts_generated: false where what is generated is not returned (`echo` alone, with `max_tokens` 0)."""

    def __init__(self, *, counts_generated: bool = True) -> None:
        self._counts_generated = counts_generated
        self._prompts: dict[str, tuple[int, int]] = {}  # of each request: tokens of the prompt, those found cached
        self._n_generated = 0

    def add(self, delta: Delta) -> None:
        self._prompts[delta.request_id] = (delta.n_prompt, delta.n_cached)
        self._n_generated += len(delta.token_ids) if self._counts_generated else 0

    def shown(self) -> dict[str, Any]:
        prompt = sum(n_prompt for n_prompt, _ in self._prompts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._n_generated,
            "total_tokens": prompt + self._n_generated,
            "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in self._prompts.values())},
        }
