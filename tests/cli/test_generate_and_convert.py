"""The commands `generate` and `convert`, on a tiny model with a tokeniser trained here."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from modelworks.checkpoint import load_model, write_model
from modelworks.cli.main import main
from modelworks.config import ModelConfig, TokenizerTraining
from modelworks.data.tokenizers.training import train_tokenizer
from modelworks.models import Sampling, Transformer, generate, initialize

TEXT = ["def main():\n    print('größer')\n", "class Fox:\n    pass\n", "one two three four five six seven"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(TEXT * 20, TokenizerTraining(vocab_size=300))
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    tokenizer.save(directory / "tokenizer")
    config = ModelConfig(
        n_layers=1, d_model=16, n_heads=2, vocab_size=tokenizer.vocab_size, max_seq_len=48, init_std=0.5
    )
    transformer = Transformer(config)
    initialize(transformer, seed=3)
    tensors = dict(transformer.named_parameters())
    return write_model(
        directory / "m", config=config, tensors=tensors, tokenizer=directory / "tokenizer", origin="test"
    )


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_greedy_equals_the_library(call: Any, model: Path) -> None:
    loaded = load_model(str(model))
    assert loaded.tokenizer is not None
    ids = loaded.tokenizer.encode_prompt("def main")
    expected = list(generate(loaded.model, ids, Sampling(temperature=0.0), loaded.eos_ids, 12))
    code, out, _ = call("generate", model, "--prompt", "def main", "--max-tokens", "12", "--greedy", "--json")
    assert code == 0
    result = json.loads(out.splitlines()[-1])
    assert result["token_ids"] == expected
    assert result["text"] == loaded.tokenizer.decode(expected)
    assert result["prompt_tokens"] == len(ids)
    assert result["tokens"] == len(expected)
    assert result["tokens_per_second"] > 0


def test_streams_text_to_stdout_and_the_rest_to_stderr(call: Any, model: Path) -> None:
    code, out, err = call("generate", model, "--prompt", "class Fox", "--max-tokens", "10", "--seed", "5")
    _, json_out, _ = call("generate", model, "--prompt", "class Fox", "--max-tokens", "10", "--seed", "5", "--json")
    assert code == 0
    assert out == json.loads(json_out)["text"] + "\n"
    assert "temperature 0.8, top-p 0.95, seed 5" in err
    assert "tokens/s" in err
    assert "dtype fp32: the default on" in err


def test_options_reach_the_sampler(call: Any, model: Path) -> None:
    arguments = ["--temperature", "1.5", "--top-k", "20", "--top-p", "0.9", "--min-p", "0.01"]
    arguments += ["--repetition-penalty", "1.3", "--seed", "7", "--max-tokens", "8"]
    _, out, _ = call("generate", model, "--prompt", "one two", *arguments, "--json")
    loaded = load_model(str(model))
    assert loaded.tokenizer is not None
    sampling = Sampling(temperature=1.5, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.3, seed=7)
    expected = list(generate(loaded.model, loaded.tokenizer.encode_prompt("one two"), sampling, loaded.eos_ids, 8))
    assert json.loads(out)["token_ids"] == expected


def test_prompt_from_stdin_and_chat(call: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one two"))
    _, piped, _ = call("generate", model, "--prompt", "-", "--max-tokens", "5", "--json")
    _, given, _ = call("generate", model, "--prompt", "one two", "--max-tokens", "5", "--json")
    assert json.loads(piped)["token_ids"] == json.loads(given)["token_ids"]
    _, chat, _ = call("generate", model, "--prompt", "hi", "--chat", "--max-tokens", "5", "--json")
    loaded = load_model(str(model))
    assert loaded.tokenizer is not None
    assert json.loads(chat)["prompt_tokens"] == len(loaded.tokenizer.encode("<user>hi<assistant>"))


def test_stops_when_the_context_is_full(call: Any, model: Path) -> None:
    _, out, _ = call("generate", model, "--prompt", "one", "--max-tokens", "1000", "--seed", "1", "--json")
    result = json.loads(out)
    full = result["prompt_tokens"] + result["tokens"] == 48
    assert result["stopped_by"] == ("the model's context is full" if full else "end of text")
    code, _, err = call("generate", model, "--prompt", "1 2 3 4 5 6 7 8 9 " * 20)
    assert code == 2
    assert "max_seq_len is 48" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "fp23"], "did you mean `fp32`?"),
        (["--device", "tpu"], "--device: got 'tpu'"),
        (["--max-tokens", "0"], "--max-tokens: got 0"),
        (["--top-p", "1.5"], "top_p: got 1.5"),
        (["--greedy", "--top-k", "3"], "--greedy draws nothing"),
    ],
)
def test_mistakes(call: Any, model: Path, arguments: list[str], message: str) -> None:
    code, _, err = call("generate", model, "--prompt", "x", *arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_no_model_of_that_name(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call("generate", "nowhere", "--prompt", "x", "--json")
    assert code == 2
    assert "no such model" in err
    assert json.loads(out)["exit_code"] == 2


def test_convert_there_and_back(call: Any, model: Path, tmp_path: Path) -> None:
    code, out, err = call("convert", model, tmp_path / "hf", "--to", "hf", "--max-shard-size", "20KB", "--json")
    assert code == 0
    result = json.loads(out.splitlines()[-1])
    assert result["max_difference"] == 0.0
    assert result["path"] == str(tmp_path / "hf")
    assert "logits read back" in err
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    assert (tmp_path / "hf" / "tokenizer.json").is_file()
    assert call("convert", tmp_path / "hf", tmp_path / "own", "--to", "modelworks", "--dtype", "bf16")[0] == 0
    weights = load_model(str(tmp_path / "own"), dtype=torch.bfloat16).model.embedding.weight
    assert torch.equal(weights, load_model(str(model)).model.embedding.weight.bfloat16())
    first = call("generate", model, "--prompt", "one", "--greedy", "--max-tokens", "9", "--json")[1]
    second = call("generate", tmp_path / "hf", "--prompt", "one", "--greedy", "--max-tokens", "9", "--json")[1]
    assert json.loads(first)["text"] == json.loads(second)["text"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "gguf"], "--to: got 'gguf', expected hf or modelworks"),
        (["--to", "hf", "--dtype", "bf61"], "did you mean `bf16`?"),
        (["--to", "hf", "--max-shard-size", "big"], "expected a size with a unit"),
        (["--to", "hf", "--max-shard-size", "0B"], "expected a size such as 4GiB"),
    ],
)
def test_convert_mistakes(call: Any, model: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    code, _, err = call("convert", model, tmp_path / "out", *arguments)
    assert code == 2
    assert message in err
    assert not (tmp_path / "out").exists()


def test_convert_refuses_an_existing_destination(call: Any, model: Path, tmp_path: Path) -> None:
    assert call("convert", model, tmp_path / "out", "--to", "hf")[0] == 0
    code, _, err = call("convert", model, tmp_path / "out", "--to", "hf")
    assert code == 2
    assert "exists already" in err
    assert call("convert", model, tmp_path / "out", "--to", "hf", "--overwrite")[0] == 0


def test_a_prompt_that_is_no_text_is_one_line(call: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = call("generate", model, "--prompt", "a\udcffb")  # what Python makes of the byte 0xff
    assert (code, err) == (2, "error: --prompt: not UTF-8 text\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8"))
    code, _, err = call("generate", model, "--prompt", "-")
    assert (code, err) == (2, "error: --prompt -: stdin is not UTF-8 text (byte 1)\n")


def test_a_place_that_cannot_be_written_is_one_line(call: Any, model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = call("convert", model, tmp_path / "file" / "hf", "--to", "hf")
    assert (code, err) == (2, f"error: {tmp_path}/file/hf: cannot be written (File exists)\n")
