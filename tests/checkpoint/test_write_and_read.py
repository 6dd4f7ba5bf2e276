"""Round trips of our own format, and what a reader refuses."""

from __future__ import annotations

import json
import math
import shutil
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from modelworks.checkpoint import (
    Checkpoint,
    CheckpointError,
    best_checkpoint,
    explain,
    latest_checkpoint,
    open_checkpoint,
    retain,
    write_checkpoint,
)
from modelworks.checkpoint.formats.safetensors_files import SafetensorsFile, write_safetensors
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
    assert explain(path) == []


def test_shards_and_tied_weights(tmp_path: Path) -> None:
    weight = torch.randn(10, 10)
    model = {"embedding.weight": weight, "other": torch.randn(3, 3), "head.weight": weight}
    path = write(tmp_path, 1, sections={"model": model}, max_shard_bytes=300)
    assert sorted(p.name for p in path.glob("*.safetensors")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
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
    write_safetensors(directory / "ours", {n: (v.dtype, tuple(v.shape)) for n, v in values.items()}, values.__getitem__)
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


def edit_manifest(path: Path, **changes: object) -> None:
    manifest = json.loads((path / "manifest.json").read_text()) | changes
    text = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(text)
    (path / "manifest.crc32").write_text(f"{zlib.crc32(text):08x}\n")


def test_refusals(tmp_path: Path) -> None:
    good = write(tmp_path / "a", 1)

    def broken(name: str) -> Path:
        return Path(shutil.copytree(good, tmp_path / name))

    with pytest.raises(CheckpointError, match=r"not a checkpoint \(no manifest.json\)"):
        open_checkpoint(tmp_path)
    path = broken("newer")
    edit_manifest(path, version=2)
    with pytest.raises(CheckpointError, match=r"version 2 is newer.*upgrade"):
        open_checkpoint(path)
    path = broken("edited")
    (path / "manifest.json").write_text((path / "manifest.json").read_text().replace('"step": 1', '"step": 2'))
    with pytest.raises(CheckpointError, match="was changed after it was written"):
        open_checkpoint(path)
    path = broken("truncated")
    with (path / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(CheckpointError, match=r"model.safetensors: truncated"):
        open_checkpoint(path)
    path = broken("not json")
    (path / "manifest.json").write_bytes(b"\xff\x00")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        open_checkpoint(path)
    path = broken("deep")
    (path / "manifest.json").write_bytes(b'{"a":' + b"[" * 200_000)
    with pytest.raises(CheckpointError, match="not valid JSON"):
        open_checkpoint(path)


def test_a_flipped_byte_names_file_and_tensor(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    checkpoint = open_checkpoint(path)
    with pytest.raises(
        CheckpointError, match=r"model.safetensors: the checksum of tensor `model/blocks.3.weight` differs"
    ):
        checkpoint.verify()
    with pytest.raises(CheckpointError, match=r"blocks.3.weight"):
        checkpoint.load("model", {name: torch.zeros_like(v) for name, v in sections()["model"].items()})
    assert "checksum" in explain(path)[0]


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../outside", "..\\outside", "link"])
def test_files_outside_the_checkpoint_are_refused(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "run", 1)
    (tmp_path / "run" / "outside").write_text("x")
    (path / "link").symlink_to(tmp_path / "run" / "outside")
    edit_manifest(path, files={name: {"bytes": 1, "crc32": "00000000"}})
    with pytest.raises(CheckpointError, match="not inside the checkpoint"):
        open_checkpoint(path)


def test_impossible_tensors_are_refused_before_memory_is_taken(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    original = json.loads((path / "manifest.json").read_text())["tensors"]

    def change(piece: dict[str, object] | None = None, **fields: object) -> list[dict[str, object]]:
        tensor = json.loads(json.dumps(original[0])) | fields
        if piece:
            tensor["pieces"][0] |= piece
        return [tensor, *original[1:]]

    huge = [10**9, 10**9]
    for tensors, message in [
        (change(dtype="F99"), "unknown dtype"),
        (change(shape=huge), "do not cover"),
        (change(shape=huge, piece={"extent": huge, "offset": [0, 0]}), "cannot have"),
        (change(shape=huge, piece={"extent": huge, "offset": [0, 0], "bytes": 4 * 10**18}), "cannot have"),
        (change(piece={"file": "gone.safetensors"}), "not among"),
        (change(piece={"offset": [1, 0]}), "outside the shape"),
        (change(shape=[-8, -3]), "impossible shape"),
        (change(pieces=[original[0]["pieces"][0]] * 2), "do not cover"),
        (change(pieces=[]), "pieces"),
    ]:
        edit_manifest(path, tensors=tensors)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(path)


@pytest.mark.parametrize("step", [-1, 10**400, 1.5, None])
def test_impossible_steps_are_refused(tmp_path: Path, step: object) -> None:
    path = write(tmp_path, 1)
    edit_manifest(path, step=step)
    with pytest.raises(CheckpointError, match=r"step: .*corrupted"):
        open_checkpoint(path)


def test_pieces_are_put_together(tmp_path: Path) -> None:
    """The seam for sharded writers: a logical tensor in two pieces of two files reads as one."""
    path = write(tmp_path, 1, sections={"model": {"w": torch.zeros(1)}})
    value = torch.randn(4, 6)
    files, pieces = {}, []
    for index, part in enumerate((value[:, :2], value[:, 2:])):
        name = f"model.rank{index}.safetensors"
        written = write_safetensors(path / name, {"w": (part.dtype, tuple(part.shape))}, lambda _, part=part: part)
        files[name] = {"bytes": written.bytes, "crc32": f"{written.crc32:08x}"}
        size, crc32 = written.tensors["w"]
        pieces.append(
            {"file": name, "key": "w", "offset": [0, 2 * index], "extent": list(part.shape), "bytes": size}
            | {"crc32": f"{crc32:08x}"}
        )
    edit_manifest(
        path,
        files=files,
        tensors=[{"section": "model", "name": "w", "dtype": "F32", "shape": [4, 6], "pieces": pieces}],
    )
    checkpoint = open_checkpoint(path)
    checkpoint.verify()
    assert torch.equal(dict(checkpoint.tensors("model"))["w"], value)


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


def test_latest_falls_back_aloud(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "absent") is None
    for step in (1, 2, 3):
        write(tmp_path, step)
    data = bytearray((tmp_path / "step-00000003" / "optimizer.safetensors").read_bytes())
    data[-1] ^= 255
    (tmp_path / "step-00000003" / "optimizer.safetensors").write_bytes(data)
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    skipped: list[tuple[str, str]] = []
    found = latest_checkpoint(tmp_path, on_skip=lambda path, reason: skipped.append((path.name, reason)))
    assert found == tmp_path / "step-00000001"
    assert [name for name, _ in skipped] == ["step-00000003", "step-00000002"]
    assert "optimizer/blocks.3.weight" in skipped[0][1]
    assert "no manifest.json" in skipped[1][1]


def test_retention(tmp_path: Path) -> None:
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: math.nan, 50: 2.5, 60: 2.6}
    for step, loss in losses.items():
        write(tmp_path, step, metrics={"val_loss": loss})
    (tmp_path / "step-00000070").mkdir()  # incomplete: neither counted nor removed
    assert best_checkpoint(tmp_path, "val_loss", "min") == tmp_path / "step-00000020"
    assert best_checkpoint(tmp_path, "val_loss", "max") == tmp_path / "step-00000010"
    assert best_checkpoint(tmp_path, "accuracy", "max") is None
    removed = retain(
        tmp_path, keep_last=1, keep_every=30, best=("val_loss", "min"), protect=[tmp_path / "step-00000040"]
    )
    assert [path.name for path in removed] == ["step-00000010", "step-00000050"]
    left = sorted(path.name for path in tmp_path.glob("step-*"))
    assert left == [f"step-{step:08d}" for step in (20, 30, 40, 60, 70)]
    retain(tmp_path, keep_last=0)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000060"
