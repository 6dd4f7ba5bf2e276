"""Every kind of storage keeps the same promises: paths, `file://`, `memory://` and `s3://`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from in_parts import CONFIG, numbers, shards_of, write_parts

from modelworks.checkpoint import (
    CheckpointError,
    open_checkpoint,
    open_storage,
    write_checkpoint,
)
from modelworks.checkpoint.checksums import digest
from modelworks.checkpoint.storage import Folder, Storage, is_url

WEIGHT = numbers([6, 50])


def shards(factor: float = 1.0) -> list[Any]:
    rows = shards_of("w", WEIGHT * factor, [[0, 2, 6], [0, 50]])
    return [rows[:1], [*rows[1:], *shards_of("b", torch.ones(3), [[0, 3]], section="optimizer")]]


def holds(folder: Folder, factor: float = 1.0) -> bool:
    checkpoint = open_checkpoint(folder)
    checkpoint.verify()
    return torch.equal(checkpoint.tensor("model", "w"), WEIGHT * factor)


def test_written_and_read(any_storage: Storage) -> None:
    assert any_storage.checkpoints() == []
    for step in (2, 10, 1):
        assert holds(write_parts(any_storage, shards(), step=step, state={"loader": step}))
    names = ["step-00000001", "step-00000002", "step-00000010"]
    assert any_storage.checkpoints() == names
    folder = any_storage.folder("step-00000010")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.state == {"loader": 10}
    assert checkpoint.layout["world_size"] == 2
    assert torch.equal(checkpoint.slice("model", "w", [(1, 3), (7, 9)]), WEIGHT[1:3, 7:9])
    assert [name.rpartition(".")[2] for name in folder.list()] == ["checksum", "json", "safetensors", "safetensors"]
    assert folder.label == f"{any_storage.label}/step-00000010"
    open_checkpoint(folder.label).verify()
    assert open_checkpoint(folder.label).step == 10


def test_reading_files(any_storage: Storage) -> None:
    folder = write_parts(any_storage, shards())
    text = folder.read("manifest.json", 0, 1 << 20)
    assert folder.size("manifest.json") == len(text) == folder.sizes()["manifest.json"]
    assert folder.read("manifest.json", 3, 4) == text[3:7]
    assert folder.read("manifest.json", 3, 0) == b""
    buffer = bytearray(5)
    assert folder.read_into("manifest.json", 1, memoryview(buffer)) == 5
    assert bytes(buffer) == text[1:6]
    assert folder.size("absent") is None
    with pytest.raises(OSError):
        folder.read("absent", 0, 1)
    for name in ("../step-00000001/manifest.json", "/etc/passwd", "", "a//b", "./manifest.json", "a\\b", "a\0b"):
        with pytest.raises(CheckpointError, match="not inside the checkpoint"):
            folder.size(name)


def test_the_same_step_again_replaces(any_storage: Storage) -> None:
    before = write_parts(any_storage, shards(1.0)).list()
    folder = write_parts(any_storage, shards(2.0))
    assert holds(folder, 2.0)
    assert len(folder.list()) == len(before)
    assert any_storage.checkpoints() == ["step-00000001"]


def test_what_is_not_committed_is_not_there(any_storage: Storage) -> None:
    write_parts(any_storage, shards(1.0))
    for name in ("step-00000001", "step-00000002"):
        attempt = any_storage.begin(name)
        writing = any_storage.writing(attempt)
        file_name = writing.file_name("rank-00000", ".safetensors")
        with writing.create(file_name) as file:
            file.write(b"half")
        assert writing.read(file_name) == b"half"
        assert writing.size(file_name) == 4
        assert holds(any_storage.folder("step-00000001"))
        any_storage.abort(attempt)
        assert writing.read(file_name) is None
        assert writing.size(file_name) is None
        writing.remove(file_name)  # not there any more, and that is fine
        assert holds(any_storage.folder("step-00000001"))
    assert any_storage.checkpoints() == ["step-00000001"]


def test_a_dead_writers_files_are_swept_by_the_next(any_storage: Storage) -> None:
    write_parts(any_storage, shards(1.0))
    for name in ("step-00000001", "step-00000003"):
        left = open_storage(any_storage.label)  # another writer, that is never heard of again
        writing = left.writing(left.begin(name))
        with writing.create(writing.file_name("rank-00000", ".safetensors")) as file:
            file.write(b"half")
        for descriptor in getattr(left, "_locks", {}).values():
            __import__("os").close(descriptor)  # as the system does when a process dies
    assert holds(any_storage.folder("step-00000001"))
    write_parts(any_storage, shards(2.0), step=4)
    write_parts(any_storage, shards(3.0), step=1)
    assert any_storage.checkpoints() == ["step-00000001", "step-00000004"]
    assert holds(any_storage.folder("step-00000001"), 3.0)
    assert len(any_storage.folder("step-00000001").list()) == 4


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000-01234567.safetensors"])
def test_a_file_that_fails_leaves_nothing(any_storage: Storage, name: str) -> None:
    """And what failed comes through as it was raised."""

    class Failed(Exception):
        pass

    def fail() -> None:
        with writing.create(name) as file:
            file.write(b"half")
            raise Failed

    attempt = any_storage.begin("step-00000001")
    writing = any_storage.writing(attempt)
    with pytest.raises(Failed):
        fail()
    any_storage.abort(attempt)
    assert any_storage.checkpoints() == []
    assert any_storage.folder("step-00000001").list() == []


def test_an_attempt_whose_manifest_is_there_is_complete(any_storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is renamed, whoever dies or gives up after the manifest leaves a whole checkpoint."""
    if "://" not in any_storage.label:
        pytest.skip("on a disk the renaming decides")
    write_parts(any_storage, shards(1.0))
    with monkeypatch.context() as patch:
        patch.setattr(type(any_storage), "commit", lambda self, attempt: (_ for _ in ()).throw(OSError("gone")))
        with pytest.raises(OSError, match="gone"):
            write_parts(any_storage, shards(2.0))
    folder = any_storage.folder("step-00000001")
    assert holds(folder, 2.0)
    attempt = next(name for name in folder.list() if name.endswith(".safetensors"))[:-12].rpartition("-")[2]
    any_storage.abort(f"step-00000001-{attempt}")
    checksums = folder.read("manifest.checksum", 0, 100).decode().split()
    manifest = folder.read("manifest.json", 0, 1 << 20)
    assert checksums[0] == digest(manifest)
    assert len(checksums) == 2
    write_parts(any_storage, shards(3.0))
    assert holds(folder, 3.0)
    assert len(folder.list()) == 4


