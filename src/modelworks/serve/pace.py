"""How much of long prompts a step computes beside decoding, so that nobody who reads along has to wait long.

A step that decodes takes D seconds, and each token of a prompt beside it P more. With c tokens of long prompts it takes
D + c P, which is at most `stall` times D for

    c = (stall - 1) D / P

That is for one prompt. Where n are wanted at once, all of them wait for the steps of all, and steps that are kept short
make the queue longer for everybody: each prompt is worth such a delay, and the bound is n c.

Both are measured as the engine runs, as moving averages: P where nothing is decoded, D where nothing else is done.
Where both are done, what their sum was off is shared between them as if each of c P and D were wrong at random, c P six
times as much: it depends on the chunk and on what lies before it, and decoding alone is measured most of the time.
"""

from __future__ import annotations

from modelworks.serve.scheduler import Step

_LEAST = 4  # tokens, so that a long prompt gets on whatever it costs
_DOUBT = 6.0  # see above
_WEIGHT = 0.25  # of a new measurement in the average


class Pace:
    """stall: how many times longer a step may take for long prompts; None is no bound."""

    def __init__(self, stall: float | None, token_budget: int) -> None:
        self._stall, self._token_budget = stall, token_budget
        self._decode_seconds: float | None = None
        self._prompt_token_seconds: float | None = None

    def measured(self, step: Step, seconds: float) -> None:
        """A step took so long."""
        n_decoded = sum(work.count == 1 for work in step.work)
        n_chunked = step.n_tokens - n_decoded
        decode, token = self._decode_seconds, self._prompt_token_seconds
        if n_decoded == 0:
            self._prompt_token_seconds = _average(token, seconds / n_chunked)
        elif n_chunked == 0:
            self._decode_seconds = _average(decode, seconds)
        elif decode and token:
            off = _WEIGHT * (seconds - decode - n_chunked * token)
            share = decode**2 / (decode**2 + (_DOUBT * n_chunked * token) ** 2)
            self._decode_seconds = max(decode + share * off, decode / 2)
            self._prompt_token_seconds = max(token + (1 - share) * off / n_chunked, token / 2)

    def long_budget(self, n_prompts: int) -> int:
        """Tokens of long prompts for the next step, if it decodes. n_prompts: that are not yet computed, or waiting."""
        if self._stall is None or not self._decode_seconds or not self._prompt_token_seconds:
            return self._token_budget
        tokens = (self._stall - 1.0) * self._decode_seconds / self._prompt_token_seconds
        return max(_LEAST, min(int(tokens * max(1, n_prompts)), self._token_budget))


def _average(known: float | None, new: float) -> float:
    return new if known is None else known + _WEIGHT * (new - known)
