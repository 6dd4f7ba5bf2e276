"""What a reader refuses: damaged, incomplete, newer, of another model, or made to do harm. Each error says which file
(and tensor) and what to do."""

from __future__ import annotations

import json
import pickle
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from in_parts import SMALL_BLOCKS, shards_of, write_parts

from modelworks.checkpoint import (
    CheckpointError,
    CorruptedCheckpoint,
    load_model,
    open_checkpoint,
    open_storage,
    write_checkpoint,
)
from modelworks.checkpoint.checksums import digest
from modelworks.config import ModelConfig, RunConfig, parameter_shapes

VERSION_1 = Path(__file__).parent / "fixtures" / "version-1" / "step-00000003"
FILE = "rank-00000.safetensors"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A good checkpoint of two ranks: `a` in rows on both, `b` on the first, `c` on the second."""
    a, b, c = torch.randn(8, 3), torch.randn(5), torch.randn(2, 2)
    rows = shards_of("a", a, [[0, 4, 8], [0, 3]])
    ranks = [[rows[0], *shards_of("b", b, [[0, 5]])], [rows[1], *shards_of("c", c, [[0, 2], [0, 2]])]]
    return write_parts(open_storage(tmp_path / "checkpoints"), ranks).local()  # type: ignore[return-value]


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest as someone would who knows how to sign it."""
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    text = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(text)
    (path / "manifest.checksum").write_text(f"{digest(text)}\n")


