"""A writer killed at any moment, and a full disk: the last complete checkpoint is always found and intact."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modelworks.checkpoint import clean_leftovers, explain, latest_checkpoint, open_checkpoint, retain, write_checkpoint
from modelworks.config import ModelConfig, RunConfig

CONFIG = RunConfig(model=ModelConfig(n_layers=1, d_model=8, n_heads=2, vocab_size=8192, d_ff=16))
# Every system call of the sequence that changes the disk.
CALLS = ("mkdir", "write", "fsync", "rename", "replace", "unlink", "rmdir")


def write(directory: Path, step: int, value: float) -> None:
    tokenizer = directory.parent / "tokenizer.json"
    tokenizer.write_text("{}")
    sections = {"model": {"w": torch.full((64,), value), "b": torch.ones(3)}, "optimizer": {"w/m": torch.ones(9)}}
    write_checkpoint(
        directory,
        step=step,
        config=CONFIG,
        sections=sections,
        state={"loader": step},
        tokenizer=tokenizer,
        metrics={"val_loss": value},
        max_shard_bytes=100,
    )


def value_of(path: Path) -> float:
    checkpoint = open_checkpoint(path)
    checkpoint.verify()
    return float(dict(checkpoint.tensors("model"))["w"][0])


def killed_at(call_number: int, work: Callable[[], None]) -> bool:
    """Run `work` in a child that dies *before* its n-th call that changes the disk; whether it was killed."""
    child = os.fork()
    if child == 0:
        count = 0

        def counted(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **keywords: Any) -> Any:
                nonlocal count
                count += 1
                if count == call_number:
                    os._exit(99)
                return original(*arguments, **keywords)

            return call

        try:
            for name in CALLS:
                setattr(os, name, counted(getattr(os, name)))
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 99), "the child failed otherwise"
    return status == 99


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process loses no page cache: durability plays no part here, and syncing would take most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("step", [2, 1], ids=["new step", "replacing the same step"])
def test_killed_between_any_two_steps(tmp_path: Path, step: int) -> None:
    call_number, outcomes = 0, []
    while True:
        call_number += 1
        directory = tmp_path / f"{call_number}" / "checkpoints"
        directory.mkdir(parents=True)
        write(directory, 1, 1.0)
        killed = killed_at(call_number, lambda directory=directory: write(directory, step, 2.0))
        found = latest_checkpoint(directory)
        assert found is not None
        outcomes.append(value_of(found))
        for path in directory.glob("step-*"):
            assert explain(path) == [], "a visible checkpoint is complete"
        for path in directory.glob(".tmp-step-*"):
            assert explain(path), "an unfinished one says what it lacks"
        # The next writer sweeps up and goes on.
        write(directory, 3, 3.0)
        assert value_of(directory / "step-00000003") == 3.0
        assert (directory / "latest").read_text() == "step-00000003\n"
        assert [path.name for path in directory.iterdir() if path.name.startswith(".")] == []
        if not killed:
            break
    assert call_number > 20
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {1.0, 2.0}


@pytest.mark.usefixtures("no_waiting")
def test_killed_while_retaining(tmp_path: Path) -> None:
    call_number = 0
    while True:
        call_number += 1
        directory = tmp_path / f"{call_number}" / "checkpoints"
        directory.mkdir(parents=True)
        for step in (1, 2, 3):
            write(directory, step, float(step))
        killed = killed_at(call_number, lambda directory=directory: retain(directory, keep_last=1))
        for path in directory.glob("step-*"):
            assert explain(path) == []
        found = latest_checkpoint(directory)
        assert found is not None
        assert value_of(found) == 3.0
        retain(directory, keep_last=1)
        clean_leftovers(directory)
        assert sorted(path.name for path in directory.iterdir()) == ["latest", "step-00000003"]
        if not killed:
            break
    assert call_number > 5


def test_everything_is_durable_before_it_becomes_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Order of fsync and rename: a power cut cannot leave a visible checkpoint whose bytes were lost."""
    events: list[tuple[str, str]] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda fd: (events.append(("sync", os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd))
    )
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append(("rename", str(b))), rename(a, b)))
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append(("replace", str(b))), replace(a, b)))
    directory = tmp_path / "checkpoints"
    write(directory, 1, 1.0)
    renamed = events.index(("rename", str(directory / "step-00000001")))
    synced = {Path(path).relative_to(directory).parts[1:] for kind, path in events[:renamed] if kind == "sync"}
    files = {p.relative_to(directory).parts[1:] for p in (directory / "step-00000001").rglob("*")}
    assert synced == files | {()}  # every file, the tokeniser's directory and the directory itself
    before_manifest = [path for kind, path in events[:renamed] if kind == "sync"]
    assert before_manifest[-2].endswith("manifest.json")
    assert events[renamed + 1] == ("sync", str(directory))
    assert [kind for kind, _ in events[renamed + 2 :]] == ["sync", "replace", "sync"]


def test_a_full_disk_leaves_the_last_good_one(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    write(directory, 1, 1.0)
    size = 300  # bytes: less than the first tensor file takes
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        with pytest.raises(OSError):
            write(directory, 2, 2.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert sorted(path.name for path in directory.iterdir()) == ["latest", "step-00000001"]
    assert latest_checkpoint(directory) == directory / "step-00000001"


@pytest.mark.parametrize("step", [2, 1])
def test_a_disk_that_fills_at_any_write(tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    original, fail_at = os.write, 0
    while True:
        fail_at += 1
        count = 0

        def failing(descriptor: int, data: Any, fail_at: int = fail_at) -> int:
            nonlocal count
            count += 1
            if count >= fail_at:
                raise OSError(errno.ENOSPC, "No space left on device")
            return original(descriptor, data)

        directory = tmp_path / f"{fail_at}" / "checkpoints"
        directory.mkdir(parents=True)
        write(directory, 1, 1.0)
        monkeypatch.setattr(os, "write", failing)
        try:
            write(directory, step, 2.0)
            break
        except OSError:
            pass  # it propagates; what it leaves is checked below
        finally:
            monkeypatch.setattr(os, "write", original)
        assert [path.name for path in directory.iterdir() if path.name.startswith(".")] == []
        found = latest_checkpoint(directory)
        assert found is not None
        assert value_of(found) in (1.0, 2.0)
    assert fail_at > 8


def test_a_living_writer_is_left_alone(tmp_path: Path) -> None:
    living, dead = tmp_path / ".tmp-step-00000001-aa", tmp_path / ".tmp-step-00000002-bb"
    living.mkdir()
    dead.mkdir()
    descriptor = os.open(living, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    clean_leftovers(tmp_path)
    assert living.exists()
    assert not dead.exists()
    os.close(descriptor)
    clean_leftovers(tmp_path)
    assert not living.exists()


def test_explain_names_what_is_missing(tmp_path: Path) -> None:
    write(tmp_path / "checkpoints", 1, 1.0)
    path = tmp_path / "checkpoints" / "step-00000001"
    (path / "optimizer.safetensors").unlink()
    assert "optimizer.safetensors: missing" in explain(path)[0]
    (path / "manifest.json").unlink()
    lacks = " | ".join(explain(path))
    assert "manifest.json is missing" in lacks
    assert "present: manifest.crc32, model-00001-of-00002.safetensors" in lacks
    assert explain(tmp_path / "absent") == [f"{tmp_path / 'absent'} does not exist"]
