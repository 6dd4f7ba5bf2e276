"""Round trips of our own format, and what a reader refuses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from modelworks.checkpoint import (
    Checkpoint,
    CheckpointError,
    open_checkpoint,
    write_checkpoint,
)
from modelworks.checkpoint.formats.safetensors_files import SafetensorsFile, write_safetensors
from modelworks.checkpoint.local_storage import LocalWritable
from modelworks.config import ModelConfig, RunConfig

CONFIG = RunConfig(model=ModelConfig(n_layers=2, d_model=8, n_heads=2, vocab_size=8192, d_ff=16))


def sections(seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    model = {f"blocks.{i}.weight": torch.randn(8, 3 + i, generator=generator) for i in range(4)}
    return {"model": model, "optimizer": {f"{name}/exp_avg": 2 * value for name, value in model.items()}}


def write(directory: Path, step: int, seed: int = 0, **changes: object) -> Path:
    arguments = {"config": CONFIG, "sections": sections(seed), "state": {"loader": step}, "tokenizer": None}
    return write_checkpoint(directory, step=step, **(arguments | changes))  # type: ignore[arg-type]


def assert_holds(checkpoint: Checkpoint, seed: int = 0) -> None:
    for section, expected in sections(seed).items():
        found = dict(checkpoint.tensors(section))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_round_trip(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tok"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    state = {"loader": 7, "loss": float("inf"), "window": [0.1, float("nan")], "rate": 1 / 3}
    path = write(tmp_path / "checkpoints", 7, state=state, tokenizer=tokenizer, metrics={"val_loss": math.nan})
    checkpoint = open_checkpoint(path)
    checkpoint.verify()
    assert path.name == "step-00000007"
    assert checkpoint.step == 7
    assert checkpoint.config == CONFIG
    assert checkpoint.model_config == CONFIG.model
    assert checkpoint.state["rate"] == 1 / 3
    assert checkpoint.state["loss"] == math.inf
    assert math.isnan(checkpoint.state["window"][1])
    assert math.isnan(checkpoint.metrics["val_loss"])
    assert checkpoint.tokenizer is not None
    assert (checkpoint.tokenizer / "tokenizer.json").read_text() == "{}"
    assert checkpoint.sections() == ["model", "optimizer"]
    assert_holds(checkpoint)
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000007\n"
    checkpoint.verify()


def test_shards_and_tied_weights(tmp_path: Path) -> None:
    weight = torch.randn(10, 10)
    model = {"embedding.weight": weight, "other": torch.randn(3, 3), "head.weight": weight}
    path = write(tmp_path, 1, sections={"model": model}, max_shard_bytes=300)
    assert sorted(p.name for p in path.glob("*.safetensors")) == ["rank-00000-2.safetensors", "rank-00000.safetensors"]
    assert sum(p.stat().st_size for p in path.glob("*.safetensors")) < 400 + 36 + 400
    found = dict(open_checkpoint(path).tensors("model"))
    assert all(torch.equal(found[name], model[name]) for name in model)


def test_every_dtype_and_odd_shapes(tmp_path: Path) -> None:
    from modelworks.checkpoint.formats.safetensors_files import DTYPES

    values = {name: torch.arange(6).reshape(2, 3).to(dtype) for name, dtype in DTYPES.items()}
    values |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "view": torch.arange(12.0).reshape(3, 4).T}
    path = write(tmp_path, 1, sections={"model": values})
    found = dict(open_checkpoint(path).tensors("model"))
    for name, value in values.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name].float(), value.float())


@settings(max_examples=30, deadline=None)
@given(shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_files_agree_with_the_safetensors_library(
    shapes: list[list[int]], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("st")
    generator = torch.Generator().manual_seed(seed)
    dtypes = [torch.float64, torch.bfloat16, torch.float32]
    values = {f"t{i}": torch.randn(s, generator=generator).to(dtypes[i % 3]) for i, s in enumerate(shapes)}
    with LocalWritable(directory).create("ours") as file:
        write_safetensors(file, list(values.items()))
    theirs = load_file(directory / "ours")
    save_file(values, directory / "theirs")
    ours = SafetensorsFile(directory / "theirs")
    assert theirs.keys() == ours.tensors.keys() == values.keys()
    for name, value in values.items():
        assert torch.equal(theirs[name], value)
        assert torch.equal(ours.read(name), value)


def test_the_same_step_again_replaces(tmp_path: Path) -> None:
    write(tmp_path, 5, seed=0)
    path = write(tmp_path, 5, seed=1)
    assert_holds(open_checkpoint(path), seed=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000005"]


def test_strict_loading_names_what_does_not_match(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, 1))
    targets = {name: torch.zeros_like(value) for name, value in sections()["model"].items()}
    checkpoint.load("model", targets)
    assert torch.equal(targets["blocks.0.weight"], sections()["model"]["blocks.0.weight"])
    wrong = {**targets, "blocks.1.weight": torch.zeros(2, 2), "head.weight": torch.zeros(1)}
    del wrong["blocks.3.weight"]
    with pytest.raises(CheckpointError) as error:
        checkpoint.load("model", wrong)
    text = str(error.value)
    assert "another model" in text
    assert "`blocks.1.weight` has shape [8, 4], expected [2, 2]" in text
    assert "`head.weight` is missing" in text
    assert "`blocks.3.weight` is not in the model" in text


def test_corrupted_safetensors_headers(tmp_path: Path) -> None:
    def header(text: bytes, data: bytes = b"", claim: int | None = None) -> Path:
        path = tmp_path / "file.safetensors"
        path.write_bytes((len(text) if claim is None else claim).to_bytes(8, "little") + text + data)
        return path

    entry = b'{"a":{"dtype":"F32","shape":[%s],"data_offsets":[%s]}}'
    for path, message in [
        (lambda: header(b"{}", claim=2**62), "header claims"),
        (lambda: header(b"[]"), "expected a JSON object"),
        (lambda: header(b'{"a":1'), "not valid JSON"),
        (lambda: header(b'{"a":{},"a":{}}'), "appears twice"),
        (lambda: header(entry % (b"2", b"0,8"), b"1234"), "truncated"),
        (lambda: header(entry % (b"9999999999999", b"0,8"), b"12345678"), "does not fill"),
        (lambda: header(entry % (b"2", b"4,12"), b"123456789012"), "expected 0"),
        (lambda: header(entry % (b"-2", b"0,8"), b"12345678"), "whole numbers"),
        (lambda: header(entry % (b"2", b"0,8"), b"12345678extra"), "belong to no tensor"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            SafetensorsFile(path())
    short = tmp_path / "short"
    short.write_bytes(b"123")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        SafetensorsFile(short)
