"""One request to an OpenAI-compatible endpoint, its answer streamed and timed.

While an answer runs, only bytes and their times are kept; they are parsed when it has ended, so that the work of one
request does not blur the times of the others more than it must.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import aiohttp

from modelworks.config import UserError, show_value
from modelworks.serve.bench.outcome import Outcome

_KEPT = 200  # characters of what a server says about an error
_MOST_ERROR_BYTES = 65536


@dataclass
class Client:
    """An open client; use it as an async context manager. url: with or without `/v1`. model: as the server names it.
    chat: ask `/v1/chat/completions`. extra: further fields of every body. timeout: seconds of one request.
    begun: the clock's zero, on `time.perf_counter`."""

    url: str
    model: str = ""
    chat: bool = False
    api_key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    timeout: float = 300.0
    begun: float = field(default_factory=time.perf_counter)
    _session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self.api_key}"} if self.api_key else {},
            timeout=aiohttp.ClientTimeout(total=self.timeout),
            # A connection for each request, as of so many users: some servers close those that are kept.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    def now(self) -> float:
        return time.perf_counter() - self.begun

    async def models(self) -> list[str]:
        """Names of the models that the server has. Raises UserError where no such server answers."""
        assert self._session is not None
        address = f"{self._base()}/models"
        try:
            async with self._session.get(address) as answer:
                if answer.status != 200:
                    hint = "; give --api-key" if answer.status in (401, 403) else ""
                    raise UserError(f"{address} answered HTTP {answer.status}: {_short(await answer.text())}{hint}")
                content: Any = await answer.json(content_type=None)
        except TimeoutError:
            raise UserError(f"{address}: no answer within {self.timeout:g} s") from None
        except (aiohttp.ClientError, ValueError, OSError) as error:
            hint = "is the server running there? `modelworks serve MODEL` starts one"
            raise UserError(f"{address}: no answer of an OpenAI-compatible server ({_short(error)}); {hint}") from None
        try:
            return [str(each["id"]) for each in content["data"]]
        except (KeyError, TypeError):
            raise UserError(f"{address}: got {show_value(content)}, expected a list of models") from None

    async def ask(self, index: int, body: dict[str, Any], due: float) -> Outcome:
        """Send one request and read its answer to the end. Failures are told in the outcome, never raised."""
        assert self._session is not None
        outcome = Outcome(index, due)
        sent = {
            "model": self.model,
            **body,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        place = "chat/completions" if self.chat else "completions"
        pieces: list[tuple[float, bytes]] = []
        outcome.sent = self.now()
        try:
            async with self._session.post(f"{self._base()}/{place}", json=sent) as answer:
                if answer.status != 200:
                    _refused(outcome, answer.status, await answer.content.read(_MOST_ERROR_BYTES))
                else:
                    async for piece in answer.content.iter_any():
                        pieces.append((self.now(), piece))  # noqa: PERF401  kept also where the next one fails
        except Exception as error:  # whatever a server may do, the load goes on
            outcome.error, outcome.detail = _failure(error, begun=bool(pieces)), _short(error)
        outcome.ended = self.now()
        if pieces:
            _read_events(outcome, pieces)
        elif outcome.error is None:
            outcome.error = "empty answer"
        return outcome

    def _base(self) -> str:
        base = self.url.rstrip("/")
        return base if base.endswith("/v1") else f"{base}/v1"


def _failure(error: Exception, *, begun: bool) -> str:
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, (aiohttp.ClientConnectorError, ConnectionRefusedError)):
        return "cannot connect"
    if isinstance(error, (aiohttp.ClientError, OSError)):
        return "connection lost within the answer" if begun else "connection lost before the answer"
    return f"client: {type(error).__name__}"


def _refused(outcome: Outcome, status: int, content: bytes) -> None:
    text = content.decode("utf-8", errors="replace")
    try:
        told = json.loads(text)["error"]
        kind = str(told.get("type") or told.get("code") or "")
        outcome.detail = _short(told.get("message", text))
    except (ValueError, KeyError, TypeError, AttributeError):
        kind, outcome.detail = "", _short(text)
    outcome.error = f"HTTP {status} {kind}".rstrip()


def _read_events(outcome: Outcome, pieces: list[tuple[float, bytes]]) -> None:
    """Fill in arrivals, counts and what the events say of an error. The end of a stream is told by `[DONE]`."""
    done = False
    for moment, data in _events(pieces):
        if data == b"[DONE]":
            done = True
            continue
        try:
            event = json.loads(data)
            _read_event(outcome, moment, event)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError):
            outcome.error = outcome.error or "not an event stream"
            outcome.detail = outcome.detail or _short(data.decode("utf-8", errors="replace"))
    if not done and outcome.error is None:
        outcome.error = "stream ended early"
    if done and outcome.error is None and not outcome.n_tokens:
        outcome.error = "no tokens"


def _read_event(outcome: Outcome, moment: float, event: dict[str, Any]) -> None:
    if told := event.get("error"):
        told = told if isinstance(told, dict) else {"message": told}
        outcome.error = f"error in the stream {told.get('type') or told.get('code') or ''}".rstrip()
        outcome.detail = _short(told.get("message", ""))
    for choice in event.get("choices", []):
        delta = choice.get("delta") or {}
        if choice.get("text") or delta.get("content") or delta.get("tool_calls") or delta.get("reasoning_content"):
            outcome.arrivals.append(moment)
            break
    if usage := event.get("usage"):
        outcome.n_prompt, outcome.n_generated = usage.get("prompt_tokens"), usage.get("completion_tokens")
        outcome.n_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def _events(pieces: list[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """(time of its last byte, data) of each server-sent event; comments and other fields are skipped."""
    rest = b""
    for moment, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield moment, line[5:].strip()
    if rest.startswith(b"data:"):
        yield pieces[-1][0], rest[5:].strip()


def _short(told: object) -> str:
    text = " ".join(str(told).split()) or type(told).__name__
    return text if len(text) <= _KEPT else f"{text[: _KEPT - 1]}…"
