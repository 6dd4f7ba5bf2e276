"""Saves of one process and of many: what is written, what training may do meanwhile, and how failures are told."""

from __future__ import annotations

import errno
import os
import resource
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import WorkerPool
from saving_jobs import identity, save, save_not_finite, save_to_slow_storage, saved_step, shards_of

from modelworks.checkpoint import Outcome, Retention, Saver, open_checkpoint
from modelworks.checkpoint.faults import at_each_point
from modelworks.checkpoint.part import is_finite
from modelworks.checkpoint.staging import Staging
from modelworks.checkpoint.storage import open_storage
from modelworks.layout import Layout
from modelworks.parallel import single_process

CPU = torch.device("cpu")
MESH = single_process(CPU)


def visible(where: Path) -> list[str]:
    return sorted(path.name for path in where.iterdir())


def saved(saver: Saver, step: int, **named: Any) -> Outcome:
    saver.begin(step, shards_of(MESH, step), identity(step, **named))
    outcome = saver.wait()
    assert outcome is not None
    return outcome


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_one_process(tmp_path: Path, background: bool, scheme: str) -> None:
    where = f"{scheme}{tmp_path}/checkpoints"
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    storage = open_storage(where)
    saver = Saver(MESH, storage, background=background)
    for step in (3, 5):
        shards = shards_of(MESH, step)
        size = sum(shard.bytes for shard in shards)
        begun = saver.begin(step, shards, identity(step, tokenizer=tokenizer))
        assert (begun.staged, begun.live) == ((size, 0) if background else (0, size))
        assert begun.buffer >= begun.staged
        for shard in shards:
            shard.tensor.fill_(torch.nan)  # training goes on, and must not reach the snapshot
        outcome = saver.wait()
        assert outcome is not None
        assert (outcome.step, outcome.error, outcome.warning, outcome.removed) == (step, None, None, [])
        assert outcome.where == f"{where}/step-{step:08d}"
        assert outcome.total_bytes == outcome.bytes > size
        assert outcome.stall_seconds == begun.stall_seconds
        assert saved_step(storage, f"step-{step:08d}") == step
        checkpoint = open_checkpoint(storage.folder(f"step-{step:08d}"))
        assert (checkpoint.step, checkpoint.metrics) == (step, {"val_loss": 10.0 - step})
        found = checkpoint.tokenizer
        assert found is not None
        assert (found / "tokenizer.json").read_text() == "{}"
    assert storage.checkpoints() == ["step-00000003", "step-00000005"]


LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2, "pp": 2},
    {"dp_shard": 3, "zero": 3},
    {"dp_replicate": 2, "dp_shard": 2, "zero": 1},
]


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_ranks_of_a_layout_write_one_model(tmp_path: Path, workers: WorkerPool, parallel: dict[str, Any]) -> None:
    degrees = {key: value for key, value in parallel.items() if key != "zero"}
    layout = Layout(**degrees)
    by_rank = workers.run(save, layout, str(tmp_path), parallel, [1, 2], timeout=60.0)
    for outcomes in zip(*by_rank, strict=True):
        assert len({outcome["where"] for outcome in outcomes}) == 1
        assert {outcome["error"] for outcome in outcomes} == {None}
        assert {outcome["total_bytes"] for outcome in outcomes} == {sum(outcome["bytes"] for outcome in outcomes)}
        assert all(outcome["bytes"] > 0 for outcome in outcomes)
    storage = open_storage(tmp_path)
    assert [saved_step(storage, name) for name in storage.checkpoints()] == [1, 2]
    assert visible(tmp_path) == ["latest", "step-00000001", "step-00000002"]
    files = visible(tmp_path / "step-00000001")
    shards = [f"rank-{rank:05d}.safetensors" for rank in range(layout.world_size)]
    assert files == ["manifest.checksum", "manifest.json", *shards]
    assert open_checkpoint(tmp_path / "step-00000001").layout["world_size"] == layout.world_size


FAILURES = [
    ("before a shard file", "ENOSPC", "rank 1: No space left on device"),
    ("shard file written", "EIO", "rank 1: Input/output error"),
    ("before the part file", "EACCES", "rank 1: Permission denied"),
    ("between two tensors", "vanished", "No such file or directory"),
]


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize(("point", "kind", "words"), FAILURES)
def test_a_rank_that_fails_fails_the_save_for_all(
    tmp_path: Path, workers: WorkerPool, point: str, kind: str, words: str, background: bool
) -> None:
    layout = {"dp_replicate": 2, "tp": 2}
    fails = (1, 2, point, kind)
    by_rank = workers.run(save, Layout(**layout), str(tmp_path), layout, [1, 2, 3], fails=fails, background=background)
    told = [[outcome["error"] for outcome in outcomes] for outcomes in by_rank]
    first, failed, last = told[0]
    assert (first, last) == (None, None)
    assert words in failed
    assert all(errors == told[0] for errors in told)
    assert {outcomes[1]["where"] for outcomes in by_rank} == {None}
    storage = open_storage(tmp_path)
    assert [saved_step(storage, name) for name in storage.checkpoints()] == [1, 3]
    assert visible(tmp_path) == ["latest", "step-00000001", "step-00000003"]


