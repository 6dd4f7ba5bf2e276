"""Saving while training goes on: what is saved, what is said and recorded, and what happens when it is disturbed."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from run_files import assert_same_weights, series

from modelworks.checkpoint import Saver, find_storage, list_checkpoints, open_checkpoint, open_model
from modelworks.checkpoint.faults import at_each_point
from modelworks.config import UserError
from modelworks.records import read_records
from modelworks.train import loop, newest_checkpoint, train
from modelworks.train.resuming import check_memory, place_of
from modelworks.train.stopping import stop_on_signals


def at_step(monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[], Any]) -> None:
    """Do something just before the update of step `number`."""
    real = loop.train_step

    def step(*arguments: Any, step: int, **rest: Any) -> Any:
        if step == number:
            action()
        return real(*arguments, step=step, **rest)

    monkeypatch.setattr(loop, "train_step", step)


def events(run_dir: Path, name: str) -> list[str]:
    return [str(record.value) for record in read_records(run_dir / "records.jsonl") if record.name == name]


def saved(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))


@contextmanager
def slow_writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A writer that does not get on until the event is set, or until training waits for it."""
    released = threading.Event()
    real = Saver.wait

    def wait(saver: Saver, *arguments: Any) -> Any:
        released.set()
        return real(saver, *arguments)

    def hook(point: str) -> None:
        if point == "before a shard file":
            assert released.wait(60)

    monkeypatch.setattr(Saver, "wait", wait)
    with at_each_point(hook):
        yield released


