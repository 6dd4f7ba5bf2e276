"""From what a user typed to the storage of a run's checkpoints, or to one of them.

my-run, runs/my-run         a run: where its configuration says that it saves
path/to/checkpoints         a directory of checkpoints, or s3://…, gs://… of one
path/to/step-00002000       one checkpoint, by path or URL
my-run@2000, …@latest       one of a run, or of a directory of checkpoints
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from modelworks.checkpoint.errors import CheckpointError
from modelworks.checkpoint.local_storage import LocalStorage
from modelworks.checkpoint.locate import RUNS, configured_storage, locate_model
from modelworks.checkpoint.manifest import read_manifest
from modelworks.checkpoint.names import MANIFEST, TEMPORARY, checkpoint_directories, is_step, step_name, step_number
from modelworks.checkpoint.retention import complete_checkpoints
from modelworks.checkpoint.storage import Folder, Storage, is_url, open_folder, open_storage
from modelworks.config import RunConfig, UserError, load_run_config, nearest

_STEP = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True)
class Place:
    """A storage of checkpoints. config: of the run that saves there, where it is known."""

    storage: Storage
    config: RunConfig | None


def find_storage(text: str) -> Place:
    """The storage that a run, a directory or a URL names. Raises CheckpointError naming the nearest run."""
    if is_url(text):
        return _with_config(open_storage(text))
    path = _existing(text)
    if (path / "config.yaml").is_file():
        return Place(open_storage(configured_storage(path) or path / "checkpoints"), _config_of(path))
    inner = path / "checkpoints"
    return _with_config(open_storage(inner if not checkpoint_directories(path) and inner.is_dir() else path))


def find_folder(text: str) -> Folder:
    """The folder of the one checkpoint that a path, a URL or `PLACE@STEP` names; of a storage, its newest complete one.

    What is named by itself need not be complete. Raises CheckpointError naming what is there.
    """
    name, at, selector = text.rpartition("@")
    if not at or "/" in selector or Path(text).exists():  # part of a name, or of a user's in a URL
        name, selector = text, ""
    if not selector and _is_one(name):
        return open_folder(name if is_url(name) else Path(name).expanduser())
    storage = find_storage(name).storage
    names = storage.checkpoints()
    number = int(selector) if _STEP.fullmatch(selector) else None
    if not names and number is None:
        raise CheckpointError(f"{storage.label}: no checkpoint is here")
    if selector == "best":
        found = locate_model(text, lambda _: None).folder
        assert found is not None
        return found
    if selector in ("", "latest"):
        complete = list(complete_checkpoints(storage))
        if not complete:
            raise CheckpointError(
                f"{storage.label}: none of its {len(names)} checkpoints is complete; `modelworks checkpoint show "
                f"{name}@{step_number(names[-1])}` says what is missing"
            )
        return storage.folder(complete[-1])
    wanted = selector if number is None else step_name(number)
    if wanted not in names:
        attempts = sorted(storage.path.glob(f"{TEMPORARY}{wanted}-*")) if isinstance(storage, LocalStorage) else []
        if attempts and is_step(wanted):
            return open_folder(attempts[-1])
        steps = ", ".join(str(step_number(name)) for name in names[-8:])
        raise CheckpointError(f"{text}: no such step; there are {f'latest, best, {steps}' if names else 'none'}")
    return storage.folder(wanted)


def _is_one(text: str) -> bool:
    """Whether it names one checkpoint and not a storage of them."""
    if is_url(text):
        return is_step(text.rstrip("/").rpartition("/")[2])
    path = Path(text).expanduser()
    named = is_step(path.name) or path.name.startswith(TEMPORARY)
    return path.is_dir() and (named or (path / MANIFEST).is_file())


def _existing(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.exists() and (RUNS / text).is_dir():
        return RUNS / text
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{text}: is a file; give a run, a directory of checkpoints, or a URL")
    runs = sorted(entry.name for entry in RUNS.iterdir() if entry.is_dir()) if RUNS.is_dir() else []
    near = nearest(text, runs)
    hint = f"did you mean `{near}`?" if near else f"runs here: {', '.join(runs[:8]) or 'none'}"
    raise CheckpointError(f"{text}: no run, directory or URL of that name; {hint}")


def _config_of(run: Path) -> RunConfig | None:
    try:
        return load_run_config(run / "config.yaml")
    except UserError:
        return None  # one of another version, say: its checkpoints can still be listed


def _with_config(storage: Storage) -> Place:
    """The newest checkpoint knows the run's configuration."""
    for name in reversed(storage.checkpoints()):
        try:
            values = read_manifest(storage.folder(name)).head.config
            return Place(storage, None if values is None else RunConfig.model_validate(values))
        except (CheckpointError, OSError, ValueError):
            continue
    return Place(storage, None)