FIRST_RANK = [
    "before the storage is opened",
    "storage opened",
    "parts read",
    "before the manifest",
    "before the commit",
]


@pytest.mark.parametrize("point", FIRST_RANK)
def test_the_first_rank_that_fails_tells_the_others(tmp_path: Path, workers: WorkerPool, point: str) -> None:
    layout = {"dp_replicate": 2}
    by_rank = workers.run(save, Layout(**layout), str(tmp_path), layout, [1, 2, 3], fails=(0, 2, point, "ENOSPC"))
    assert [[outcome["error"] for outcome in outcomes] for outcomes in by_rank] == [
        [None, "rank 0: No space left on device", None]
    ] * 2
    storage = open_storage(tmp_path)
    assert [saved_step(storage, name) for name in storage.checkpoints()] == [1, 3]


def test_what_one_machine_cannot_see_of_another(tmp_path: Path, workers: WorkerPool) -> None:
    """As where every machine has a disk of its own under that path."""
    layout = {"dp_replicate": 2}
    fails = (1, 1, "part file durable", "not shared")
    [one, other] = workers.run(save, Layout(**layout), str(tmp_path), layout, [1], fails=fails)
    assert one[0]["error"] == other[0]["error"]
    assert "rank-00001.safetensors is not there, but rank 1 wrote" in one[0]["error"]
    assert "a directory that all machines share?" in one[0]["error"]
    assert visible(tmp_path) == []


def test_weights_that_are_not_finite_are_refused_by_all(tmp_path: Path, workers: WorkerPool) -> None:
    name = "blocks.1.feed_forward.up.weight"
    outcomes = workers.run(save_not_finite, Layout(tp=2), str(tmp_path), name)
    assert [outcome["error"] for outcome in outcomes] == [f"rank 1: the weights are not finite any more ({name})"] * 2
    assert visible(tmp_path) == []


def test_storage_that_hangs_keeps_nobody(tmp_path: Path, workers: WorkerPool) -> None:
    layout = Layout(dp_replicate=3)
    assert workers.run(save_to_slow_storage, layout, str(tmp_path)) == [[None, None, None, True, None, False]] * 3
    assert saved_step(open_storage(tmp_path), "step-00000001") == 1


def test_a_save_in_flight(tmp_path: Path) -> None:
    writes, goes_on = threading.Event(), threading.Event()

    def hold(point: str) -> None:
        if point == "before a shard file":
            writes.set()
            goes_on.wait()

    saver = Saver(MESH, open_storage(tmp_path), background=True)
    assert saver.poll() is None
    assert saver.wait() is None
    with at_each_point(hold):
        saver.begin(1, shards_of(MESH, 1), identity(1))
        assert saver.in_flight
        while not writes.is_set():
            assert saver.poll() is None
        assert saver.wait(limit=0.01) is None
        with pytest.raises(RuntimeError, match="a save is in flight"):
            saver.begin(2, shards_of(MESH, 2), identity(2))
        assert visible(tmp_path)[0].startswith(".tmp-step-00000001-")
        goes_on.set()
        outcome = None
        while outcome is None:
            outcome = saver.poll()
    assert outcome.where == str(tmp_path / "step-00000001")
    assert not saver.in_flight


def test_what_does_not_fit_is_written_before_training_goes_on(tmp_path: Path) -> None:
    shards = shards_of(MESH, 1)
    size, limit = sum(shard.bytes for shard in shards), 4000
    saver = Saver(MESH, open_storage(tmp_path), background=True, staging_limit=limit)
    written: list[str] = []
    with at_each_point(written.append):
        begun = saver.begin(1, shards, identity(1))
        assert "shard file durable" in written
        for shard in shards:
            shard.tensor.fill_(torch.nan)
        outcome = saver.wait()
    assert begun.buffer <= limit
    assert begun.staged + begun.live == size
    assert 0 < begun.staged <= limit
    assert outcome is not None
    assert outcome.error is None
    assert saved_step(open_storage(tmp_path), "step-00000001") == 1


def test_staging_memory_is_used_again() -> None:
    staging = Staging(CPU)
    shards = shards_of(MESH, 1)
    first = staging.take(shards).staged
    places = [shard.tensor.data_ptr() for shard in first]
    assert all(place % 64 == 0 for place in places)
    for shard in shards:
        shard.tensor.mul_(2)
    second = staging.take(shards).staged
    assert [shard.tensor.data_ptr() for shard in second] == places
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(second, shards, strict=True))
    transposed = [shard for shard in shards_of(MESH, 2) if shard.tensor.dim() == 2]
    copies = staging.take(transposed).staged  # other shards: other views of the same buffer
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(copies, transposed, strict=True))


