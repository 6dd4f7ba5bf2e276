"""Requests that schemathesis makes up from the OpenAPI schema, right ones and wrong ones: none ends in a 5xx that says
that something in here broke."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fake_engine
import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from serving import Serving, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(fake_engine.build_fake, body_limit=2**20) as running:
        yield running


def likely(case: schemathesis.Case) -> dict[str, Any] | None:
    """One field of a made-up request beside a prompt that is right: all together are wrong somewhere, nearly always."""
    names = [name for name in case.body if name not in ("prompt", "messages")] if isinstance(case.body, dict) else []
    if "completions" not in case.path or not names:
        return None
    asked = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in case.path else {"prompt": "Once"}
    name = names[len(repr(case.body)) % len(names)]
    return {"max_tokens": 4, name: case.body[name], **asked}


def is_well(status: int, body: object) -> bool:
    """A request that names a short `timeout` may reach it."""
    return status < 500 or (status == 504 and isinstance(body, dict) and "timeout" in body)


@pytest.mark.slow
def test_no_request_breaks_anything(server: Serving) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert {operation.path for operation in operations} >= {"/v1/completions", "/v1/chat/completions", "/tokenize"}
    reached: list[int] = []
    for operation in operations:
        few = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), database=None)

        @few
        @given(case=operation.as_strategy())
        def ask(case: schemathesis.Case) -> None:
            answer = case.call()
            assert is_well(answer.status_code, case.body), answer.text
            if answer.status_code >= 400:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            if (body := likely(case)) is not None:
                again = httpx2.post(server.url + case.path, json=body)
                assert is_well(again.status_code, body), again.text
                reached.append(again.status_code)

        ask()
    assert 200 in reached
    assert httpx2.get(f"{server.url}/health").status_code == 200
