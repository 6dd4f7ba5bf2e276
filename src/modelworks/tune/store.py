"""The outcomes of a search's trials on disk, so that a search that was killed goes on where it was.

    <directory>/trials.jsonl    first the facts that all outcomes depend on and their digest, then an outcome a line
    <directory>/lock            held while a search uses the directory (`LockFile`)

A line is appended and synced to the disk before the search goes on: what it was told is never lost, and a kill in the
middle of a line costs that trial alone. Outcomes of other facts (another configuration, other texts, another version)
are never used: the store is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from modelworks.checkpoint import InUse, LockFile
from modelworks.config import RunConfig, UserError, differences, parse_run_config
from modelworks.tune.trials import Outcome, Trial

FORMAT = 1
FILE = "trials.jsonl"


class TrialStore:
    """outcomes: by trial; of trials that failed, none: they are made again. config: of the trials that are there, None
    for a new store. A context that holds the directory's lock."""

    def __init__(self, directory: Path, *, overwrite: bool = False) -> None:
        """Raises `UserError` where another search has the directory, or it holds something else."""
        self.directory, self.path = directory, directory / FILE
        self.outcomes: dict[Trial, Outcome] = {}
        self._facts: dict[str, Any] | None = None
        with _as_user_error(directory):
            directory.mkdir(parents=True, exist_ok=True)
            try:
                self._lock = LockFile(directory / "lock")
            except InUse as holder:
                raise UserError(
                    f"{directory} is in use by another search ({holder}); wait for it, or give another --out"
                ) from None
            try:
                if overwrite:
                    self.path.unlink(missing_ok=True)
                end = self._read()
                self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
                os.ftruncate(self._file, end)  # of a torn line
            except BaseException:
                self._lock.release()
                raise

    @property
    def config(self) -> RunConfig | None:
        return None if self._facts is None else parse_run_config(self._facts["config"], str(self.path))

    def claim(self, facts: dict[str, Any]) -> None:
        """Make the store one of these facts, or make sure that it is. Raises `UserError` naming what differs."""
        if self._facts is None:
            self._append({"format": FORMAT, "digest": digest(facts), "facts": facts})
            self._facts = facts
        elif digest(facts) != digest(self._facts):
            raise UserError(
                f"{self.path} holds trials of something else ({_what_differs(self._facts, facts)}); start over with "
                "--overwrite, or give another --out"
            )

    def add(self, outcome: Outcome) -> None:
        """On the disk when it returns. Raises OSError naming the file."""
        self._append(outcome.to_row())
        if outcome.status != "failed":
            self.outcomes[outcome.trial] = outcome

    def close(self) -> None:
        os.close(self._file)
        self._lock.release()

    def __enter__(self) -> TrialStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> int:
        """Take what is there; returns where the whole lines end. A damaged line is skipped: its trial is made again."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return 0
        end = content.rfind(b"\n") + 1
        lines = content[:end].splitlines()
        if not lines:
            return 0
        self._facts = _read_facts(lines[0], self.path)
        for line in lines[1:]:
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                outcome = Outcome.from_row(json.loads(line))
                if outcome.status != "failed":
                    self.outcomes[outcome.trial] = outcome
        return end

    def _append(self, row: dict[str, Any]) -> None:
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        size = os.fstat(self._file).st_size
        try:
            rest = line
            while rest:
                rest = rest[os.write(self._file, rest) :]
            os.fsync(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, size)
            raise OSError(error.errno, error.strerror, str(self.path)) from error


def digest(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _read_facts(line: bytes, path: Path) -> dict[str, Any]:
    try:
        row = json.loads(line)
        facts: dict[str, Any] = row["facts"]
        if row["format"] != FORMAT or row["digest"] != digest(facts) or not isinstance(facts["config"], str):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{path} is no store of trials that this version reads; start over with --overwrite, or give another --out"
        ) from None
    return facts


def _what_differs(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """In words: keys of the configuration where it is that, else the other facts."""
    changed: list[str] = []
    if theirs["config"] != ours["config"]:
        with contextlib.suppress(UserError):  # a configuration that this version does not read any more
            before, after = (parse_run_config(facts["config"], "") for facts in (theirs, ours))
            changed = [str(each) for each in differences(before, after)]
        changed = changed or ["another configuration"]
    changed += [
        f"{name}: {theirs.get(name)} -> {ours.get(name)}"
        for name in sorted({*theirs, *ours} - {"config"})
        if theirs.get(name) != ours.get(name)
    ]
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return "; ".join(changed[:3]) + more


@contextlib.contextmanager
def _as_user_error(directory: Path) -> Any:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or directory}: trials cannot be kept here ({error.strerror or error})"
        ) from None