@pytest.mark.gpu
def test_staging_memory_of_a_device_is_page_locked() -> None:
    device = torch.device("cuda")
    shards = [replace(shard, tensor=shard.tensor.to(device)) for shard in shards_of(MESH, 1)]
    staging = Staging(device)
    for factor in (1.0, 3.0):
        for shard in shards:
            shard.tensor.mul_(factor)
        expected = [shard.tensor.cpu() for shard in shards]
        copies = staging.take(shards).staged
        for shard in shards:
            shard.tensor.fill_(torch.nan)
        torch.cuda.synchronize()
        assert all(torch.equal(copy.tensor, value) for copy, value in zip(copies, expected, strict=True))
        assert all(copy.tensor.is_pinned() for copy in copies if copy.tensor.numel())
        for shard, value in zip(shards, expected, strict=True):
            shard.tensor.copy_(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_finite(dtype: torch.dtype) -> None:
    values = torch.arange(-50.0, 50.0).to(dtype)
    assert is_finite(values)
    for bad in [torch.nan] if dtype == torch.float8_e4m3fn else [torch.nan, torch.inf, -torch.inf]:
        for place in (0, 57, 99):
            broken = values.float()
            broken[place] = bad
            assert not is_finite(broken.to(dtype))
    assert is_finite(torch.zeros(0))
    assert is_finite(torch.tensor([2**62]))


def test_memory_that_is_not_there_for_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = Saver(MESH, open_storage(tmp_path), background=True)
    with monkeypatch.context() as patched:
        patched.setattr(Staging, "take", lambda self, shards: (_ for _ in ()).throw(MemoryError()))
        outcome = saved(saver, 1)
    assert outcome.error is not None
    assert outcome.error.startswith("no memory to copy the state into")
    assert saved(saver, 2).error is None
    assert visible(tmp_path) == ["latest", "step-00000002"]


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcome = saved(Saver(MESH, open_storage(tmp_path / "file" / "checkpoints"), background=True), 1)
    assert outcome.error is not None
    assert "Not a directory" in outcome.error


def test_a_full_disk(tmp_path: Path) -> None:
    """A real limit of the system, met in the middle of a file."""
    storage = open_storage(tmp_path)
    saver = Saver(MESH, storage, background=True)
    assert saved(saver, 1).error is None
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:
        outcome = saved(saver, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert outcome.error == "File too large"
    assert visible(tmp_path) == ["latest", "step-00000001"]
    assert saved(saver, 3).error is None


def test_what_fails_after_the_commit_is_a_warning(tmp_path: Path) -> None:
    def fail(point: str) -> None:
        if point == "before latest moves":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with at_each_point(fail):
        outcome = saved(Saver(MESH, open_storage(tmp_path), background=True), 1)
    assert outcome.error is None
    assert outcome.warning is not None
    assert "Read-only file system" in outcome.warning
    assert saved_step(open_storage(tmp_path), "step-00000001") == 1


def test_old_ones_are_removed_after_a_save(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    saver = Saver(MESH, storage, background=True, retention=Retention(storage, keep_last=2))
    assert [saved(saver, step).removed for step in (1, 2, 3, 4)] == [[], [], ["step-00000001"], ["step-00000002"]]
    assert storage.checkpoints() == ["step-00000003", "step-00000004"]


def test_old_ones_are_removed_where_latest_cannot_move(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    storage = open_storage(tmp_path)
    saver = Saver(MESH, storage, background=True, retention=Retention(storage, keep_last=1))
    first, second = saved(saver, 1), saved(saver, 2)
    assert (first.removed, second.removed) == ([], ["step-00000001"])
    assert "the checkpoint is complete, but `latest` could not be moved: Is a directory" in str(second.warning)


def test_everything_is_durable_before_it_becomes_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Order of fsync and rename: a power cut cannot leave a visible checkpoint whose bytes were lost."""
    events: list[tuple[str, str]] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda fd: (events.append(("sync", os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd))
    )
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append(("rename", str(b))), rename(a, b)))
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append(("replace", str(b))), replace(a, b)))
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    where = tmp_path / "checkpoints"
    saved(Saver(MESH, open_storage(where), background=True), 1, tokenizer=tokenizer)
    renamed = events.index(("rename", str(where / "step-00000001")))
    synced = [Path(path).relative_to(where).parts[1:] for kind, path in events[:renamed] if kind == "sync"]
    files = {path.relative_to(where / "step-00000001").parts for path in (where / "step-00000001").rglob("*")}
    assert set(synced) == files | {(), ("rank-00000.json",)}  # the directory itself, and what was there in between
    assert synced.index(("rank-00000.safetensors",)) < synced.index(("rank-00000.json",))
    assert synced.index(("manifest.json",)) == len(synced) - 3  # then the two directories
    assert synced.index(("manifest.checksum",)) < synced.index(("manifest.json",))
    assert events[renamed + 1] == ("sync", str(where))
    assert [kind for kind, _ in events[renamed + 2 :]] == ["sync", "replace", "sync"]


def test_a_living_writer_is_left_alone(tmp_path: Path) -> None:
    one, other = open_storage(tmp_path), open_storage(tmp_path)
    living = one.begin("step-00000001")
    (tmp_path / ".tmp-step-00000009-0a0a0a0a").mkdir()  # of one that is dead
    assert saved(Saver(MESH, other, background=True), 2).error is None
    assert visible(tmp_path) == [f".tmp-{living}", "latest", "step-00000002"]
    one.abort(living)
    assert visible(tmp_path) == ["latest", "step-00000002"]