def edit_file(path: Path, change: Callable[[bytearray], Any]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def refused(path: Path, message: str, kind: type[CheckpointError] = CorruptedCheckpoint) -> None:
    """Opening or reading it fails with the message, without a traceback into our code."""
    with pytest.raises(CheckpointError, match=message) as error:
        open_checkpoint(path).verify()
    assert type(error.value) is kind, error.value


def test_no_checkpoint_or_a_newer_one(path: Path, tmp_path: Path) -> None:
    refused(tmp_path, r"not a checkpoint \(no manifest.json\)", CheckpointError)
    refused(tmp_path / "absent", r"not a checkpoint", CheckpointError)
    edit(path, lambda manifest: manifest.update(version=3))
    refused(path, r"format version 3 is newer than this Modelworks reads \(2\); upgrade", CheckpointError)
    for version in (0, -1, "2", None, True):
        edit(path, lambda manifest, version=version: manifest.update(version=version))
        refused(path, "does not exist", CheckpointError)
    edit(path, lambda manifest: manifest.update(format="other", version=2))
    refused(path, "not a modelworks-checkpoint manifest", CheckpointError)


def test_of_another_model_or_vocabulary(path: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"another model: `a` has shape \[8, 3\], expected \[9, 3\]"):
        checkpoint.expect("model", {"a": (9, 3), "b": (5,), "c": (2, 2)})
    small = ModelConfig(n_layers=1, d_model=8, n_heads=2, vocab_size=300, max_seq_len=32)
    large = small.model_copy(update={"vocab_size": 400})
    weights = {name: torch.zeros(shape) for name, shape in parameter_shapes(small).items()}
    run = RunConfig.model_validate({"model": large, "data": {"seq_len": 32, "tokenizer": {"vocab_size": 400}}})
    lying = write_checkpoint(
        tmp_path / "run", step=1, config=run, sections={"model": weights}, state={}, tokenizer=None
    )
    with pytest.raises(CheckpointError, match=r"`embedding.weight` has shape \[300, 8\], expected \[400, 8\]"):
        load_model(str(lying))


def test_damaged_manifests(path: Path) -> None:
    original = (path / "manifest.json").read_bytes()
    for text, message in [
        (original.replace(b'"step":1', b'"step":2'), "manifest.json: was changed after it was written"),
        (original[:-20], "manifest.json: not valid JSON"),
        (b"\xff\x00", "not valid JSON"),
        (b'{"a":' + b"[" * 200_000, "not valid JSON"),
        (b'{"a":1,"a":2}', "a key appears twice"),
    ]:
        (path / "manifest.json").write_bytes(text)
        refused(path, message)
    (path / "manifest.json").write_bytes(original)
    (path / "manifest.checksum").unlink()
    refused(path, "manifest.checksum: missing; the checkpoint is incomplete; use another checkpoint")


def test_changed_truncated_missing_and_swapped_files(path: Path) -> None:
    def fresh() -> Path:
        copy = path.parent / f"copy-{len(list(path.parent.iterdir()))}"
        return Path(shutil.copytree(path, copy))

    advice = ".*; use another checkpoint, or copy this one again"
    broken = fresh()
    edit_file(broken / FILE, lambda data: data.__setitem__(-1, data[-1] ^ 1))
    refused(
        broken, rf"{FILE}: the checksum of tensor `model/b` differs \(block 0\): bytes on disk have changed{advice}"
    )
    broken = fresh()
    edit_file(broken / FILE, lambda data: data.__setitem__(20, data[20] ^ 1))
    refused(broken, rf"{FILE}: its header is not the one that was written{advice}")
    broken = fresh()
    edit_file(broken / FILE, lambda data: data.pop())
    refused(broken, rf"{FILE}: truncated \([\d,]+ bytes, expected [\d,]+\){advice}")
    edit_file(broken / FILE, lambda data: data.extend(b"12"))
    refused(broken, rf"{FILE}: too long")
    (broken / FILE).unlink()
    refused(broken, rf"{FILE}: missing; the checkpoint is incomplete{advice}")
    broken = fresh()
    one, two = broken / FILE, broken / "rank-00001.safetensors"
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    refused(broken, rf"{FILE}: (truncated|too long|its header)")


def test_files_of_one_size_that_were_swapped(tmp_path: Path) -> None:
    rows = shards_of("a", torch.randn(8, 3), [[0, 4, 8], [0, 3]])
    path = write_parts(open_storage(tmp_path), [rows[:1], rows[1:]]).local()
    one, two = path / FILE, path / "rank-00001.safetensors"
    first, second = one.read_bytes(), two.read_bytes()
    assert len(first) == len(second)
    one.write_bytes(second)
    two.write_bytes(first)
    refused(path, rf"{FILE}: the checksum of tensor `model/a` differs")


def test_damage_after_it_was_opened(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    edit_file(path / FILE, lambda data: data.pop())
    with pytest.raises(CorruptedCheckpoint, match=rf"{FILE}: .* bytes, expected"):
        checkpoint.tensor("model", "a")
    checkpoint.tensor("model", "c")  # the other file is whole


def test_a_damaged_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    config = RunConfig(model=ModelConfig(n_layers=1, d_model=8, n_heads=2, vocab_size=8192))
    path = write_checkpoint(
        tmp_path / "run", step=1, config=config, sections={}, state={}, tokenizer=tmp_path / "tokenizer.json"
    )
    (Path(path) / "tokenizer" / "tokenizer.json").write_text("[]")
    refused(Path(path), r"tokenizer/tokenizer.json: its checksum differs from the manifest")
    with pytest.raises(CorruptedCheckpoint, match=r"tokenizer\.json"):
        _ = open_checkpoint(path).tokenizer


@pytest.mark.parametrize("directory", ["../../other", "/etc", "", "."])
def test_a_tokenizer_that_lies_outside(tmp_path: Path, directory: str) -> None:
    """Files that the manifest does not list are not checked, so they are not read either."""
    (tmp_path / "tokenizer.json").write_text("{}")
    config = RunConfig(model=ModelConfig(n_layers=1, d_model=8, n_heads=2, vocab_size=8192))
    path = Path(
        write_checkpoint(
            tmp_path / "run", step=1, config=config, sections={}, state={}, tokenizer=tmp_path / "tokenizer.json"
        )
    )
    edit(path, lambda manifest: manifest["tokenizer"].update(directory=directory))
    with pytest.raises(CheckpointError, match="not inside the checkpoint"):
        _ = open_checkpoint(path).tokenizer
    edit(path, lambda manifest: manifest["tokenizer"].update(directory="elsewhere"))
    with pytest.raises(CorruptedCheckpoint, match="lists no file of its tokeniser"):
        _ = open_checkpoint(path).tokenizer


def test_one_that_was_renamed(path: Path) -> None:
    """Under a later step's name a run would go on from it again and again, whatever it saves."""
    other = path.rename(path.with_name("step-00000009"))
    refused(
        other, "step-00000009: is the checkpoint of step 1, by its manifest, and was renamed; name it step-00000001"
    )
    assert open_checkpoint(other.rename(path.with_name("kept for the paper"))).step == 1


@pytest.mark.parametrize("magic", ["zip", "pickle", "gguf"])
def test_a_pickle_in_disguise(path: Path, magic: str) -> None:
    """Also where whoever made it signs it in the manifest; nothing in it is ever run."""
    if magic == "zip":
        torch.save({"a": torch.ones(8, 3)}, path / FILE)
    elif magic == "pickle":
        (path / FILE).write_bytes(pickle.dumps({"a": [1.0] * 24}))
    else:
        (path / FILE).write_bytes(b"GGUF" + bytes(200))
    size = (path / FILE).stat().st_size
    edit(path, lambda manifest: manifest["files"][0].update(bytes=size))
    what = {"zip": "a zip archive", "pickle": "a pickle", "gguf": "a GGUF file"}[magic]
    refused(path, rf"{FILE}: not a safetensors file but {what}.*, which is not read")


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../outside", "..\\outside", "link", "", "a//b"])
def test_names_that_lead_outside(path: Path, name: str) -> None:
    (path.parent / "outside").write_text("x")
    (path / "link").symlink_to(path.parent / "outside")
    entry = {"name": name, "bytes": 1, "header": None, "checksum": None}
    edit(path, lambda manifest: manifest["files"].append(entry))
    refused(path, "not inside the checkpoint", CheckpointError)


def test_links(path: Path, tmp_path: Path) -> None:
    """A shard that is a link out is refused; a whole checkpoint behind a link is as good as itself."""
    shutil.copy(path / FILE, tmp_path / "elsewhere")
    (path / FILE).unlink()
    (path / FILE).symlink_to(tmp_path / "elsewhere")
    refused(path, "not inside the checkpoint", CheckpointError)
    (path / FILE).unlink()
    shutil.copy(tmp_path / "elsewhere", path / FILE)
    (tmp_path / "link").symlink_to(path)
    open_checkpoint(tmp_path / "link").verify()


def tensor(manifest: dict[str, Any], **fields: Any) -> None:
    manifest["tensors"][0].update(fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "F99"}, "unknown dtype"),
        ({"dtype": 4}, "unknown dtype"),
        ({"shape": [10**9, 10**9]}, "cuts do not rise from 0 to 1000000000"),
        ({"shape": [10**9, 10**9], "cuts": [[0, 5 * 10**8, 10**9], [0, 10**9]]}, "larger than the file"),
        ({"shape": [10**30, 3], "cuts": [[0, 4, 10**30], [0, 3]]}, "impossible shape"),
        ({"shape": [-8, 3]}, "impossible shape"),
        ({"shape": [8.0, 3]}, "impossible shape"),
        ({"shape": "83"}, "its shape is no list"),
        ({"shape": [8, 3] + [1] * 70}, "its shape is no list"),
        ({"cuts": [[0, 4, 8]]}, "cuts are not one list for each"),
        ({"cuts": [[0, 4, 4, 8], [0, 3]]}, "do not rise"),
        ({"cuts": [[0, 9, 8], [0, 3]]}, "do not rise"),
        ({"cuts": [[4, 8], [0, 3]]}, "do not rise"),
        ({"cuts": [[], [0, 3]]}, "do not rise"),
        ({"cuts": [[0, 4.0, 8], [0, 3]]}, "whole numbers"),
        ({"cuts": [[0, 2, 4, 8], [0, 3]]}, "make 3 pieces"),
        ({"cuts": [list(range(9)), [0, 1, 2, 3]]}, "make 24 pieces"),
        ({"files": [0, 7]}, "not among"),
        ({"files": [0, -1]}, "not among"),
        ({"files": [0, 2**70]}, "make 2 pieces"),
        ({"files": [0, "1"]}, "make 2 pieces"),
        ({"files": [0, 0]}, "two of its pieces lie in one file"),
        ({"checksums": ["0" * 16, "0" * 15]}, "not 16 hexadecimal digits for each block"),
        ({"checksums": ["0" * 16, "0" * 15 + "G"]}, "not 16 hexadecimal digits"),
        ({"checksums": ["0" * 16, 5]}, "are no text"),
        ({"checksums": ["0" * 16]}, "make 2 pieces"),
        ({"section": None}, "tensors.0: has no section and name"),
        ({"name": "b"}, "model/b`: appears twice"),
        ({"key": 4}, "its key is no text"),
        ({"key": "model/b"}, "shares the key 'model/b' with model/a, but not its pieces"),
        ({"key": "model/other"}, "header does not hold tensor `model/a` as the manifest describes it"),
        ({"dtype": "I32"}, "header does not hold tensor"),
        ({"cuts": [[0, 3, 8], [0, 3]]}, "header does not hold tensor"),
    ],
)
def test_impossible_tensors_are_refused_before_memory_is_taken(
    path: Path, fields: dict[str, Any], message: str
) -> None:
    edit(path, lambda manifest: tensor(manifest, **fields))
    refused(path, message)


