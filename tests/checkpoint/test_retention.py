"""Which checkpoints stay: against a brute-force rule, on a disk and in object storage, and with damaged ones there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from saving_jobs import CONFIG

from modelworks.checkpoint import Retention, best_checkpoint, write_checkpoint
from modelworks.checkpoint.names import step_name
from modelworks.checkpoint.retention import complete_checkpoints
from modelworks.checkpoint.storage import Storage, open_storage


def write(where: Path | str, step: int, **metrics: float) -> None:
    write_checkpoint(
        where,  # type: ignore[arg-type]
        step=step,
        config=CONFIG,
        sections={"model": {"w": torch.full((3,), float(step))}},
        state={},
        tokenizer=None,
        metrics=metrics,
    )


def steps(storage: Storage) -> list[int]:
    return [int(name[5:]) for name in storage.checkpoints()]


@pytest.fixture(params=["disk", "memory"])
def where(request: Any, tmp_path: Path) -> str:
    return str(tmp_path / "checkpoints") if request.param == "disk" else f"memory://{tmp_path}"


def test_what_is_kept(where: str) -> None:
    for step in range(1, 11):
        write(where, step, val_loss=abs(step - 4) + 1.0)
    storage = open_storage(where)
    retention = Retention(storage, 2, keep_every=5, best=("val_loss", "min"), protect=[step_name(3)])
    assert retention.surplus() == [step_name(step) for step in (1, 2, 6, 7, 8)]
    assert steps(storage) == list(range(1, 11))  # asking removes nothing
    assert retention.remove() == [step_name(step) for step in (1, 2, 6, 7, 8)]
    assert steps(storage) == [3, 4, 5, 9, 10]
    assert retention.remove() == []


class _Imagined:
    """A storage of names alone; `Retention` learns of metrics through what it already knows."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def checkpoints(self) -> list[str]:
        return list(self.names)

    def remove(self, name: str) -> None:
        self.names.remove(name)


@settings(max_examples=200, deadline=None)
@given(
    st.sets(st.integers(0, 30), max_size=10),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(1, 7)),
    st.one_of(st.none(), st.sampled_from(["min", "max"])),
    st.sets(st.integers(0, 30), max_size=3),
    st.data(),
)
def test_against_brute_force(
    there: set[int], keep_last: int, keep_every: int | None, mode: Any, protect: set[int], data: st.DataObject
) -> None:
    value = st.one_of(st.integers(0, 3), st.just({"non_finite": "nan"}), st.none())
    metrics = {step: data.draw(value) for step in sorted(there)}
    storage = _Imagined([step_name(step) for step in sorted(there)])
    retention = Retention(
        storage,  # type: ignore[arg-type]
        keep_last,
        keep_every,
        None if mode is None else ("m", mode),
        [step_name(step) for step in protect],
        _known={step_name(step): {"m": value} for step, value in metrics.items()},
    )
    removed = {int(name[5:]) for name in retention.remove()}
    kept = there - removed
    numbers = {step: value for step, value in metrics.items() if isinstance(value, int)}
    best = (min if mode == "min" else max)(numbers.values(), default=None)
    for step in there:
        newer = sum(other > step for other in there)
        is_best = mode and step == max((s for s, v in numbers.items() if v == best), default=None)
        wanted = newer < keep_last or (keep_every and step % keep_every == 0) or is_best or step in protect
        assert (step in kept) == bool(wanted)
    assert {int(name[5:]) for name in storage.names} == kept
    assert bool(kept) == bool(there)


def test_incomplete_ones_neither_count_nor_go(tmp_path: Path) -> None:
    for step in range(1, 6):
        write(tmp_path, step)
    (tmp_path / step_name(5) / "manifest.json").unlink()
    (tmp_path / step_name(4) / "rank-00000.safetensors").write_bytes(b"short")
    storage = open_storage(tmp_path)
    assert list(complete_checkpoints(storage)) == [step_name(step) for step in (1, 2, 3)]
    assert Retention(storage, keep_last=1).remove() == [step_name(1), step_name(2)]
    assert steps(storage) == [3, 4, 5]
    assert Retention(storage, keep_last=1).remove() == []


def test_what_was_just_saved_stays_beside_later_steps(tmp_path: Path) -> None:
    """A run that fell back behind a damaged checkpoint, whose manifest is sound, and went on from there."""
    for step in (10, 20, 30, 40):
        write(tmp_path, step)
    storage = open_storage(tmp_path)
    retention = Retention(storage, keep_last=1, protect=[step_name(20)])
    write(tmp_path, 25)
    assert retention.remove(step_name(25)) == [step_name(10)]
    assert steps(storage) == [20, 25, 30, 40]
    write(tmp_path, 30)
    assert retention.remove(step_name(30)) == [step_name(25)]
    assert steps(storage) == [20, 30, 40]


def test_a_step_that_is_saved_again_is_judged_anew(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    retention = Retention(storage, keep_last=1, best=("val_loss", "min"))
    for step, loss, stay in [(1, 3.0, [1]), (2, 2.0, [2]), (2, 9.0, [2]), (3, 5.0, [3]), (4, 6.0, [3, 4])]:
        write(tmp_path, step, val_loss=loss)
        retention.remove(step_name(step))
        assert steps(storage) == stay


def test_the_best(where: str) -> None:
    storage = open_storage(where)
    assert best_checkpoint(storage, "val_loss", "min") is None
    for step, loss in [(1, 2.0), (2, 1.0), (3, float("nan")), (4, 1.0), (5, 4.0), (6, float("-inf"))]:
        write(where, step, val_loss=loss)
    write(where, 7)
    assert best_checkpoint(storage, "val_loss", "min") == step_name(4)  # the newest of equals
    assert best_checkpoint(storage, "val_loss", "max") == step_name(5)
    assert best_checkpoint(storage, "accuracy", "max") is None


def test_a_link_to_a_checkpoint_that_was_moved_goes_and_saving_goes_on(tmp_path: Path) -> None:
    place, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    for step in (1, 2):
        write(place, step)
    (place / step_name(1)).rename(elsewhere)
    (place / step_name(1)).symlink_to(elsewhere)
    storage = open_storage(place)
    assert Retention(storage, 1).remove() == [step_name(1)]
    assert steps(storage) == [2]
    (place / f".removed-{step_name(9)}").symlink_to(elsewhere)  # as a writer killed in the middle leaves it
    write(place, 3)
    assert sorted(path.name for path in place.iterdir() if path.is_dir()) == [step_name(2), step_name(3)]
    assert (elsewhere / "manifest.json").is_file()


def test_what_cannot_be_swept_away_keeps_nobody_from_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)
    for left in (f".removed-{step_name(9)}", f".replaced-{step_name(1)}", f".tmp-{step_name(8)}-01234567"):
        (tmp_path / left).mkdir()

    def busy(path: Path, **_: Any) -> None:
        raise OSError(39, "Directory not empty", str(path))

    monkeypatch.setattr("modelworks.checkpoint.local_storage.shutil.rmtree", busy)
    write(tmp_path, 2)
    assert steps(open_storage(tmp_path)) == [1, 2]
