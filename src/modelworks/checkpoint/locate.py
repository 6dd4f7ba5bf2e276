"""From what a user typed to a model's files: a run, a checkpoint, a Hugging Face directory or a GGUF file.

my-run, runs/my-run         its newest complete checkpoint
my-run@2000, my-run@best    that step's; the best by the run's own metric
path/to/step-00002000       a checkpoint
s3://bucket/checkpoints     a URL of checkpoints, or of one (a run's configuration may name one, too)
path/to/directory           with config.json and safetensors: Hugging Face
path/to/model.gguf          GGUF
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from modelworks.checkpoint.errors import CheckpointError
from modelworks.checkpoint.formats.gguf_header import MAGIC
from modelworks.checkpoint.manifest import MANIFEST
from modelworks.checkpoint.names import step_of
from modelworks.checkpoint.read import open_checkpoint
from modelworks.checkpoint.retention import best_checkpoint, complete_checkpoints
from modelworks.checkpoint.storage import Folder, Storage, is_url, open_folder, open_storage
from modelworks.config import nearest

RUNS = Path("runs")
Notify = Callable[[str], None]


@dataclass(frozen=True)
class Location:
    """kind: how to read it. path: the directory or the file; folder: of a checkpoint, whose path may be a URL."""

    kind: Literal["checkpoint", "hugging_face", "gguf"]
    path: Path = Path()
    folder: Folder | None = None


def locate_model(text: str, notify: Notify) -> Location:
    """Find the model that `text` names. Raises CheckpointError saying what was looked for and the nearest names.

    notify: told, in a sentence, about every newer checkpoint that had to be skipped.
    """
    name, _, selector = text.partition("@") if not Path(text).expanduser().exists() else (text, "", "")
    if is_url(text):
        return _at_url(text, notify)
    path = Path(name).expanduser()
    if not path.exists() and (RUNS / name).is_dir():
        path = RUNS / name
    if path.is_file():
        return _file(path)
    if not path.is_dir():
        raise CheckpointError(_not_found(text, name))
    if (path / MANIFEST).is_file():
        return Location("checkpoint", folder=open_folder(path))
    for storage in _storages(path):
        if _names(storage):
            return Location("checkpoint", folder=_select(str(path), storage, selector or "latest", notify))
    if (path / "config.json").is_file():
        return Location("hugging_face", path)
    if (path / "checkpoints").is_dir() or (path / "records.jsonl").is_file():
        raise CheckpointError(f"{path}: this run has no checkpoint yet")
    raise CheckpointError(
        f"{path}: no model here: looked for {MANIFEST} (a checkpoint), checkpoints/ (a run) "
        "and config.json (a Hugging Face directory)"
    )


def configured_storage(run_dir: Path) -> str | None:
    """Where the run's own configuration says that its checkpoints lie; None where it says nothing that can be read."""
    try:
        storage = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))["checkpoint"]["storage"]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return None
    return storage if isinstance(storage, str) else None


def _storages(path: Path) -> Iterator[Storage]:
    """Where the checkpoints of a run may lie, or `path` as a directory of checkpoints."""
    configured = configured_storage(path)
    if configured:
        yield open_storage(configured)
    yield open_storage(path / "checkpoints")
    yield open_storage(path)


def _at_url(text: str, notify: Notify) -> Location:
    """A checkpoint, or the newest of a directory of them; `…@2000` and `…@best` as for a run."""
    head, slash, last = text.rstrip("/").rpartition("/")
    last, _, selector = last.partition("@")
    url = f"{head}{slash}{last}"
    if step_of(Path(last)) is not None:
        return Location("checkpoint", folder=open_folder(url))
    storage = open_storage(url)
    if not _names(storage):
        raise CheckpointError(f"{url}: no checkpoint is here (looked for step-…/{MANIFEST})")
    return Location("checkpoint", folder=_select(url, storage, selector or "latest", notify))


def _names(storage: Storage) -> list[str]:
    try:
        return storage.checkpoints()
    except OSError as error:
        raise CheckpointError(f"{storage.label}: cannot be read: {error.strerror or error}") from None


def _file(path: Path) -> Location:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == MAGIC or path.suffix == ".gguf":
        return Location("gguf", path)
    if path.suffix in (".safetensors", ".json", ".bin", ".pt", ".pth", ".ckpt"):
        raise CheckpointError(f"{path}: one file of a model; give the directory that holds it and its config.json")
    raise CheckpointError(f"{path}: not a model file (only .gguf files stand alone)")


def _select(where: str, storage: Storage, selector: str, notify: Notify) -> Folder:
    if selector == "latest":
        return _latest(storage, notify)
    if selector == "best":
        return _best(where, storage)
    steps = {str(step_of(Path(name))): name for name in storage.checkpoints()}
    if selector not in steps:
        raise CheckpointError(f"{where}@{selector}: no such step; there are latest, best, {', '.join(steps)}")
    return storage.folder(steps[selector])


def _latest(storage: Storage, notify: Notify) -> Folder:
    """The newest whole one. On this machine that means its weights too; what is far away is not read twice, and checked
    as it is loaded."""
    for name in reversed(storage.checkpoints()):
        folder = storage.folder(name)
        try:
            open_checkpoint(folder).verify(() if folder.local() is None else ("model",))
        except (CheckpointError, OSError) as error:
            notify(f"skipped {name}: {error}")
        else:
            return folder
    raise CheckpointError(f"{storage.label}: no complete checkpoint")


def _best(where: str, storage: Storage) -> Folder:
    complete = list(complete_checkpoints(storage))
    if not complete:
        raise CheckpointError(f"{storage.label}: no complete checkpoint")
    evaluate = open_checkpoint(storage.folder(complete[-1])).config.evaluate
    found = best_checkpoint(storage, evaluate.best_metric, evaluate.best_mode)
    if found is None:
        raise CheckpointError(f"{where}@best: no checkpoint carries the metric `{evaluate.best_metric}`; use @latest")
    return storage.folder(found)


def _not_found(text: str, name: str) -> str:
    path = Path(name)
    runs = [entry.name for entry in RUNS.iterdir() if entry.is_dir()] if RUNS.is_dir() else []
    around = [str(path.parent / entry.name) for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = nearest(name, [*runs, *(str(RUNS / run) for run in runs), *around])
    hint = f" (did you mean `{near}`?)" if near else ""
    known = f"; runs here: {', '.join(sorted(runs)[:8])}" if runs and not near else ""
    return (
        f"{text}: no such model{hint}: looked for a file or directory of that name and for a run under {RUNS}/{known}"
    )