def test_files_too_short_for_all_that_they_shall_hold(path: Path) -> None:
    def more(manifest: dict[str, Any]) -> None:
        manifest["tensors"] += [{**manifest["tensors"][0], "name": f"more{index}"} for index in range(9)]

    edit(path, more)
    refused(path, "its files are too short for all")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"step": -1}, "step: "),
        ({"step": 10**400}, "step: "),
        ({"step": 1.5}, "step: "),
        ({"step": None}, "step: "),
        ({"checksum": "md5"}, "checksum: "),
        ({"block_bytes": 1}, "block_bytes: "),
        ({"block_bytes": 2**40}, "block_bytes: "),
        ({"tensors": {}}, "tensors: "),
        ({"tensors": [5]}, "tensors.0: has no section and name"),
        ({"files": [{"name": FILE}]}, "files.0.bytes: "),
        ({"files": [{"name": FILE, "bytes": -1}]}, "files.0.bytes: "),
        ({"state": []}, "state: "),
    ],
)
def test_impossible_manifests(path: Path, fields: dict[str, Any], message: str) -> None:
    edit(path, lambda manifest: manifest.update(fields))
    refused(path, message)


def test_a_file_listed_twice(path: Path) -> None:
    edit(path, lambda manifest: manifest["files"].append(manifest["files"][0]))
    refused(path, "lists a file twice")


