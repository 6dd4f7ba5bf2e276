"""The load generator: what is asked and when, what becomes of it, and the figures that are made of it."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_server import ScriptedServer, scripted_server

from modelworks.config import UserError
from modelworks.serve.bench import Client, ClosedLoop, Excerpts, Listed, OpenLoop, Outcome, figures, read_text, run_load

TEXT = tuple(f"word{place}" for place in range(400))
FATES = {
    "well": None,
    "refuse": "HTTP 429 overloaded",
    "crash": "HTTP 500",
    "cut": "stream ended early",
    "drop": "connection lost within the answer",
    "fail": "error in the stream engine_error",
    "silent": "no tokens",
    "garbage": "not an event stream",
    "hang": "timeout",
}


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        yield server


def load(client: Client, prompts: Any, kind: ClosedLoop | OpenLoop, **limits: Any) -> list[Outcome]:
    async def go() -> list[Outcome]:
        async with client:
            return await run_load(client, prompts, kind, **{"n_requests": None, "seconds": None, **limits})

    return asyncio.run(go())


def test_every_failure_has_its_name(server: ScriptedServer) -> None:
    prompts = Listed(tuple({"prompt": fate, "max_tokens": 8} for fate in FATES))
    outcomes = load(Client(server.url, "scripted", timeout=1.0), prompts, ClosedLoop(4), n_requests=len(FATES))
    assert [outcome.error for outcome in outcomes] == list(FATES.values())
    assert "queue is full" in outcomes[1].detail
    assert "oops" in outcomes[2].detail
    found = figures(outcomes)
    assert (found["completed"], found["failed"]) == (1, len(FATES) - 1)
    assert found["generated_tokens"] == 10  # of the one that went well, as the server counted
    assert {each["error"]: each["count"] for each in found["errors"]} == {e: 1 for e in FATES.values() if e}
    json.dumps(found, allow_nan=False)


def test_nobody_there() -> None:
    async def ask(url: str) -> tuple[Outcome, str]:
        async with Client(url, timeout=5.0) as client:
            outcome = await client.ask(0, {"prompt": "hello"}, client.now())
            with pytest.raises(UserError) as told:
                await client.models()
            return outcome, str(told.value)

    with scripted_server() as gone:
        url = gone.url
    outcome, told = asyncio.run(ask(url))
    assert outcome.error == "cannot connect"
    assert "no answer of an OpenAI-compatible server" in told
    assert "modelworks serve" in told


@pytest.mark.parametrize("chat", [False, True])
def test_a_closed_loop_keeps_its_number_in_flight(chat: bool) -> None:
    with scripted_server(words=12) as server:
        prompts = Excerpts(TEXT, 3, 9, max_tokens=12, chat=chat)
        outcomes = load(Client(f"{server.url}/v1/", "scripted", chat), prompts, ClosedLoop(3), n_requests=20)
    assert server.most == 3
    assert len(server.bodies) == len(outcomes) == 20
    assert all(body["stream"] and body["model"] == "scripted" for body in server.bodies)
    assert all(outcome.error is None and len(outcome.arrivals) == 12 for outcome in outcomes)
    assert all((o.n_prompt, o.n_generated, o.n_cached) == (7, 24, 2) for o in outcomes)
    for outcome in outcomes:
        times = [0.0, outcome.due, outcome.sent, *outcome.arrivals, outcome.ended]
        assert times == sorted(times)


def test_an_open_loop_sends_when_due(server: ScriptedServer) -> None:
    kind = OpenLoop(rate=200.0, seed=3)
    outcomes = load(Client(server.url, "scripted"), Excerpts(TEXT, 3, 9, max_tokens=4), kind, seconds=0.25)
    expected = [moment for moment in islice(kind.moments(), 1000) if moment < 0.25]
    assert [outcome.due for outcome in outcomes] == pytest.approx(expected)
    assert all(outcome.sent >= outcome.due for outcome in outcomes)
    moments = list(islice(kind.moments(), 4000))
    gaps = [after - before for before, after in pairwise(moments)]
    assert statistics.mean(gaps) == pytest.approx(1 / 200, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 200, rel=0.1)  # exponential: as its mean


def test_excerpts_are_a_function_of_seed_and_number() -> None:
    prompts = Excerpts(TEXT, 5, 20, max_tokens=7, n_shared=30, seed=1)
    bodies = [prompts.body(number)["prompt"] for number in range(50)]
    assert bodies == [Excerpts(TEXT, 5, 20, 7, 30, seed=1).body(number)["prompt"] for number in range(50)]
    shared, own = zip(*(body.rsplit("\n\n", 1) for body in bodies), strict=True)
    assert len(set(shared)) == 1
    assert len(set(own)) == 50
    assert {len(text.split()) for text in own} <= set(range(5, 21))
    assert " ".join(own[0].split()) in " ".join(TEXT)
    assert Excerpts(TEXT, 5, 20, 7, 30, seed=2).body(0)["prompt"].rsplit("\n\n", 1)[0] != shared[0]
    assert len(read_text(None)) > 50_000
    with pytest.raises(UserError, match="the text has 400 words, expected at least the 500 of one prompt"):
        Excerpts(TEXT, 5, 500, max_tokens=7)


def test_listed_prompts(tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_text(
        '{"prompt": "a", "max_tokens": 3}\n\n{"prompt": [1, 2]}\n'
        '{"custom_id": "x", "url": "/v1/completions", "body": {"prompt": "c", "model": "m", "n": 2}}\n'
    )
    listed = Listed.read(path, chat=False, max_tokens=9)
    asked = [listed.body(place) for place in range(4)]
    assert asked[:3] == [
        {"prompt": "a", "max_tokens": 3},
        {"prompt": [1, 2], "max_tokens": 9},
        {"prompt": "c", "n": 2, "max_tokens": 9},
    ]
    assert asked[3] == asked[0]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 1: not JSON"),
        ("[]", "expected an object with `prompt`"),
        ('{"promt": "a"}', "unknown field 'promt' (did you mean `prompt`?)"),
        ('{"messages": []}', "give --chat"),
        ("", "holds no requests"),
    ],
)
def test_lists_that_are_wrong(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UserError) as told:
        Listed.read(path, chat=False, max_tokens=9)
    assert says in str(told.value)


@st.composite
def outcomes(draw: st.DrawFn) -> list[Outcome]:
    made = []
    for index in range(draw(st.integers(1, 6))):
        times = sorted(draw(st.lists(st.floats(0, 30, width=32), min_size=4, max_size=9)))
        failed = draw(st.booleans())
        made.append(
            Outcome(index, times[0], times[1], times[-1], times[2:-1], 3, draw(st.sampled_from([None, 9])), None, None)
        )
        made[-1].error = "HTTP 429" if failed else None
    return made


@settings(max_examples=40)
@given(outcomes())
def test_figures_are_those_of_the_outcomes(made: list[Outcome]) -> None:
    found, done = figures(made), [outcome for outcome in made if outcome.error is None]
    json.dumps(found, allow_nan=False)
    assert found["completed"] + found["failed"] == found["requests"] == len(made)
    assert sum(each["count"] for each in found["errors"]) == found["failed"]
    if done:
        firsts = sorted(outcome.arrivals[0] - outcome.due for outcome in done)
        assert found["time_to_first_token"]["p50"] == pytest.approx(statistics.median(firsts))
        assert found["time_to_first_token"]["max"] == firsts[-1]
        assert found["end_to_end"]["mean"] == pytest.approx(statistics.mean(o.ended - o.due for o in done))
        tokens = sum(len(o.arrivals) if o.n_generated is None else 9 for o in done)
        assert found["generated_tokens"] == tokens
        if found["seconds"]:
            assert found["generated_tokens_per_second"] == pytest.approx(tokens / found["seconds"])
    timeline = found["timeline"]
    if timeline["bin_seconds"]:
        counted = sum(timeline["events_per_second"]) * timeline["bin_seconds"]
        assert counted == pytest.approx(sum(len(outcome.arrivals) for outcome in made))
        busy = sum(timeline["in_flight"]) * timeline["bin_seconds"]
        assert busy == pytest.approx(math.fsum(o.ended - o.sent for o in made), abs=1e-6)
