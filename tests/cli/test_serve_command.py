"""`modelworks serve` as a user starts it: a real (tiny) model, a real process, signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest

from modelworks.checkpoint import load_model, write_model
from modelworks.cli.main import main
from modelworks.cli.serve import served_name
from modelworks.config import ModelConfig, TokenizerTraining
from modelworks.data.tokenizers.training import train_tokenizer
from modelworks.models import Sampling, Transformer, generate, initialize

TEXT = ["def main(argument):\n    return argument + 1\n", "the cat sat on a mat and the dog ran over it\n"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("served")
    tokenizer = train_tokenizer(TEXT * 20, TokenizerTraining(vocab_size=300))
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    tokenizer.save(directory / "tokenizer")
    config = ModelConfig(
        n_layers=2, d_model=32, n_heads=4, n_kv_heads=2, vocab_size=tokenizer.vocab_size, max_seq_len=128, init_std=0.3
    )
    transformer = Transformer(config)
    initialize(transformer, seed=3)
    tensors = dict(transformer.named_parameters())
    return write_model(
        directory / "tiny", config=config, tensors=tensors, tokenizer=directory / "tokenizer", origin="test"
    )


@dataclass
class Running:
    process: subprocess.Popen[str]
    ready: dict[str, Any]

    @property
    def url(self) -> str:
        return str(self.ready["url"])


def start(model: Path, *options: str) -> Running:
    command = [sys.executable, "-m", "modelworks", "serve", str(model), "--port", "0", "--json", "--kv-cache", "1MiB"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the server ended with {process.wait(10)}"
    return Running(process, json.loads(line))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    running = start(model, "--native", "off", "--max-model-len", "96")
    yield running
    running.process.kill()
    running.process.wait()
    assert running.process.stdout is not None
    running.process.stdout.close()


def test_it_says_what_it_serves(server: Running) -> None:
    assert server.ready["model"] == "tiny"
    assert server.ready["max_model_len"] == 96
    assert server.ready["sampling_defaults"] == {}
    assert any("1.00 MiB" in fact for fact in server.ready["facts"]), "how memory was divided"
    assert psutil.Process(server.ready["engine_pid"]).ppid() == server.process.pid
    libraries = [each.path for each in psutil.Process(server.process.pid).memory_maps()]
    assert not any("libtorch" in path for path in libraries), "the front is light"


def test_greedy_equals_the_library(server: Running, model: Path) -> None:
    loaded = load_model(str(model))
    assert loaded.tokenizer is not None
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        for prompt in ("def main", "the cat sat on", "x"):
            ids = loaded.tokenizer.encode_prompt(prompt)
            expected = list(generate(loaded.model, ids, Sampling(temperature=0.0), loaded.eos_ids, 20))
            answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=20, temperature=0)
            kept = [token for token in expected if token not in loaded.eos_ids]
            assert answer.choices[0].text == loaded.tokenizer.decode([*ids, *kept])[len(loaded.tokenizer.decode(ids)) :]
        stream = client.completions.create(model="tiny", prompt="x", max_tokens=20, temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == answer.choices[0].text


def test_a_seed_gives_the_same_whatever_else_runs(server: Running) -> None:
    body = {"prompt": "the cat", "max_tokens": 24, "seed": 7, "temperature": 1.0}
    with httpx2.Client(base_url=server.url, timeout=30) as http:
        alone = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        several = http.post("/v1/completions", json={**body, "prompt": ["the cat", "def", "the cat", "dog"]}).json()
    texts = [choice["text"] for choice in several["choices"]]
    assert texts[0] == texts[2] == alone


def test_output_of_a_form(server: Running) -> None:
    with httpx2.Client(base_url=server.url, timeout=30) as http:
        body = {"prompt": "the cat", "max_tokens": 40, "seed": 1, "n": 2}
        choices = http.post(
            "/v1/completions", json={**body, "structured_outputs": {"choice": ["yes!", "no (not)"]}}
        ).json()
        assert {choice["text"] for choice in choices["choices"]} <= {"yes!", "no (not)"}
        assert {choice["finish_reason"] for choice in choices["choices"]} == {"stop"}
        schema = {
            "type": "object",
            "properties": {"a": {"enum": [1, 22]}},
            "required": ["a"],
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
        found = http.post("/v1/completions", json={**body, "response_format": form}).json()["choices"][0]["text"]
        assert json.loads(found)["a"] in (1, 22)
        for field, value in (
            ("structured_outputs", {"regex": "a|("}),
            ("structured_outputs", {"grammar": "start: ???"}),
            ("response_format", {"type": "json_schema", "json_schema": {"name": "f", "schema": {"type": "nothing"}}}),
        ):
            wrong = http.post("/v1/completions", json={**body, field: value})
            assert wrong.status_code == 400, wrong.text
            assert wrong.json()["error"]["param"] == field


def test_a_prefix_that_is_cached_is_told(server: Running) -> None:
    body = {"prompt": "the cat sat on a mat and the dog ran over it" * 3, "max_tokens": 2, "temperature": 0}
    with httpx2.Client(base_url=server.url, timeout=30) as http:
        cold, hot = (http.post("/v1/completions", json=body).json() for _ in range(2))
    assert cold["choices"][0]["text"] == hot["choices"][0]["text"]
    assert hot["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16


@pytest.mark.slow
def test_two_ranks_answer_alike_and_the_death_of_one_is_told(server: Running, model: Path) -> None:
    body = {"prompt": "the cat", "max_tokens": 20, "temperature": 0}
    expected = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=30).json()["choices"][0]["text"]
    split = start(model, "--tp", "2", "--max-model-len", "96")
    try:
        with httpx2.Client(base_url=split.url, timeout=60) as http:
            assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == expected
            (rank,) = psutil.Process(split.ready["engine_pid"]).children()
            rank.kill()
            lost = http.post("/v1/completions", json=body)
            assert lost.status_code == 500
            assert "rank 1 was killed" in lost.json()["error"]["message"]
            while (health := http.get("/health").json())["engine"] == "running":
                assert split.process.poll() is None
            assert "rank 1 was killed" in health["error"]
    finally:
        split.process.terminate()
        split.process.wait(30)
        assert split.process.stdout is not None
        split.process.stdout.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--port", "70000"], "--port"),
        (["--tp", "0"], "--tp"),
        (["--prompt-stall", "0.5"], "--prompt-stall"),
        (["--dtype", "bf61"], "did you mean `bf16`"),
        (["--kv-cache", "much"], "--kv-cache"),
        (["--grace", "-1"], "grace"),
        (["--max-running", "600"], "max_running"),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert main(["serve", "no-such-model", *options]) == 2
    assert words in capsys.readouterr().err


def test_a_port_in_use_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", "no-such-model", "--port", str(taken.getsockname()[1])]) == 2
    assert "is in use" in capsys.readouterr().err


def test_what_cannot_be_served_is_told(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    assert main(["serve", "no-such-model", "--in-process", "--port", "0"]) == 2
    assert "no-such-model" in capsys.readouterr().err
    config = load_model(str(model)).config
    tensors = dict(load_model(str(model)).model.named_parameters())
    mute = write_model(tmp_path / "mute", config=config, tensors=tensors, tokenizer=None, origin="test")
    assert main(["serve", str(mute), "--in-process", "--port", "0"]) == 2
    assert "no tokeniser" in capsys.readouterr().err


def test_names_are_never_paths() -> None:
    names = [served_name(text) for text in ("runs/my-run@best", "/models/tiny.gguf", "/models/hf/", "..")]
    assert names[:3] == ["my-run", "tiny", "hf"]
    assert all("/" not in name for name in names)


def test_sigterm_ends_it_well_and_leaves_nothing(server: Running) -> None:
    """The last of its tests: it ends the server."""
    engine = psutil.Process(server.ready["engine_pid"])
    with httpx2.stream(
        "POST",
        f"{server.url}/v1/completions",
        json={"prompt": "x", "max_tokens": 90, "ignore_eos": True, "stream": True},
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2]
    assert server.process.wait(30) == 0
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