def test_a_model_with_more_layers_than_tensors(path: Path) -> None:
    edit(path, lambda manifest: manifest["model"].update(n_layers=1000))
    with pytest.raises(CheckpointError, match=r"claims 1,000 layers, but lists 3 tensors"):
        _ = open_checkpoint(path).model_config


def test_keys_of_later_versions_are_ignored(path: Path) -> None:
    edit(path, lambda manifest: manifest.update(later=1) or tensor(manifest, later=2))
    open_checkpoint(path).verify()


@pytest.mark.parametrize("position", [0, 1, 4096, 9000, -1])
def test_a_flipped_bit_anywhere(tmp_path: Path, position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelworks.checkpoint.formats.safetensors_files.XXH3", SMALL_BLOCKS)
    monkeypatch.setattr("modelworks.checkpoint.commit.XXH3", SMALL_BLOCKS)
    value = torch.zeros(4000)
    path = write_parts(open_storage(tmp_path), [shards_of("w", value, [[0, 4000]])]).local()
    edit_file(path / FILE, lambda data: data.__setitem__(position, data[position] ^ 8))
    refused(path, FILE)


def test_version_1_still_loads() -> None:
    """A checkpoint that the code of its time wrote: weights, optimiser state, numbers, tokeniser."""
    checkpoint = open_checkpoint(VERSION_1)
    assert checkpoint.verify() == sum(t.piece_bytes().sum() for t in checkpoint.manifest.tensors) + 3
    assert checkpoint.step == 3
    assert checkpoint.state == {"updates": 3, "loss": float("inf")}
    assert checkpoint.metrics == {"val_loss": 2.25}
    assert checkpoint.layout["world_size"] == 1
    assert checkpoint.config.name == "version-1"
    checkpoint.expect("model", parameter_shapes(checkpoint.model_config))
    for index, (name, shape) in enumerate(parameter_shapes(checkpoint.model_config).items()):
        expected = (torch.arange(torch.Size(shape).numel()).reshape(shape) % 17 - 8 + index / 4).float() / 16
        assert torch.equal(checkpoint.tensor("model", name), expected), name
        assert torch.equal(checkpoint.tensor("optimizer", f"{name}/exp_avg"), expected / 2)
    assert torch.equal(
        checkpoint.slice("model", "embedding.weight", [(3, 9), (2, 5)]),
        checkpoint.tensor("model", "embedding.weight")[3:9, 2:5],
    )
    assert (checkpoint.tokenizer / "tokenizer.json").read_text() == "{}\n"  # type: ignore[operator]
    assert checkpoint.sections() == ["model", "optimizer", "routing"]


def test_what_is_refused_of_version_1(tmp_path: Path) -> None:
    def broken(change: Callable[[dict[str, Any]], Any]) -> Path:
        path = Path(shutil.copytree(VERSION_1, tmp_path / str(len(list(tmp_path.iterdir())))))
        manifest = json.loads((path / "manifest.json").read_text())
        change(manifest)
        text = json.dumps(manifest).encode()
        (path / "manifest.json").write_bytes(text)
        (path / "manifest.crc32").write_text(f"{zlib.crc32(text):08x}\n")
        return path

    def piece(**fields: Any) -> Callable[[dict[str, Any]], Any]:
        return lambda manifest: manifest["tensors"][0]["pieces"][0].update(fields)

    for change, message in [
        (piece(crc32="00000000"), r"the checksum of tensor `model/embedding.weight` differs"),
        (piece(file="gone"), "not among"),
        (piece(offset=[1, 0]), "outside the shape"),
        (piece(bytes=4), "cannot have"),
        (piece(extent=[10**9, 10**9], bytes=4 * 10**18), "cannot have"),
        (lambda manifest: tensor(manifest, shape=[-1, 2]), "impossible shape"),
        (lambda manifest: tensor(manifest, shape=[301, 8]), "do not cover"),
        (lambda manifest: tensor(manifest, dtype="F99"), "unknown dtype"),
        (lambda manifest: manifest["tensors"].append(manifest["tensors"][0]), "appears twice"),
        (lambda manifest: manifest["files"].pop("routing.safetensors"), "not among"),
    ]:
        refused(broken(change), message)
    path = broken(lambda manifest: manifest["files"].update({"../x": {"bytes": 1, "crc32": "0" * 8}}))
    refused(path, "not inside", CheckpointError)
    path = broken(lambda manifest: None)
    (path / "manifest.crc32").unlink()
    refused(path, "manifest.crc32: missing")
    path = broken(lambda manifest: None)
    edit_file(path / "routing.safetensors", lambda data: data.__setitem__(-1, data[-1] ^ 1))
    refused(path, r"routing.safetensors: the checksum of tensor `routing/extra` differs")


@pytest.mark.parametrize("value", ["x", [1.0], {"non_finite": [1]}, {}, None, True, 10**400])
def test_metrics_that_are_no_numbers(path: Path, value: Any) -> None:
    edit(path, lambda manifest: manifest["metrics"].update(val_loss=value))
    refused(path, "metrics: Value error, `val_loss` is no number")


@pytest.mark.parametrize("key", ["state", "layout", "config", "model", "metrics"])
def test_nested_too_deep_for_what_walks_through_it(path: Path, key: str) -> None:
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"a": deep}
    edit(path, lambda manifest: manifest.update({key: deep}))
    refused(path, f"{key}: Value error, nested more than 64 levels deep")


def test_a_file_name_that_no_disk_can_hold(path: Path) -> None:
    edit(path, lambda manifest: manifest["files"][0].update(name="\ud800"))
    refused(path, "not inside the checkpoint", CheckpointError)
