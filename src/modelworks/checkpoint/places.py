"""From what a user typed to the storage of a run's checkpoints, or to one of them.

my-run, runs/my-run         a run: where its configuration says that it saves
path/to/checkpoints         a directory of checkpoints, or s3://…, gs://… of one
path/to/step-00002000       one checkpoint, by path or URL
my-run@2000, …@latest       one of a run, or of a directory of checkpoints; …@best by the run's own metric
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from modelworks.checkpoint.errors import CheckpointError
from modelworks.checkpoint.local_storage import LocalStorage
from modelworks.checkpoint.manifest import read_manifest
from modelworks.checkpoint.names import MANIFEST, TEMPORARY, is_step, step_name, step_number
from modelworks.checkpoint.read import open_checkpoint
from modelworks.checkpoint.retention import best_checkpoint, complete_checkpoints
from modelworks.checkpoint.storage import Folder, Storage, is_url, open_folder, open_storage
from modelworks.config import RunConfig, UserError, load_run_config, nearest

RUNS = Path("runs")
Notify = Callable[[str], None]
_STEP = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True)
class Place:
    """A storage of checkpoints. run: the directory of the run that saves there, and config: its configuration, where
    they are known."""

    storage: Storage
    config: RunConfig | None
    run: Path | None = None

    @property
    def may_be_empty(self) -> bool:
        """Whether it is that of a run, if only of one that has saved nothing yet."""
        return self.run is not None or (isinstance(self.storage, LocalStorage) and self.storage.was_held())


def to_stderr(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


def find_storage(text: str, notify: Notify = to_stderr) -> Place:
    """The storage that a run, a directory or a URL names. Raises CheckpointError naming the nearest run.

    notify: told, in a sentence, where a name could mean two things.
    """
    if is_url(text):
        storage = open_storage(text)
        return Place(storage, _config_within(storage))
    path = find_path(text, "run, directory or URL of checkpoints", notify)
    if path.is_file():
        raise CheckpointError(f"{text}: is a file; give a run, a directory of checkpoints, or a URL")
    storage = storage_at(path)
    if (path / "config.yaml").is_file():
        return Place(storage, _config_of(path), path)
    return Place(storage, _config_within(storage))


def find_folder(text: str, notify: Notify = to_stderr) -> Folder:
    """The folder of the one checkpoint that a path, a URL or `PLACE@STEP` names; of a storage, its newest complete one.

    What is named by itself need not be complete. Raises CheckpointError naming what is there.
    """
    name, selector = split_selector(text)
    if not selector and names_one(name):
        return open_folder(name if is_url(name) else Path(name).expanduser())
    return select(find_storage(name, notify).storage, selector or "latest", text)


def split_selector(text: str) -> tuple[str, str]:
    """`my-run@2000` as (`my-run`, `2000`); the second is empty where there is none. A path that is there may hold an
    `@`, and so may the host of a URL."""
    name, at, selector = text.rpartition("@")
    of_host = is_url(text) and "/" not in name.partition("://")[2]
    if not at or "/" in selector or of_host or Path(text).expanduser().exists():
        return text, ""
    if not name or not selector:
        raise CheckpointError(
            f"{text}: names no checkpoint {'after' if name else 'before'} the `@`; give a step, `latest` or `best`, as "
            f"in `{name or 'my-run'}@latest`"
        )
    return name, selector


def names_one(name: str) -> bool:
    """Whether a path or URL is that of one checkpoint and not of a storage of them."""
    if is_url(name):
        return is_step(name.rstrip("/").rpartition("/")[2])
    path = Path(name).expanduser()
    named = is_step(path.name) or path.name.startswith(TEMPORARY)
    return path.is_dir() and (named or (path / MANIFEST).is_file())


def find_path(name: str, what: str, notify: Notify) -> Path:
    """The file or directory of that name, else the run. what: is looked for, in words, for the CheckpointError."""
    path, run = Path(name).expanduser(), RUNS / name
    if path.exists():
        if run.is_dir() and not run.samefile(path):
            notify(f"`{name}` is taken as ./{name}, which is here; the run of that name is {run}")
        return path
    if run.is_dir():
        return run
    runs = sorted(entry.name for entry in RUNS.iterdir() if entry.is_dir()) if RUNS.is_dir() else []
    around = [str(path.parent / entry.name) for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = nearest(name, [*runs, *(str(RUNS / each) for each in runs), *around])
    hint = f" (did you mean `{near}`?)" if near else ""
    known = f"; runs here: {', '.join(runs[:8])}" if runs and not near else ""
    raise CheckpointError(
        f"{name}: no such {what}{hint}: looked for a file or directory of that name and for a run under {RUNS}/{known}"
    )


def storage_at(path: Path) -> Storage:
    """Where the checkpoints of a run lie, or `path` as a directory of checkpoints: the first that has some, else where
    they will be."""
    storages = list(_storages(path))
    return next((storage for storage in storages if names_in(storage)), storages[0])


def names_in(storage: Storage) -> list[str]:
    """The names of all checkpoints. Raises CheckpointError where the storage cannot be read."""
    try:
        return storage.checkpoints()
    except OSError as error:
        raise CheckpointError(f"{storage.label}: cannot be read: {error.strerror or error}") from None


def select(storage: Storage, selector: str, text: str) -> Folder:
    """The checkpoint that stands behind the `@` of `text`: a step, `best`, or `latest`, the newest complete one."""
    names = names_in(storage)
    number = int(selector) if _STEP.fullmatch(selector) else None
    if not names and number is None:
        raise CheckpointError(f"{storage.label}: no checkpoint is here")
    if selector in ("best", "latest"):
        complete = list(complete_checkpoints(storage))
        if not complete:
            raise CheckpointError(
                f"{storage.label}: none of its {len(names)} checkpoints is complete; `modelworks checkpoint show "
                f"{split_selector(text)[0]}@{step_number(names[-1])}` says what is missing"
            )
        return storage.folder(complete[-1] if selector == "latest" else _best(storage, complete[-1], text))
    wanted = selector if number is None else step_name(number)
    if wanted not in names:
        attempts = sorted(storage.path.glob(f"{TEMPORARY}{wanted}-*")) if isinstance(storage, LocalStorage) else []
        if attempts and is_step(wanted):
            return open_folder(attempts[-1])
        steps = ", ".join(str(step_number(name)) for name in names[-8:])
        raise CheckpointError(f"{text}: no such step; there are {f'latest, best, {steps}' if names else 'none'}")
    return storage.folder(wanted)


def configured_storage(run_dir: Path) -> str | None:
    """Where the run's own configuration says that its checkpoints lie; None where it says nothing that can be read."""
    try:
        storage = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))["checkpoint"]["storage"]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return None
    return storage if isinstance(storage, str) else None


def _storages(path: Path) -> Iterator[Storage]:
    configured = configured_storage(path)
    if configured:
        yield open_storage(configured)
    if (path / "checkpoints").is_dir() or (path / "config.yaml").is_file():
        yield open_storage(path / "checkpoints")
    yield open_storage(path)


def _best(storage: Storage, newest: str, text: str) -> str:
    """newest: complete, and knows which metric counts."""
    evaluate = open_checkpoint(storage.folder(newest)).config.evaluate
    found = best_checkpoint(storage, evaluate.best_metric, evaluate.best_mode)
    if found is None:
        raise CheckpointError(f"{text}: no checkpoint carries the metric `{evaluate.best_metric}`; use @latest")
    return found


def _config_of(run: Path) -> RunConfig | None:
    try:
        return load_run_config(run / "config.yaml")
    except UserError:
        return None  # one of another version, say: its checkpoints can still be listed


def _config_within(storage: Storage) -> RunConfig | None:
    """The newest checkpoint knows the run's configuration."""
    for name in reversed(storage.checkpoints()):
        try:
            values = read_manifest(storage.folder(name)).head.config
            return None if values is None else RunConfig.model_validate(values)
        except (CheckpointError, OSError, ValueError):
            continue
    return None
