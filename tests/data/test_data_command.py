"""`modelworks data build` and `modelworks data inspect` as a user calls them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from modelworks.cli.main import main
from modelworks.config import DataConfig
from modelworks.data import open_dataset

Configs = Callable[..., DataConfig]


@pytest.fixture
def recipe(data_config: Configs, tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    model = {"family": "llama", "n_layers": 1, "d_model": 16, "n_heads": 2, "vocab_size": 512}
    data = data_config().model_dump(mode="json", exclude_defaults=True)
    path.write_text(yaml.safe_dump({"name": "x", "model": model, "data": data}))
    return str(path)


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    values: dict[str, object] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return values


def test_build_then_inspect(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "build", recipe, "--json"]) == 0
    built = last_line(capsys)
    assert built["reused"] is False
    assert main(["data", "build", recipe, "data.seq_len=32", "--json"]) == 0
    assert last_line(capsys)["reused"] is True
    directory = str(built["directory"])
    assert main(["data", "inspect", directory, "--verify", "--samples", "3", "--json"]) == 0
    shown = last_line(capsys)
    assert shown["streams"] == built["streams"]
    assert isinstance(shown["verified_files"], int)
    assert shown["verified_files"] >= 9
    samples = shown["samples"]
    assert isinstance(samples, list)
    assert len(samples) == 6
    assert main(["data", "inspect", directory]) == 0
    text = capsys.readouterr().out
    assert "bytes/token" in text
    assert samples[0]["text"].split("\n")[0] in text


def test_one_document_whole(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["data", "build", recipe, "--json"])
    built = last_line(capsys)
    directory, source = str(built["directory"]), open_dataset(Path(str(built["directory"]))).sources[0]
    assert main(["data", "inspect", directory, "--document", f"{source.name}:1", "--json"]) == 0
    samples = last_line(capsys)["samples"]
    assert isinstance(samples, list)
    [shown] = samples
    assert (shown["source"], shown["document"]) == (source.name, 1)
    tokenizer = open_dataset(Path(directory)).tokenizer
    assert shown["text"] == tokenizer.decode(source.train.document(1).tolist())
    for wrong, words in (
        ("nothing:1", f"expected a source and a number, as in `{source.name}:0`"),
        (source.name, "expected a source and a number"),
        (f"{source.name}:99999999", "training documents, numbered from 0; got 99999999"),
    ):
        assert main(["data", "inspect", directory, "--document", wrong]) == 2
        assert words in capsys.readouterr().err


def test_a_corrupt_shard_is_one_line_and_exit_code_2(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["data", "build", recipe, "--json"])
    directory = Path(str(last_line(capsys)["directory"]))
    shard = next(directory.rglob("tokens-00000.bin"))
    data = bytearray(shard.read_bytes())
    data[0] ^= 255
    shard.write_bytes(data)
    assert main(["data", "inspect", str(directory)]) == 0
    capsys.readouterr()
    assert main(["data", "inspect", str(directory), "--verify"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "corrupt" in said
    assert said.count("\n") == 1
    assert main(["data", "inspect", str(directory / "nothing")]) == 2
