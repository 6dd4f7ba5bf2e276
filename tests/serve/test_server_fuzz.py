"""Requests that schemathesis makes up from the OpenAPI schema, right ones and wrong ones: none ends in a 5xx that says
that something in here broke."""

from __future__ import annotations

from collections.abc import Iterator

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


@pytest.mark.slow
def test_no_request_breaks_anything(server: Serving) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert {operation.path for operation in operations} >= {"/v1/completions", "/v1/chat/completions", "/tokenize"}
    for operation in operations:
        few = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), database=None)

        @few
        @given(case=operation.as_strategy())
        def ask(case: schemathesis.Case) -> None:
            answer = case.call()
            assert answer.status_code < 500, answer.text
            if answer.status_code >= 400:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

        ask()
    assert httpx2.get(f"{server.url}/health").status_code == 200
