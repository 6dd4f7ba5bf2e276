"""What is asked of the engine, and what comes back.

A request asks for one or several completions of a prompt. They come back as `Delta`s, the news of one completion in
one step; `Collected` puts a request's deltas together again. Every completion that was asked for ends with exactly one
delta that has a `finish_reason`, whatever happens to the request, and the last of them has `last` set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from modelworks.serve.params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "deadline", "error"]


@dataclass(frozen=True)
class Request:
    """id: of the caller's choice, unlike that of any other request in progress. prompt: token ids, at least one.
    priority: lower is served first. deadline: seconds from its submission by which it ends, finished or not; None is
    the engine's own. salt: requests share cached prefixes only with those of the same salt. reuses_prefix: whether it
    looks for its prefix in the cache, and leaves its own there."""

    id: str
    prompt: Sequence[int]
    params: SamplingParams
    priority: int = 0
    deadline: float | None = None
    salt: str = ""
    reuses_prefix: bool = True


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its log-probability, and the most likely tokens in its place: (token, logprob), the best first."""

    token: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()


@dataclass(slots=True)
class Delta:
    """What one step brought to completion `index` of a request.

    token_ids: new tokens, a token that ends the completion included. text: what is certain of their text: without
    half characters, a possible stop string held back until it is none. logprobs: of these tokens, if asked for.
    stop_reason: the stop string or the token of `stop_token_ids` that was met; None for an end-of-text token.
    error: one line, where finish_reason is "error". refused: nothing was computed, for the request turned out wrong
    after it was submitted, and error says why: what a UserError of `submit` would have said. n_prompt, n_cached: tokens
    of the prompt, and how many of them were found in the cache. cumulative_logprob: with the finish_reason, of all its
    tokens, where logprobs were asked for or it is the best of several; a beam's score is that over its length to the
    power of the length penalty. prompt_logprobs: with the first delta of completion 0, one for each token of the
    prompt; the first token has none. last: nothing more comes for this request. queued_s: seconds that it waited until
    its prompt was begun.
    """

    request_id: str
    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    n_prompt: int = 0
    n_cached: int = 0
    cumulative_logprob: float | None = None
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None
    last: bool = False
    queued_s: float = 0.0
    refused: bool = False

    @property
    def refusal(self) -> str | None:
        """Why the request turned out wrong; None where it did not."""
        return (self.error or "the request was refused") if self.refused else None

    def __reduce__(self) -> tuple[type[Delta], tuple[object, ...]]:
        """A tenth of the time that pickling slots by their names takes, and one crosses a pipe for every token."""
        return Delta, _values(self)


_values = attrgetter(*(each.name for each in fields(Delta)))


@dataclass
class Completion:
    """One completion, as far as it has come. Fields as in `Delta`."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    cumulative_logprob: float | None = None


@dataclass
class RequestOutput:
    """All completions of a request, by index: the best first where they are the best of more."""

    id: str
    prompt_ids: list[int]
    completions: list[Completion]
    n_cached: int = 0
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None


class Collected:
    """Deltas of one request, put together."""

    def __init__(self, request: Request) -> None:
        completions = [Completion(index) for index in range(request.params.n)]
        self.output = RequestOutput(request.id, list(request.prompt), completions)
        self.finished = False

    def add(self, delta: Delta) -> None:
        completion = self.output.completions[delta.index]
        completion.token_ids += delta.token_ids
        completion.text += delta.text
        if delta.logprobs is not None:
            completion.logprobs = (completion.logprobs or []) + delta.logprobs
        if delta.finish_reason is not None:
            completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason
            completion.error, completion.cumulative_logprob = delta.error, delta.cumulative_logprob
        if delta.prompt_logprobs is not None:
            self.output.prompt_logprobs = delta.prompt_logprobs
        self.output.n_cached = delta.n_cached
        self.finished = self.finished or delta.last
