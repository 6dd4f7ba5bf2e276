"""Log-probabilities in the two forms of OpenAI's API. JSON has no infinity and no NaN: both are -9999 there."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any

from modelworks.data import Tokenizer
from modelworks.serve.request import TokenLogprob

IMPOSSIBLE = -9999.0


class CompletionLogprobs:
    """`logprobs` of /v1/completions: parallel lists. text_offset goes on from call to call, so make one per choice.

    n_top: of most likely tokens that are shown besides the chosen one; with 0 there is no `top_logprobs`."""

    def __init__(self, tokenizer: Tokenizer, n_top: int) -> None:
        self._tokenizer, self._n_top = tokenizer, n_top
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def shown(self, entries: Sequence[TokenLogprob | None], ids: Sequence[int]) -> dict[str, Any]:
        """ids: of the same tokens; a token without an entry (the first of a prompt) has null."""
        offsets = []
        for token in ids:
            offsets.append(self._offset)
            self._offset += len(self._characters.decode(self._tokenizer.token_bytes(token)))
        return {
            "tokens": [exact_text(self._tokenizer, token) for token in ids],
            "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries] if self._n_top else None,
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob | None) -> dict[str, float] | None:
        if entry is None:
            return None
        found = [*entry.top[: self._n_top], (entry.token, entry.logprob)]
        return {exact_text(self._tokenizer, token): finite(logprob) for token, logprob in found}


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob], n_top: int) -> dict[str, Any]:
    """`logprobs` of /v1/chat/completions."""
    content = [
        {
            **_token(tokenizer, entry.token, entry.logprob),
            "top_logprobs": [_token(tokenizer, token, logprob) for token, logprob in entry.top[:n_top]],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob | None], n_top: int
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token of the prompt, logprob, rank and text by token id. n_top: of most likely
    tokens that are shown besides the prompt's own."""
    return [None if entry is None else _ranked(tokenizer, entry, n_top) for entry in entries]


def exact_text(tokenizer: Tokenizer, token: int) -> str:
    """A token's text; `bytes:\\xe2\\x82` for one that is no whole character, so that no two look the same."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else IMPOSSIBLE


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": data.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(data)}


def _ranked(tokenizer: Tokenizer, entry: TokenLogprob, n_top: int) -> dict[str, Any]:
    ranked = {
        token: {"logprob": finite(logprob), "rank": place + 1, "decoded_token": exact_text(tokenizer, token)}
        for place, (token, logprob) in enumerate(entry.top[:n_top])
    }
    chosen = {"logprob": finite(entry.logprob), "rank": None, "decoded_token": exact_text(tokenizer, entry.token)}
    return {str(token): shown for token, shown in ({entry.token: chosen} | ranked).items()}
