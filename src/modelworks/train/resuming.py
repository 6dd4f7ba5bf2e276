"""Where a run's checkpoints lie, and from which one it goes on.

Candidates are judged by structure alone: a valid manifest, and all files with their sizes. Bytes are checked while each
rank reads its slices; where they turn out to be damaged, the run falls back to the next older candidate. Nothing is
removed on that way: what cannot be used here may still be of use to someone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from modelworks.checkpoint import (
    MANIFEST,
    Checkpoint,
    CheckpointError,
    LocalStorage,
    Storage,
    complete_checkpoints,
    configured_storage,
    names_in,
    open_checkpoint,
    open_storage,
    step_number,
)
from modelworks.config import RunConfig, UserError
from modelworks.records import read_records


@dataclass(frozen=True)
class Candidate:
    """A checkpoint by the storage that holds it, a path or URL, and its name there."""

    place: str
    name: str


@dataclass(frozen=True)
class Found:
    """The checkpoint that a run goes on from."""

    candidate: Candidate
    checkpoint: Checkpoint

    @classmethod
    def open(cls, candidate: Candidate) -> Found:
        folder = open_storage(candidate.place).folder(candidate.name)
        return cls(candidate, open_checkpoint(folder))


def place_of(config: RunConfig, run_dir: Path) -> str:
    """Path or URL of the storage that this run saves to."""
    return config.checkpoint.storage or str(run_dir / "checkpoints")


def check_memory(place: str, world_size: int) -> None:
    """Raise `UserError` for a storage that each process of a run would have for itself."""
    if place.startswith("memory://") and world_size > 1:
        raise UserError(
            f"checkpoint.storage: got {place}, expected a place that all {world_size} processes see: memory:// is a "
            "process's own"
        )


def check_storage(config: RunConfig, storage: Storage, *, resume: bool, overwrite: bool, ours: bool = False) -> None:
    """Raise `UserError` where the storage that the configuration names holds what this run must not touch, or does not
    hold what it should.

    ours: this run's directory says already that it saves there, under whatever name.
    """
    names = names_in(storage)
    if resume and ours and not names and isinstance(storage, LocalStorage) and not storage.was_held():
        raise UserError(
            f"checkpoint.storage: {storage.label} is not where this run saved until now: it is gone, or its disk is "
            "not mounted; bring it back, or start over with --overwrite"
        )
    if not names or (resume and ours):
        return
    if not overwrite and not resume:
        raise UserError(
            f"checkpoint.storage: {storage.label} already holds checkpoints ({names[-1]} is the newest); go on with "
            "--resume, start over with --overwrite, or choose another place"
        )
    for name in reversed(names):
        try:
            owner = open_checkpoint(storage.folder(name)).config.name
        except (CheckpointError, OSError):
            continue
        if owner != config.name:
            harm = "would remove" if overwrite else "would go on from and remove in time"
            option = "--overwrite" if overwrite else "--resume"
            raise UserError(
                f"checkpoint.storage: {storage.label} holds checkpoints of the run `{owner}`, which {option} of "
                f"`{config.name}` {harm}; choose another place"
            )


def find_candidate(
    config: RunConfig, run_dir: Path, console: Console, unusable: Collection[Candidate] = ()
) -> Candidate | None:
    """The newest checkpoint that is complete by its structure; None for a run that was killed before it had one, which
    starts again.

    unusable: known to be damaged. Raises `UserError` where there are checkpoints and none can be used.
    """
    damaged = len(unusable)
    for place in _places(config, run_dir):
        storage = open_storage(place)
        for name in reversed(names_in(storage)):
            candidate = Candidate(place, name)
            if candidate in unusable:
                continue
            folder = storage.folder(name)
            try:
                if folder.size(MANIFEST) is None:
                    console.print(f"{name} is not used: it was never completed (no {MANIFEST})", markup=False)
                    continue
                step = open_checkpoint(folder).step
            except (CheckpointError, OSError) as error:
                damaged += 1
                console.print(f"warning: {name} is not used: {error}", markup=False)
                continue
            console.print(f"resuming from {folder.label} (step {step})", markup=False)
            return candidate
    if damaged:
        raise UserError(
            f"cannot resume {run_dir}: no checkpoint of it can be used ({damaged} damaged, see the warnings); nothing "
            "was changed: bring one back, or start over with --overwrite"
        )
    console.print(f"no checkpoint in {run_dir} yet: starting from the beginning", markup=False)
    return None


def candidates_until(config: RunConfig, run_dir: Path, step: int) -> list[Candidate]:
    """Checkpoints of this run that are complete by their structure and of that step or an earlier one, newest first."""
    found = []
    for place in _places(config, run_dir):
        with contextlib.suppress(OSError):
            names = complete_checkpoints(open_storage(place))
            found += [(step_number(name), Candidate(place, name)) for name in names if step_number(name) <= step]
    return [candidate for _, candidate in sorted(found, key=lambda row: row[0], reverse=True)]


def places_left(run_dir: Path) -> list[str]:
    """Where else than in its directory this run has saved, by its configuration and its records, and checkpoints of it
    may still be."""
    places = {configured_storage(run_dir)}
    with contextlib.suppress(OSError):
        saves = (str(row.value) for row in read_records(run_dir / "records.jsonl") if row.name == "checkpoint")
        places |= {where.rpartition("/")[0] for where in saves}
    left = set()
    for place in places - {None}:
        try:
            storage = open_storage(str(place))
            if storage.checkpoints():
                left.add(storage.label)
        except (CheckpointError, OSError):  # out of reach, or of a kind that cannot be used here any more
            left.add(str(place))
    return sorted(left - {str(run_dir / "checkpoints")})


def newest_checkpoint(config: RunConfig, run_dir: Path) -> str | None:
    """Path or URL of what a run that was cut short can go on from, as far as its structure tells."""
    with contextlib.suppress(UserError):
        candidate = find_candidate(config, run_dir, Console(quiet=True))
        return None if candidate is None else open_storage(candidate.place).folder(candidate.name).label
    return None


def _places(config: RunConfig, run_dir: Path) -> list[str]:
    """The storage of the configuration, and where it has changed, that of the run so far."""
    earlier = configured_storage(run_dir) or str(run_dir / "checkpoints")
    return list(dict.fromkeys([place_of(config, run_dir), earlier]))