@pytest.fixture(scope="module")
def synchronous(tiny_config: Any, tiny_machine: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stands still while it saves, at every second step."""
    run_dir = tmp_path_factory.mktemp("runs") / "synchronous"
    train(tiny_config("checkpoint.async=false", *OFTEN), run_dir, machine=tiny_machine)
    return run_dir


OFTEN = ["checkpoint.every=2 steps", "checkpoint.keep_last=9", "evaluate.every=100 steps"]


def test_what_training_changes_meanwhile_does_not_reach_the_checkpoint(
    synchronous: Path, tiny_config: Any, tiny_machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of step 2 is written after step 5."""
    with monkeypatch.context() as patch, slow_writer(patch) as released:
        at_step(patch, 5, released.set)
        train(tiny_config(*OFTEN, "checkpoint.when_busy=skip"), tmp_path / "run", machine=tiny_machine)
    assert "step-00000004" not in saved(tmp_path / "run")  # skipped: so step 2 was in flight
    for name in saved(tmp_path / "run"):
        ours, theirs = (open_checkpoint(run / "checkpoints" / name) for run in (tmp_path / "run", synchronous))
        for section in ("model", "optimizer"):
            expected = dict(theirs.tensors(section))
            assert all(torch.equal(tensor, expected[key]) for key, tensor in ours.tensors(section))
    assert series(tmp_path / "run", "train/loss") == series(synchronous, "train/loss")


def test_a_busy_writer_is_skipped_or_waited_for_and_it_is_said(
    tiny_config: Any, tiny_machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, slow_writer(patch):
        train(tiny_config(*OFTEN, "checkpoint.when_busy=skip"), tmp_path / "skip", machine=tiny_machine)
    assert saved(tmp_path / "skip") == ["step-00000002", "step-00000008"]  # the end waits
    remarks = events(tmp_path / "skip", "remark")
    words = "the save of step 2 is still being written: this step is not saved (checkpoint.when_busy is skip)"
    assert [text for text in remarks if "skip" in text] == [words] * 2
    assert series(tmp_path / "skip", "checkpoint/skipped") == [(4, 1.0), (6, 1.0)]

    with monkeypatch.context() as patch, slow_writer(patch):
        patch.setattr("modelworks.train.saving._WORTH_SAYING", 0.0)
        train(tiny_config(*OFTEN), tmp_path / "wait", machine=tiny_machine)
    assert saved(tmp_path / "wait") == [f"step-0000000{step}" for step in (2, 4, 6, 8)]
    assert any(
        "the save of step 2 is still being written: waited" in text for text in events(tmp_path / "wait", "remark")
    )
    assert series(tmp_path / "wait", "checkpoint/waited_seconds")[0][0] == 4


def test_what_saving_cost_is_recorded(synchronous: Path, tiny_config: Any, tiny_machine: Any, tmp_path: Path) -> None:
    train(tiny_config(*OFTEN), tmp_path / "run", machine=tiny_machine)
    for run_dir in (synchronous, tmp_path / "run"):
        for name in ("stall_seconds", "write_seconds", "bytes", "bandwidth"):
            assert [step for step, _ in series(run_dir, f"checkpoint/{name}")] == [2, 4, 6, 8]
    sizes = [value for _, value in series(tmp_path / "run", "checkpoint/bytes")]
    folder = tmp_path / "run" / "checkpoints" / "step-00000008"
    assert sizes[-1] == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    [predicted] = [value for _, value in series(tmp_path / "run", "predicted/checkpoint_staging")]
    measured = series(tmp_path / "run", "checkpoint/staging")[-1][1]
    assert predicted <= measured <= predicted + 64 * 100  # rounded up to whole cache lines, tensor by tensor
    assert {value for _, value in series(synchronous, "checkpoint/staging")} == {0.0}
    report = (tmp_path / "run" / "report.html").exists()
    assert not report  # which the command line writes


def test_an_automatic_interval_is_told_with_its_reason(tiny_config: Any, tiny_machine: Any, tmp_path: Path) -> None:
    said = io.StringIO()
    train(
        tiny_config("checkpoint.every=auto", "checkpoint.mean_time_between_failures=10", "evaluate.every=4 steps"),
        tmp_path / "run",
        machine=tiny_machine,
        console=Console(file=said, width=300),
    )
    decisions = [text for text in events(tmp_path / "run", "decision") if '"checkpoint.every"' in text]
    assert "at first, a save stops training for" in decisions[0]
    assert "(estimated), one failure in 10 h (as configured): Daly's interval is" in decisions[0]
    assert "(measured)" in decisions[1]
    assert "saving every " in said.getvalue()
    assert "every: auto" in (tmp_path / "run" / "config.yaml").read_text()


def test_the_grace_after_sigterm_is_kept(
    tiny_config: Any, tiny_machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too short for another save: the last complete one is relied on. Without any, saving is tried nevertheless."""
    short = ["checkpoint.grace=0.000001", "evaluate.every=100 steps"]
    for step, expected in ((4, "step-00000003"), (1, "step-00000002")):
        with monkeypatch.context() as patch:
            at_step(patch, step, lambda: os.kill(os.getpid(), signal.SIGTERM))
            result = train(tiny_config(*short), tmp_path / f"run-{step}", machine=tiny_machine)
        assert (result.stopped_by, result.steps, result.last_save_failed) == ("SIGTERM", step + 1, False)
        assert str(result.checkpoint).endswith(expected)
        assert result.checkpoint_step == int(expected[-1])
    [text] = [text for text in events(tmp_path / "run-4", "remark") if "checkpoint.grace" in text]
    assert text.endswith("s are left: this step is not saved; the last good checkpoint is step-00000003")


def test_sigterm_after_ctrl_c_has_a_deadline() -> None:
    with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.deadline(60) is None
        before = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = stop.deadline(60)
    assert deadline is not None
    assert before + 60 <= deadline <= time.monotonic() + 60
    assert stop.signal is signal.SIGINT  # what the run is said to have been stopped by


def test_what_is_in_flight_when_sigterm_comes_is_finished_first(
    tiny_config: Any, tiny_machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, slow_writer(patch):
        at_step(patch, 4, lambda: os.kill(os.getpid(), signal.SIGTERM))
        result = train(tiny_config("evaluate.every=100 steps"), tmp_path / "run", machine=tiny_machine)
    assert saved(tmp_path / "run") == ["step-00000003", "step-00000005"]
    assert (result.checkpoint_step, result.stopped_by) == (5, "SIGTERM")


def flip(folder: Path) -> str:
    """One bit in the middle of the tensors."""
    file = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    text = bytearray(file.read_bytes())
    text[len(text) * 2 // 3] ^= 4
    file.write_bytes(text)
    return file.name


def truncate(folder: Path) -> str:
    file = next(folder.glob("*.safetensors"))
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 1)
    return file.name


def lose(folder: Path) -> str:
    file = next(folder.glob("*.safetensors"))
    file.unlink()
    return file.name


def flip_tokenizer(folder: Path) -> str:
    """What resuming has no need of itself."""
    file = folder / "tokenizer" / "tokenizer.json"
    text = bytearray(file.read_bytes())
    text[len(text) // 2] ^= 1
    file.write_bytes(text)
    return file.name


def swap(folder: Path) -> str:
    """The same file of an older checkpoint: of the right size, with the right tensors, and not the right bytes."""
    file = next(folder.glob("*.safetensors"))
    shutil.copy(folder.with_name("step-00000003") / file.name, file)
    return file.name


@pytest.fixture(scope="module")
def interrupted(tiny_config: Any, tiny_machine: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "interrupted"
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 6, lambda: os.kill(os.getpid(), signal.SIGTERM))
        train(tiny_config(), run_dir, machine=tiny_machine)
    return run_dir


@pytest.mark.parametrize("damage", [flip, truncate, lose, flip_tokenizer, swap])
def test_a_damaged_checkpoint_gives_way_to_the_next_older_one(
    damage: Callable[[Path], str], interrupted: Path, tiny_config: Any, tiny_machine: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Aloud, with the file's name; nothing is removed, and the run ends as if nothing had happened."""
    run_dir = tmp_path / "run"
    shutil.copytree(interrupted, run_dir)
    assert saved(run_dir) == ["step-00000004", "step-00000006", "step-00000007"]
    shutil.copytree(run_dir / "checkpoints" / "step-00000004", run_dir / "checkpoints" / "step-00000003")
    file = damage(run_dir / "checkpoints" / "step-00000007")
    before = {path: path.read_bytes() for path in run_dir.glob("checkpoints/step-00000007/*") if path.is_file()}
    seen: list[bool] = []
    at_step(monkeypatch, 6, lambda: seen.append(all(path.read_bytes() == text for path, text in before.items())))
    said = io.StringIO()
    train(tiny_config(), run_dir, resume=True, machine=tiny_machine, console=Console(file=said, width=1000))
    [line] = [line for line in said.getvalue().splitlines() if "step-00000007 is not used" in line]
    assert file in line
    assert "step-00000006 (step 6)" in said.getvalue()
    assert seen == [True]
    train(tiny_config(), tmp_path / "whole", machine=tiny_machine)
    assert series(run_dir, "train/loss") == series(tmp_path / "whole", "train/loss")
    assert_same_weights(run_dir, tmp_path / "whole")


def test_where_no_checkpoint_can_be_used_nothing_is_touched(
    interrupted: Path, tiny_config: Any, tiny_machine: Any, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(interrupted, run_dir)
    for name in saved(run_dir):
        flip(run_dir / "checkpoints" / name)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and path.name != "lock"}
    with pytest.raises(UserError, match=r"no checkpoint of it can be used \(3 damaged.*--overwrite"):
        train(tiny_config(), run_dir, resume=True, machine=tiny_machine)
    assert {path: path.read_bytes() for path in before} == before


def test_checkpoints_by_url(tiny_config: Any, tiny_machine: Any, tmp_path: Path) -> None:
    """Saved to, resumed from, and found through the run's directory."""
    url = f"memory://{tmp_path.name}/checkpoints"
    there = f"checkpoint.storage={url}"
    run_dir = tmp_path / "run"
    train(tiny_config(there, "train.duration=5 steps"), run_dir, machine=tiny_machine)
    assert not (run_dir / "checkpoints").exists()
    result = train(tiny_config(there), run_dir, resume=True, machine=tiny_machine)
    assert result.checkpoint == f"{url}/step-00000008"
    assert newest_checkpoint(tiny_config(there), run_dir) == result.checkpoint
    assert [entry.step for entry in list_checkpoints(find_storage(url)) if "resumed from" in entry.marks] == [5]
    train(tiny_config("train.duration=5 steps"), tmp_path / "whole", machine=tiny_machine)
    train(tiny_config(), tmp_path / "whole", resume=True, machine=tiny_machine)
    assert series(run_dir, "train/loss") == series(tmp_path / "whole", "train/loss")
    expected = open_model(str(tmp_path / "whole"))
    for text in (str(run_dir), f"{run_dir}@8", url, f"{url}@best", f"{url}/step-00000008"):
        found = open_model(text)
        assert found.origin == f"checkpoint {result.checkpoint} (step 8)"
        assert found.tokenizer is not None
        assert all(torch.equal(tensor.load(), expected.tensors[name].load()) for name, tensor in found.tensors.items())


def test_a_run_that_moves_its_checkpoints_goes_on_from_the_old_place(
    tiny_config: Any, tiny_machine: Any, tmp_path: Path
) -> None:
    run_dir, other = tmp_path / "run", tmp_path / "elsewhere"
    train(tiny_config("train.duration=4 steps"), run_dir, machine=tiny_machine)
    before = saved(run_dir)
    train(tiny_config(f"checkpoint.storage={other}"), run_dir, resume=True, machine=tiny_machine)
    assert [step for step, _ in series(run_dir, "train/loss")] == list(range(1, 9))
    assert saved(run_dir) == before
    assert sorted(path.name for path in other.glob("step-*")) == ["step-00000006", "step-00000008"]


def test_starting_over_says_where_earlier_checkpoints_are_left(
    tiny_config: Any, tiny_machine: Any, tmp_path: Path
) -> None:
    """Of all places where the run has saved; those of the run's directory and of its storage are removed."""
    run_dir, said = tmp_path / "run", io.StringIO()
    places = {name: [f"checkpoint.storage={tmp_path / name}"] for name in ("first", "second")} | {"": []}
    for steps, (place, flags) in enumerate({"first": {}, "second": {"resume": True}, "": {"overwrite": True}}.items()):
        config = tiny_config(*places[place], f"train.duration={steps + 1} steps")
        train(config, run_dir, machine=tiny_machine, console=Console(file=said, width=1000), **flags)  # type: ignore[arg-type]
    lines = [line for line in said.getvalue().splitlines() if "earlier run" in line]
    assert lines == [f"checkpoints of the earlier run are left in {tmp_path / name}" for name in ("first", "second")]
    assert saved(run_dir) == ["step-00000003"]
    said.truncate(0)
    config = tiny_config(*places["second"], "train.duration=1 steps")
    train(config, run_dir, overwrite=True, machine=tiny_machine, console=Console(file=said, width=1000))
    assert "earlier run" not in said.getvalue()
    assert saved(run_dir) == []
    assert [path.name for path in (tmp_path / "second").glob("step-*")] == ["step-00000001"]


def test_a_storage_that_is_somebody_elses_is_refused(tiny_config: Any, tiny_machine: Any, tmp_path: Path) -> None:
    there = f"checkpoint.storage={tmp_path / 'shared'}"
    short = "train.duration=1 steps"
    train(tiny_config(there, short), tmp_path / "one", machine=tiny_machine)
    with pytest.raises(
        UserError, match=r"already holds checkpoints \(step-00000001 is the newest\); go on with --resume"
    ):
        train(tiny_config(there, short), tmp_path / "two", machine=tiny_machine)
    with pytest.raises(
        UserError, match="holds checkpoints of the run `tiny`, which --overwrite of `other` would remove"
    ):
        train(tiny_config(there, short, "name=other"), tmp_path / "two", overwrite=True, machine=tiny_machine)
    with pytest.raises(
        UserError, match="holds checkpoints of the run `tiny`, which --resume of `other` would go on from"
    ):
        train(tiny_config(there, short, "name=other"), tmp_path / "two", resume=True, machine=tiny_machine)
    renamed = train(tiny_config(there, short, "name=other"), tmp_path / "one", resume=True, machine=tiny_machine)
    assert renamed.steps == 1  # its directory says that the place is its own
    assert (tmp_path / "shared" / "step-00000001").exists()
    train(tiny_config(there, "train.duration=2 steps"), tmp_path / "one", overwrite=True, machine=tiny_machine)
    assert [path.name for path in (tmp_path / "shared").glob("step-*")] == ["step-00000002"]


def test_a_storage_that_is_gone_in_the_middle(
    tiny_config: Any, tiny_machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty directory where it was, as when a disk is unmounted: the save fails, nothing is made there, training
    goes on, and the next save is tried when it is back."""
    place = tmp_path / "run" / "checkpoints"

    def take_away() -> None:
        place.rename(tmp_path / "aside")
        place.mkdir()

    def bring_back() -> None:
        place.rmdir()
        (tmp_path / "aside").rename(place)

    actions = {4: take_away, 7: bring_back}
    real = loop.train_step

    def step(*arguments: Any, step: int, **rest: Any) -> Any:
        actions.get(step, lambda: None)()
        return real(*arguments, step=step, **rest)

    monkeypatch.setattr(loop, "train_step", step)
    config = tiny_config(*OFTEN, "checkpoint.async=false")
    result = train(config, tmp_path / "run", machine=tiny_machine)
    assert (result.steps, result.last_save_failed, result.checkpoint_step) == (8, False, 8)
    [warning] = events(tmp_path / "run", "warning")
    assert f"step 6: the checkpoint could not be written ({place} is gone, or is not the directory that" in warning
    assert warning.endswith("; the last good checkpoint is step-00000004")
    assert saved(tmp_path / "run") == ["step-00000002", "step-00000004", "step-00000008"]


def test_a_run_directory_that_is_removed_meanwhile(
    tiny_config: Any, tiny_machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run_dir = tmp_path / "run"
    at_step(monkeypatch, 4, lambda: shutil.rmtree(run_dir))
    said = io.StringIO()
    config = tiny_config("checkpoint.async=false")  # or what is being removed might be written to
    result = train(config, run_dir, machine=tiny_machine, console=Console(file=said, width=1000))
    assert (result.steps, result.last_save_failed) == (8, True)
    assert not run_dir.exists()
    told = f"{said.getvalue()}{capfd.readouterr().err}"
    assert f"step 8: the checkpoint could not be written ({run_dir}/checkpoints is gone" in told
    assert f"{run_dir}/records.jsonl is gone: what this run recorded in it is lost" in told
    assert "Traceback" not in told
    assert "None" not in told


def test_a_storage_that_is_not_there_on_resume(tiny_config: Any, tiny_machine: Any, tmp_path: Path) -> None:
    """A disk that is not mounted is no run without checkpoints; one that had begun and saved nothing is."""
    place = tmp_path / "disk" / "checkpoints"
    there = tiny_config(f"checkpoint.storage={place}", "train.duration=1 steps")
    train(there, tmp_path / "run", machine=tiny_machine)
    (tmp_path / "disk").rename(tmp_path / "unmounted")
    with pytest.raises(UserError, match=f"{place} is not where this run saved until now: it is gone, or its disk"):
        train(there, tmp_path / "run", resume=True, machine=tiny_machine)
    (tmp_path / "unmounted").rename(tmp_path / "disk")
    shutil.rmtree(place / "step-00000001")
    assert train(there, tmp_path / "run", resume=True, machine=tiny_machine).steps == 1


def test_two_runs_in_one_storage(tiny_config: Any, tiny_machine: Any, tmp_path: Path) -> None:
    """The second is told who has it, and may begin as soon as the first is gone, however it went."""
    place = tmp_path / "shared"
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    config = tiny_config(f"checkpoint.storage={place}", "train.duration=1 steps")
    told = re.escape(f"(process {holder.pid} on {socket.gethostname()}); wait for it")
    with pytest.raises(UserError, match=f"{place}: is in use by another run, or by `checkpoint prune` {told}"):
        train(config, tmp_path / "one", machine=tiny_machine)
    holder.kill()
    holder.communicate()
    result = train(config, tmp_path / "one", resume=True, machine=tiny_machine)
    assert result.checkpoint == str(place / "step-00000001")


_HOLD = """
import sys
from modelworks.checkpoint import open_storage
with open_storage(sys.argv[1]).hold():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_memory_of_one_process_is_no_storage_for_many(tiny_config: Any, tmp_path: Path) -> None:
    config = tiny_config("checkpoint.storage=memory://somewhere", "parallel.dp_replicate=2")
    with pytest.raises(UserError, match="got memory://somewhere, expected a place that all 2 processes see"):
        check_memory(place_of(config, tmp_path), 2)


def test_a_storage_that_cannot_be_reached_is_one_line(tiny_config: Any, tiny_machine: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, words in ((tmp_path / "file" / "inside", "Not a directory"), ("nosuch://bucket", "nosuch")):
        with pytest.raises(UserError, match=words):
            train(tiny_config(f"checkpoint.storage={place}"), tmp_path / "run", resume=True, machine=tiny_machine)


def test_staging_that_does_not_hold_all_is_said(tiny_config: Any, tiny_machine: Any, tmp_path: Path) -> None:
    for limit, said in (("1KiB", True), ("1GiB", False)):
        run_dir = tmp_path / limit
        train(tiny_config("train.duration=1 steps", f"checkpoint.staging={limit}"), run_dir, machine=tiny_machine)
        [reason] = [text for text in events(run_dir, "decision") if "checkpoint staging" in text]
        assert ("the rest is written before the step goes on" in reason) == said
