"""What is in a storage of checkpoints, complete or not, and what a half-written one lacks."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from modelworks.checkpoint.errors import CheckpointError
from modelworks.checkpoint.local_storage import LocalFolder, LocalStorage, in_use
from modelworks.checkpoint.manifest import decode_numbers, read_manifest
from modelworks.checkpoint.names import MANIFEST, TEMPORARY, is_step, step_number
from modelworks.checkpoint.places import Place
from modelworks.checkpoint.retention import best_checkpoint
from modelworks.checkpoint.storage import Folder
from modelworks.config import RunConfig

_RANK_FILE = re.compile(r"rank-(\d{5,})(?:-\d+)?(?:-[0-9a-f]{8})?\.(safetensors|json)")
_SHOWN = 8


@dataclass(frozen=True)
class Listed:
    """One checkpoint. bytes: of all its files. created: None where it does not say.

    state: `complete`, `incomplete`, or `being written`. problem: why it is not complete. marks: `latest` (the newest
    complete one), `best`, `milestone` (kept by `checkpoint.keep_every`), `resumed from` (as the latest one says of its
    run).
    """

    folder: Folder
    step: int
    bytes: int
    created: datetime.datetime | None
    metrics: dict[str, Any]
    state: str
    problem: str
    marks: tuple[str, ...]


def list_checkpoints(place: Place) -> list[Listed]:
    """All that are in a storage, oldest first, those of writers at work and of dead ones last. Raises OSError."""
    storage, config = place.storage, place.config
    names = storage.checkpoints()
    best = None
    if config is not None:
        best = best_checkpoint(storage, config.evaluate.best_metric, config.evaluate.best_mode)
    found = [_read(storage.folder(name), best, _milestones(config)) for name in names]
    complete = [entry for entry in found if entry.state == "complete"]
    if complete:
        newest = complete[-1]
        _mark(found, newest.folder.name, "latest")
        _mark(found, _resumed_from(newest.folder), "resumed from")
    return [*found, *_attempts(place)]


def names_manifest(folder: Folder) -> bool:
    """Whether it has a manifest, and so is complete or damaged, not half-written."""
    return folder.size(MANIFEST) is not None


def ranks_written(folder: Folder) -> tuple[list[int], list[int]]:
    """Of a checkpoint that is being written or was left: the ranks that have finished, and those that have begun only.

    A rank's part file comes when all that it writes is on disk; until then there are its shard files alone.
    """
    finished, begun = set[int](), set[int]()
    for file in folder.sizes():
        if match := _RANK_FILE.fullmatch(file):
            (finished if match[2] == "json" else begun).add(int(match[1]))
    return sorted(finished), sorted(begun - finished)


def explain_unfinished(folder: Folder, world_size: int | None) -> Iterator[str]:
    """Sentences that say how far the writing of a checkpoint without a manifest came.

    world_size: how many ranks write it, where that is known.
    """
    if not folder.sizes():
        yield "no file is in it"
        return
    if _is_locked(folder):
        yield "it is being written at this moment"
    elif folder.name.startswith(TEMPORARY):
        yield "its writer was stopped before it was complete; the next save of the run sweeps it away"
    finished, begun = ranks_written(folder)
    if finished:
        yield f"{_ranks(finished)} finished writing (the part file is there)"
    if begun:
        yield f"{_ranks(begun)} began and did not finish (shard files, but no part file)"
    if world_size is not None:
        silent = sorted(set(range(world_size)) - set(finished) - set(begun))
        if silent:
            yield f"{_ranks(silent)} of {world_size} wrote nothing"
    everyone = world_size is not None and finished == list(range(world_size))
    waits = "which rank 0 was about to write" if everyone else "which rank 0 writes when all ranks have finished"
    yield f"{MANIFEST} is missing, {waits}"


def _read(folder: Folder, best: str | None, keep_every: int | None) -> Listed:
    size = sum(folder.sizes().values())
    step = step_number(folder.name)
    try:
        manifest = read_manifest(folder)
    except (CheckpointError, OSError) as error:
        state = "being written" if _is_locked(folder) else "incomplete"
        return Listed(folder, step, size, None, {}, state, str(error), ())
    marks = ["best"] if folder.name == best else []
    if keep_every and step % keep_every == 0:
        marks.append("milestone")
    created = _time(manifest.head.created)
    return Listed(folder, step, size, created, dict(decode_numbers(manifest.metrics)), "complete", "", tuple(marks))


def _resumed_from(folder: Folder) -> str | None:
    """The name of the checkpoint that the run had gone on from when it saved this one."""
    where = read_manifest(folder).head.state.get("resumed_from")
    return where.rstrip("/").rpartition("/")[2] if isinstance(where, str) else None


def _mark(listed: list[Listed], name: str | None, mark: str) -> None:
    for index, entry in enumerate(listed):
        if entry.folder.name == name:
            listed[index] = replace(entry, marks=(mark, *entry.marks))


def _attempts(place: Place) -> Iterator[Listed]:
    """On a disk, what is being written has a hidden name; in object storage it is among the rest, without manifest."""
    if not isinstance(place.storage, LocalStorage) or not place.storage.path.is_dir():
        return
    for path in sorted(place.storage.path.glob(f"{TEMPORARY}step-*-*")):
        name = path.name.removeprefix(TEMPORARY).rpartition("-")[0]
        if path.is_dir() and is_step(name):
            folder = LocalFolder(path)
            state = "being written" if in_use(path) else "incomplete"
            problem = "; ".join(explain_unfinished(folder, None))
            yield Listed(folder, step_number(name), sum(folder.sizes().values()), None, {}, state, problem, ())


def _is_locked(folder: Folder) -> bool:
    local = folder.local()
    return local is not None and local.name.startswith(TEMPORARY) and local.is_dir() and in_use(local)


def _ranks(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}{more}"


def _milestones(config: RunConfig | None) -> int | None:
    """Every how many steps one is kept, where that follows from the configuration alone."""
    every = config.checkpoint.keep_every if config is not None else None
    if config is None or every is None or every.unit not in ("steps", "tokens"):
        return None
    return every.steps(tokens_per_step=config.train.global_batch * config.data.seq_len, steps_per_epoch=0.0)


def _time(text: str) -> datetime.datetime | None:
    try:
        found = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=datetime.UTC)