def test_removing(any_storage: Storage) -> None:
    for step in (1, 2):
        write_parts(any_storage, shards(), step=step)
    any_storage.point_latest("step-00000002")
    any_storage.remove("step-00000001")
    assert any_storage.checkpoints() == ["step-00000002"]
    assert any_storage.folder("step-00000001").list() == []
    assert holds(any_storage.folder("step-00000002"))


def test_one_process_writes_anywhere(any_storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    where = write_checkpoint(
        any_storage.label,
        step=7,
        config=CONFIG,
        sections={"model": {"w": WEIGHT}},
        state={},
        tokenizer=tmp_path / "tokenizer.json",
    )
    checkpoint = open_checkpoint(where)
    assert torch.equal(checkpoint.tensor("model", "w"), WEIGHT)
    assert checkpoint.verify() == WEIGHT.nbytes + 2
    assert isinstance(where, str) == is_url(any_storage.label)
    assert checkpoint.path == where
    assert checkpoint.tokenizer is not None
    assert (checkpoint.tokenizer / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3x://bucket/run", r"no storage is known by the scheme `s3x` \(did you mean `s3(a|n)?://`\?\)"),
        ("nowhere://run", "no storage is known by the scheme `nowhere`"),
    ],
)
def test_urls_that_cannot_be_used(url: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_storage(url)


def test_a_bucket_that_is_not_there(s3_bucket: str) -> None:
    storage = open_storage("s3://no-such-bucket/run")
    assert storage.checkpoints() == []
    with pytest.raises(OSError):
        write_parts(storage, shards())
    assert storage.checkpoints() == []


def test_a_server_that_is_gone_is_an_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the package behind a URL raises."""
    import fsspec

    storage = open_storage("memory://gone/checkpoints")

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("connection lost")

    for name in ("open", "pipe_file", "ls"):
        monkeypatch.setattr(fsspec.filesystem("memory"), name, fail)
    with pytest.raises(OSError, match=r"memory://gone/checkpoints: RuntimeError: connection lost"):
        storage.checkpoints()
    for name in ("manifest.json", "rank-00000.safetensors"):
        with pytest.raises(OSError, match="connection lost"), storage.writing("step-00000001-01234567").create(name):
            pass
