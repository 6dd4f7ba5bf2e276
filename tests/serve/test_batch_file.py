"""Offline batches: every line gets its answer, whatever it says, and a cut run goes on where it was."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_engine import build_fake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelworks.config import UserError
from modelworks.serve.api import Service
from modelworks.serve.batch_file import BatchAnswers, count_requests, read_requests
from modelworks.serve.batch_run import OPTIONS, BatchCounts, EngineKeepsDying, run_batch
from modelworks.serve.supervisor import Supervisor


def line(custom_id: str, prompt: str = "hello", **body: Any) -> str:
    asked = {"prompt": prompt, "max_tokens": 4, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": asked})


CHAT = json.dumps(
    {
        "custom_id": "talk",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "model": "fake"},
    }
)
WRONG = {
    "{": "invalid_json",
    "[1]": "invalid_line",
    '{"custom_id": 3}': "invalid_line",
    line("x").replace("custom_id", "costum_id"): "invalid_line",
    line("y").replace('"method"', '"methud"'): "invalid_line",
    line("get").replace("POST", "GET"): "invalid_method",
    line("embed").replace("completions", "embeddings"): "invalid_url",
    line("streamed", stream=True): "invalid_line",
    line("first", "another"): "duplicate_custom_id",
}
REFUSED = {
    line("typo", temperatur=1): (400, "temperatur"),
    line("model", model="gpt-9"): (404, "model"),
    line("long", "a" * 300): (400, "prompt"),
    line("error", "!error"): (500, None),
}
GOOD = [line("first"), line("two", n=2, logprobs=1), CHAT, line("ü\ud800", "grüße")]


def run(source: Path, target: Path, *, process: bool = False, in_flight: int = 4, **fake: Any) -> BatchCounts:
    async def go() -> BatchCounts:
        engine = Supervisor(partial(build_fake, **fake), process=process, first_pause=0.01)
        answers = BatchAnswers(target)
        try:
            service = Service(await engine.start(), engine, OPTIONS)
            return await run_batch(engine, service, read_requests(source), answers, in_flight=in_flight)
        finally:
            answers.close()
            await engine.stop()

    return asyncio.run(go())


def answers_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_bytes().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A batch with every kind of line, and its answers."""
    folder = tmp_path_factory.mktemp("batch")
    source = folder / "asked.jsonl"
    source.write_text("\n".join([*GOOD, "", *WRONG, *REFUSED]) + "\n")
    counts = run(source, folder / "answers.jsonl")
    assert (counts.completed, counts.failed) == (len(GOOD), len(WRONG) + len(REFUSED))
    assert counts.generated_tokens == 4 + 8 + 3 + 4
    return source, (folder / "answers.jsonl").read_bytes()


def without_times(content: bytes) -> Counter[str]:
    """Answers as a bag, without what differs from run to run."""
    rows = [json.loads(text) for text in content.splitlines()]
    for row in rows:
        if row["response"] is not None:
            row["response"]["request_id"] = ""
            row["response"]["body"] |= {"id": "", "created": 0}
    return Counter(json.dumps(row) for row in rows)


def test_every_line_has_its_answer(whole: tuple[Path, bytes]) -> None:
    source, content = whole
    rows = [json.loads(text) for text in content.splitlines()]
    assert len(rows) == count_requests(source) == len(GOOD) + len(WRONG) + len(REFUSED)
    assert sorted(row["id"] for row in rows) == sorted(request.id for request in read_requests(source))
    responses = [(row["custom_id"], row["response"]) for row in rows if row["response"]]
    good = {name: response["body"] for name, response in responses if response["status_code"] == 200}
    assert good["first"]["choices"][0]["text"] == "hell"
    assert len(good["two"]["choices"]) == 2
    assert good["talk"]["choices"][0]["message"]["content"]
    assert "ü\ud800" in good
    assert Counter(row["error"]["code"] for row in rows if row["error"]) == Counter(WRONG.values())
    refused = [response for _, response in responses if response["status_code"] != 200]
    told = Counter((each["status_code"], each["body"]["error"]["param"]) for each in refused)
    assert told == Counter(REFUSED.values())
    assert "did you mean `temperature`?" in json.dumps(refused)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0.0, 1.0))
def test_a_cut_run_goes_on(whole: tuple[Path, bytes], tmp_path: Path, share: float) -> None:
    source, content = whole
    target = tmp_path / "answers.jsonl"
    target.write_bytes(content[: round(share * len(content))])
    kept = target.read_bytes().rpartition(b"\n")[0].count(b"\n") + (b"\n" in target.read_bytes())
    counts = run(source, target)
    assert counts.completed + counts.failed == content.count(b"\n") - kept
    assert target.read_bytes().startswith(content[: round(share * len(content))].rpartition(b"\n")[0])
    assert without_times(target.read_bytes()) == without_times(content)


def test_a_request_that_kills_engines_takes_no_others_with_it(tmp_path: Path) -> None:
    source, target = tmp_path / "asked.jsonl", tmp_path / "answers.jsonl"
    source.write_text("\n".join([line("a", "!slow"), line("b", "!die"), line("c", "!slow"), line("d")]))
    counts = run(source, target, process=True, in_flight=3)
    rows = {row["custom_id"]: row["response"] for row in answers_of(target)}
    assert {name: row["status_code"] for name, row in rows.items()} == {"a": 200, "b": 503, "c": 200, "d": 200}
    assert "the engine ended" in rows["b"]["body"]["error"]["message"]
    assert counts.errors == {"HTTP 503 engine_unavailable": 1}


def test_an_engine_that_is_given_up_ends_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelworks.serve.supervisor.RESTARTS", 0)
    source, target = tmp_path / "asked.jsonl", tmp_path / "answers.jsonl"
    source.write_text("\n".join([line("a"), line("b", "!raise"), line("c")]))
    with pytest.raises(EngineKeepsDying, match="RuntimeError: a defect"):
        run(source, target, in_flight=1)
    assert [row["custom_id"] for row in answers_of(target)] == ["a"]


def test_a_queue_that_is_full_is_waited_for(tmp_path: Path) -> None:
    source, target = tmp_path / "asked.jsonl", tmp_path / "answers.jsonl"
    source.write_text("\n".join([*(line(str(place)) for place in range(9)), line("never", "!full")]))
    counts = run(source, target, in_flight=8, max_waiting=2)
    assert counts.completed == 9
    assert counts.errors == {"HTTP 429 overloaded": 1}


def test_files_that_do_not_go_together(whole: tuple[Path, bytes], tmp_path: Path) -> None:
    source, content = whole
    target = tmp_path / "answers.jsonl"
    target.write_bytes(content)
    other = tmp_path / "other.jsonl"
    other.write_text(line("another"))
    answers = BatchAnswers(target)
    answers.check_against({request.id for request in read_requests(source)}, source)
    with pytest.raises(UserError, match=r"line 1: answers a request that .*other.jsonl does not have"):
        answers.check_against({request.id for request in read_requests(other)}, other)
    with pytest.raises(UserError, match="another batch is writing it"):
        BatchAnswers(target)
    answers.close()
    target.write_text("my diary\n")
    with pytest.raises(UserError, match="line 1: is not an answer of a batch, and would be lost"):
        BatchAnswers(target)
    assert target.read_text() == "my diary\n"
    BatchAnswers(target, overwrite=True).close()
    assert target.read_text() == ""
    with pytest.raises(UserError, match="cannot be read"):
        list(read_requests(tmp_path / "none.jsonl"))
