"""Streams: together they say what the whole answer says, in OpenAI's order; a client that leaves is noticed."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from fake_engine import FakeEngine, served_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import Serving, serving

from modelworks.serve.api.events import event
from modelworks.serve.served_model import ServedModel

ENGINE = FakeEngine()
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


def build() -> tuple[FakeEngine, ServedModel]:
    return ENGINE, served_model()


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(build) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Serving) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=20) as client:
        yield client


def events(http: httpx2.Client, route: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream, `[DONE]` taken off; it must be the last."""
    answer = http.post(route, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n\n")
    assert lines.pop() == ""
    assert lines.pop() == "data: [DONE]"
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=TEXTS,
    n=st.integers(1, 3),
    max_tokens=st.integers(1, 20),
    stop=st.lists(TEXTS, max_size=2),
    usage=st.booleans(),
    logprobs=st.none() | st.integers(0, 2),
    echo=st.booleans(),
)
def test_a_stream_says_what_the_whole_answer_says(
    http: httpx2.Client,
    text: str,
    n: int,
    max_tokens: int,
    stop: list[str],
    usage: bool,
    logprobs: int | None,
    echo: bool,
) -> None:
    body = {"prompt": [text, "x" + text], "n": n, "max_tokens": max_tokens, "stop": stop, "logprobs": logprobs}
    body["echo"] = echo
    whole = http.post("/v1/completions", json=body).json()
    chunks = events(http, "/v1/completions", body | ({"stream_options": {"include_usage": True}} if usage else {}))
    if usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"] == whole["usage"]
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
        assert parts[-1]["text"] == "", "the last says how it ended, and no more"
        for name in ("tokens", "token_logprobs", "text_offset") if logprobs is not None else ():
            pieces = [item for part in parts if part["logprobs"] for item in part["logprobs"][name]]
            assert pieces == choice["logprobs"][name]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS, n=st.integers(1, 2), usage=st.booleans())
def test_the_order_of_a_chat_stream(http: httpx2.Client, text: str, n: int, usage: bool) -> None:
    body = {"messages": [{"role": "user", "content": text}], "n": n, "max_tokens": 30}
    whole = http.post("/v1/chat/completions", json=body).json()
    chunks = events(http, "/v1/chat/completions", body | ({"stream_options": {"include_usage": True}} if usage else {}))
    if usage:
        assert chunks.pop()["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert all(set(part["delta"]) == {"content"} for part in parts[1:-1])
        assert parts[-1]["delta"] == {}
        assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]


@settings(max_examples=30)
@given(st.dictionaries(st.text(), st.text() | st.floats(allow_nan=False, allow_infinity=False) | st.none(), max_size=4))
def test_an_event_is_one_line(value: dict[str, Any]) -> None:
    try:
        data = event(value)
    except UnicodeEncodeError:  # half a character: texts of an engine have none
        return
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2
    assert b"\r" not in data
    assert json.loads(data[6:]) == value


def test_an_error_within_a_stream_is_its_last_event(server: Serving, http: httpx2.Client) -> None:
    chunks = events(http, "/v1/completions", {"prompt": "!error", "max_tokens": 5})
    assert chunks[-1]["error"]["message"] == "the constraint allows no token"
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(model="fake", prompt="!error", stream=True)
        with pytest.raises(openai.APIError, match="no token"):
            list(stream)


def test_what_is_refused_is_no_stream(http: httpx2.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "!full", "stream": True})
    assert answer.status_code == 429
    assert answer.headers["content-type"] == "application/json"


def test_leaving_an_async_stream_aborts_the_request(server: Serving) -> None:
    async def leave() -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "!slow"}], stream=True
            )
            request_id = ""
            async for chunk in stream:
                request_id = chunk.id
                if chunk.choices[0].delta.content:
                    break
            await stream.close()
            return request_id

    request_id = asyncio.run(leave())
    server.wait_for(lambda: request_id in ENGINE.aborted)
    server.wait_for(lambda: not ENGINE.has_work)
    assert server.service.engine.n_requests == 0


def test_cancelling_the_task_of_a_stream_aborts_the_request(server: Serving) -> None:
    async def cancelled() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def read() -> None:
                stream = await client.completions.create(model="fake", prompt="!slow", max_tokens=200, stream=True)
                async for _ in stream:
                    begun.set()

            begun = asyncio.Event()
            task = asyncio.create_task(read())
            await begun.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    n_aborted = len(ENGINE.aborted)
    asyncio.run(cancelled())
    server.wait_for(lambda: len(ENGINE.aborted) == n_aborted + 1)
    server.wait_for(lambda: not ENGINE.has_work)


@pytest.mark.parametrize(("stream", "n_sent"), [(False, 1), (True, 1), (True, 2)])
def test_a_connection_that_closes_aborts_the_request(server: Serving, stream: bool, n_sent: int) -> None:
    """Also where a further one waits behind it."""
    body = json.dumps({"prompt": ["!slow", "!slow"], "max_tokens": 250, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    port = int(server.url.rsplit(":", 1)[1])
    n_aborted = len(ENGINE.aborted)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall((head.encode() + b"\r\n\r\n" + body) * n_sent)
        server.wait_for(lambda: ENGINE.has_work)
    server.wait_for(lambda: len(ENGINE.aborted) == n_aborted + 2)
    server.wait_for(lambda: not ENGINE.has_work)


def test_abort_by_id(server: Serving, http: httpx2.Client) -> None:
    body = {"prompt": "!slow", "max_tokens": 250, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        request_id = answer.headers["X-Request-Id"]
        lines = answer.iter_lines()
        next(lines)
        assert http.post("/abort", json={"request_id": request_id}).json()["aborted"] is True
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    last = json.loads(rest[-2].removeprefix("data: "))
    assert last["id"] == request_id
    assert last["choices"][0]["finish_reason"] == "abort"
    assert http.post("/abort", json={"request_id": request_id}).json()["aborted"] is False, "again: no error"


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_an_echo_that_is_aborted_before_its_prompt_was_scored(
    server: Serving, http: httpx2.Client, max_tokens: int
) -> None:
    """Its lists are as long as each other, and it does not say that it is what was asked for."""
    body = {"prompt": "!mute", "max_tokens": max_tokens, "stream": True, "echo": True, "logprobs": 1, "n": 2}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        http.post("/abort", json={"request_id": answer.headers["X-Request-Id"]})
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    choices = [json.loads(each)["choices"][0] for each in events[:-1]]
    for index in range(2):
        first, last = (each for each in choices if each["index"] == index)
        assert first["text"] == "!mute"
        assert {len(values) for values in first["logprobs"].values()} == {5}
        assert first["logprobs"]["token_logprobs"] == [None] * 5, "not known"
        assert last["finish_reason"] == "abort"
