"""What clients may take of the server: text beyond the context, time, connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
from functools import partial
from typing import Any

import fake_engine
import httpx2
import pytest
from serving import Serving, serving

from modelworks.config import UserError
from modelworks.data import Tokenizer
from modelworks.serve.api import connections_allowed
from modelworks.serve.api.connection import ANSWERED_BEYOND, LONGEST_HEAD, Connection
from modelworks.serve.api.errors import ApiError
from modelworks.serve.api.gate import AT_ONCE
from modelworks.serve.api.schemas import Message
from modelworks.serve.api.tokens import conversation_ids, prompt_ids


class Counting(Tokenizer):
    """Counts the characters that it encodes."""

    n_encoded = 0

    def encode(self, text: str, **how: Any) -> list[int]:
        self.n_encoded += len(text)
        return super().encode(text, **how)


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    plain = fake_engine.byte_tokenizer()
    tokenizer = Counting(plain.backend, eos_id=plain.eos_id, chat_template=plain.chat_template)
    model = fake_engine.served_model(tokenizer=tokenizer)
    long, just = "a" * 10_000, "a" * (fake_engine.CONTEXT * len("<end>") - 5)
    for work, param in [
        (prompt_ids(model, long), "prompt"),
        (conversation_ids(model, [Message(role="user", content=long)]), "messages"),
    ]:
        with pytest.raises(ApiError, match=r"at least 20\d\d tokens") as refused:
            asyncio.run(work)
        assert (refused.value.status, refused.value.param) == (400, param)
        assert refused.value.code == "context_length_exceeded"
        assert tokenizer.n_encoded == 0
    assert asyncio.run(prompt_ids(model, just)), "what may fit is tokenised"


NOT_HTTP = "what was sent is no HTTP/1.1 request"
JSON = {"Content-Type": "application/json"}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"


def connected(server: Serving) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=20)


def answer(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and error of a response after which the connection is closed; (0, {}) where nothing was said."""
    said = b""
    while more := connection.recv(65536):
        said += more
    head, _, body = said.partition(b"\r\n\r\n")
    assert not said or b"connection: close" in head.lower()
    return (int(head.split()[1]), json.loads(body)["error"]) if said else (0, {})


def test_a_client_has_so_much_time_and_no_more() -> None:
    with serving(fake_engine.build_fake, client_timeout=0.1) as server:
        for sent, status, words in [
            (b"", 0, ""),
            (HEAD[:30], 408, "the head of the request did not come within 0.1 s"),
            (HEAD + b"Content-Length: 20\r\n\r\n{", 408, "the body did not come within 0.1 s"),
            (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", 408, "the body did not come within 0.1 s"),
            (b"no HTTP at all\r\n\r\n", 400, NOT_HTTP),
            (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400, NOT_HTTP),
        ]:
            with connected(server) as connection:
                connection.sendall(sent)
                found, error = answer(connection)
                assert found == status
                assert error.get("message", "") == words
        with connected(server) as connection:  # a second request of one connection has its time too
            body = b'{"prompt": "!slow", "max_tokens": 15}'  # three times as long as a client may take
            connection.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert b"200 OK" in connection.recv(65536), "the answer itself has all the time it needs"
            connection.sendall(HEAD[:30])
            assert answer(connection)[0] == 408


def test_a_head_without_an_end_is_refused() -> None:
    with serving(fake_engine.build_fake) as server, connected(server) as connection:
        connection.sendall(HEAD + b"X: ")
        connections = server.server.server_state.connections
        server.wait_for(lambda: any(isinstance(each, Connection) and each._reads_head for each in connections))
        connection.sendall(b"a" * (LONGEST_HEAD + 1))
        found, error = answer(connection)
        assert (found, error["message"]) == (431, f"the head of the request is longer than {LONGEST_HEAD} bytes")


def test_a_client_that_does_not_read_on_is_left() -> None:
    """Told as the transport tells it: that the client's buffers and the system's are full, which takes megabytes."""
    body = b'{"prompt": "!mute", "stream": true}'
    with serving(fake_engine.build_fake, client_timeout=0.1) as server, connected(server) as connection:
        connection.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert b"200 OK" in connection.recv(65536)
        (served,) = server.server.server_state.connections
        assert isinstance(served, Connection)
        server.call(served.pause_writing)
        server.call(served.resume_writing)
        assert served._read_timer is None, "it reads on"
        server.call(served.pause_writing)
        server.wait_for(lambda: not server.server.server_state.connections and not server.service.engine.n_requests)


def test_bodies_together_are_bounded() -> None:
    """Each within the limit, and too many of them: memory is what a server has least of."""
    body = json.dumps({"prompt": "!mute", "stream": True, "user": "a" * 200}).encode()
    answers: list[tuple[int, str]] = []

    async def ask(client: httpx2.AsyncClient) -> None:
        async with client.stream("POST", "/v1/completions", content=body, headers=JSON) as response:
            answers.append((response.status_code, response.headers.get("Retry-After", "")))
            if response.status_code == 200:
                await asyncio.sleep(60)

    async def work(url: str) -> None:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=url, timeout=20, limits=limits) as client:
            asking = [asyncio.ensure_future(ask(client)) for _ in range(AT_ONCE + 2)]
            while len(answers) < len(asking):
                await asyncio.sleep(0.01)
            for each in asking:
                each.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    with serving(partial(fake_engine.build_fake, max_waiting=1000), body_limit=len(body)) as server:
        asyncio.run(work(server.url))
        assert sorted(answers) == [(200, "")] * AT_ONCE + [(503, "5")] * 2
        server.wait_for(lambda: not server.service.engine.n_requests)
        small = httpx2.post(f"{server.url}/v1/completions", json={"prompt": "ab", "max_tokens": 2}, timeout=20)
        assert small.status_code == 200, "what was held is free again"


def test_connections_beyond_the_limit_are_told_so() -> None:
    with serving(fake_engine.build_fake, max_connections=2) as server:
        kept = [connected(server) for _ in range(2)]
        server.wait_for(lambda: len(server.server.server_state.connections) == 2)
        with pytest.raises(httpx2.HTTPStatusError) as refused:
            httpx2.get(f"{server.url}/health", timeout=20).raise_for_status()
        assert refused.value.response.status_code == 503
        assert refused.value.response.json()["error"]["code"] == "too_many_connections"
        assert "Retry-After" in refused.value.response.headers
        kept += [connected(server) for _ in range(ANSWERED_BEYOND)]
        server.wait_for(lambda: len(server.server.server_state.connections) == 2 + ANSWERED_BEYOND)
        with connected(server) as beyond, contextlib.suppress(ConnectionResetError):
            assert beyond.recv(1) == b""
        for each in kept:
            each.close()
        server.wait_for(lambda: not server.server.server_state.connections)
        assert httpx2.get(f"{server.url}/health", timeout=20).status_code == 200


def test_as_many_connections_as_files_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"now": (256, 1000)}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, wanted: limits.update(now=wanted))
    room = 1000 - 128 - ANSWERED_BEYOND
    assert connections_allowed(None) == room, "what there is room for"
    assert limits["now"] == (1000, 1000), "the process's own limit is raised as far as it may be"
    with pytest.raises(UserError, match=f"--max-connections: got 5000, .* at most {room}"):
        connections_allowed(5000)
    with pytest.raises(UserError, match="--max-connections: got 0"):
        connections_allowed(0)
    limits["now"] = (256, 1000)
    assert connections_allowed(100) == 100
    assert limits["now"] == (292, 1000)
