"""From what a user typed to a model's files: a run, a checkpoint, a Hugging Face directory or a GGUF file.

my-run, my-run@best, s3://…   what `places` finds: of a run, its newest checkpoint that is whole
path/to/directory             with config.json and safetensors: Hugging Face
path/to/model.gguf            GGUF
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from modelworks.checkpoint.errors import CheckpointError
from modelworks.checkpoint.formats.gguf_header import MAGIC
from modelworks.checkpoint.names import MANIFEST
from modelworks.checkpoint.places import Notify, find_path, names_in, names_one, select, split_selector, storage_at
from modelworks.checkpoint.read import open_checkpoint
from modelworks.checkpoint.storage import Folder, Storage, is_url, open_folder, open_storage


@dataclass(frozen=True)
class Location:
    """kind: how to read it. path: the directory or the file; folder: of a checkpoint, whose path may be a URL."""

    kind: Literal["checkpoint", "hugging_face", "gguf"]
    path: Path = Path()
    folder: Folder | None = None


def locate_model(text: str, notify: Notify) -> Location:
    """Find the model that `text` names. Raises CheckpointError saying what was looked for and the nearest names.

    notify: told, in a sentence, about every newer checkpoint that had to be skipped, and about a name that could mean
    two things.
    """
    name, selector = split_selector(text)
    if not selector and names_one(name) and not (Path(name) / "config.json").is_file():
        return Location("checkpoint", folder=open_folder(name if is_url(name) else Path(name).expanduser()))
    if is_url(name):
        storage = open_storage(name)
        if not names_in(storage):
            raise CheckpointError(f"{name}: no checkpoint is here (looked for step-…/{MANIFEST})")
    else:
        path = find_path(name, "model", notify)
        if path.is_file():
            return _file(path)
        storage = storage_at(path)
        if not names_in(storage):
            return _directory(path)
    folder = _newest(storage, notify) if selector in ("", "latest") else select(storage, selector, text)
    return Location("checkpoint", folder=folder)


def _file(path: Path) -> Location:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == MAGIC or path.suffix == ".gguf":
        return Location("gguf", path)
    if path.suffix in (".safetensors", ".json", ".bin", ".pt", ".pth", ".ckpt"):
        raise CheckpointError(f"{path}: one file of a model; give the directory that holds it and its config.json")
    raise CheckpointError(f"{path}: not a model file (only .gguf files stand alone)")


def _directory(path: Path) -> Location:
    """One without checkpoints."""
    if (path / "config.json").is_file():
        return Location("hugging_face", path)
    if (path / "checkpoints").is_dir() or (path / "records.jsonl").is_file():
        raise CheckpointError(f"{path}: this run has no checkpoint yet")
    raise CheckpointError(
        f"{path}: no model here: looked for {MANIFEST} (a checkpoint), checkpoints/ (a run) "
        "and config.json (a Hugging Face directory)"
    )


def _newest(storage: Storage, notify: Notify) -> Folder:
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
