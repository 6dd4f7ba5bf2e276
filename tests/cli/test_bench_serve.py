"""`modelworks bench-serve` as a user meets it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))
sys.path.insert(0, str(Path(__file__).parents[1] / "report"))

from page_checks import check_page
from scripted_server import scripted_server

from modelworks.cli.main import main


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with scripted_server() as server:
        yield server.url


def test_a_closed_loop(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "load.html"
    arguments = ["bench-serve", url, "--concurrency", "4", "--requests", "12", "--shared-words", "50"]
    assert main([*arguments, "--extra", '{"ignore_eos": true}', "--html", str(page), "--json"]) == 0
    said = capsys.readouterr()
    values = json.loads(said.out.strip().splitlines()[-1])
    assert (values["completed"], values["generated_tokens"], values["model"]) == (12, 120, "scripted")
    assert values["time_to_first_token"]["p99"] > 0
    assert "12 of 12 requests (4 in flight)" in said.err
    assert "% cached" in said.err
    checked = check_page(page)
    assert checked.tags.count("svg") == 3
    assert "4 requests in flight" in checked.text


def test_an_open_loop_where_some_fail(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked, page = tmp_path / "asked.jsonl", tmp_path / "load.html"
    asked.write_text('{"prompt": "refuse"}\n{"prompt": "well"}\n')
    arguments = ["bench-serve", url, "--rate", "100", "--requests", "6", "--prompts", str(asked), "--warmup", "0"]
    assert main([*arguments, "--html", str(page)]) == 0
    said = capsys.readouterr().out
    assert "failed: 3 x HTTP 429 overloaded: queue is full" in said
    assert "3 of 6 requests (100 a second, open loop)" in said
    assert "queue is full" in check_page(page).text


def test_nothing_but_failures_is_a_failure(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked, page = tmp_path / "asked.jsonl", tmp_path / "load.html"
    asked.write_text('{"prompt": "refuse"}\n')
    arguments = ["bench-serve", url, "--requests", "2", "--prompts", str(asked), "--html", str(page), "--json"]
    assert main(arguments) == 1
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1])["time_to_first_token"] is None
    check_page(page)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["localhost:8000"], "URL: got 'localhost:8000', expected one such as http://127.0.0.1:8000"),
        (["http://127.0.0.1:1"], "is the server running there?"),
        (["{url}", "--model", "none"], "--model: got 'none', the server has scripted, other"),
        (["{url}", "--rate", "2", "--concurrency", "2"], "does not go with --concurrency"),
        (["{url}", "--rate", "0"], "--rate: got 0"),
        (["{url}", "--concurrency", "0"], "--concurrency: got 0"),
        (["{url}", "--words", "9-3"], "--words: got '9-3'"),
        (["{url}", "--words", "100000000"], "expected at least the 100,000,000 of one prompt"),
        (["{url}", "--extra", "[]"], "--extra: got [], expected a JSON object"),
        (["{url}", "--seconds", "-1"], "--seconds: got -1"),
        (["{url}", "--prompts", "no-such.jsonl"], "no-such.jsonl: cannot be read"),
        (["{url}", "--prompts", "x.jsonl", "--text", "x.txt"], "does not go with --text"),
        (["{url}", "--html", "."], "--html: . is a directory"),
    ],
)
def test_mistakes(url: str, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench-serve", *(word.format(url=url) for word in arguments)]) == 2
    assert says in capsys.readouterr().err
