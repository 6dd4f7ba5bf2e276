"""From what a user typed to a model's files: a run, a checkpoint, a Hugging Face directory or a GGUF file.

my-run, runs/my-run         its newest complete checkpoint
my-run@2000, my-run@best    that step's; the best by the run's own metric
path/to/step-00002000       a checkpoint
path/to/directory           with config.json and safetensors: Hugging Face
path/to/model.gguf          GGUF
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from modelworks.checkpoint.errors import CheckpointError
from modelworks.checkpoint.formats.gguf_header import MAGIC
from modelworks.checkpoint.manifest import MANIFEST
from modelworks.checkpoint.names import checkpoint_directories, step_of
from modelworks.checkpoint.read import open_checkpoint
from modelworks.checkpoint.retention import best_checkpoint, latest_checkpoint
from modelworks.checkpoint.storage import open_storage
from modelworks.config import nearest

RUNS = Path("runs")
Notify = Callable[[str], None]


@dataclass(frozen=True)
class Location:
    """kind: how to read it. path: the checkpoint, the directory or the file."""

    kind: Literal["checkpoint", "hugging_face", "gguf"]
    path: Path


def locate_model(text: str, notify: Notify) -> Location:
    """Find the model that `text` names. Raises CheckpointError saying what was looked for and the nearest names.

    notify: told, in a sentence, about every newer checkpoint that had to be skipped.
    """
    name, _, selector = text.partition("@") if not Path(text).expanduser().exists() else (text, "", "")
    path = Path(name).expanduser()
    if not path.exists() and (RUNS / name).is_dir():
        path = RUNS / name
    if path.is_file():
        return _file(path)
    if not path.is_dir():
        raise CheckpointError(_not_found(text, name))
    if (path / MANIFEST).is_file():
        return Location("checkpoint", path)
    for directory in (path / "checkpoints", path):
        if checkpoint_directories(directory):
            return Location("checkpoint", _select(path, directory, selector or "latest", notify))
    if (path / "config.json").is_file():
        return Location("hugging_face", path)
    if (path / "checkpoints").is_dir() or (path / "records.jsonl").is_file():
        raise CheckpointError(f"{path}: this run has no checkpoint yet")
    raise CheckpointError(
        f"{path}: no model here: looked for {MANIFEST} (a checkpoint), checkpoints/ (a run) "
        "and config.json (a Hugging Face directory)"
    )


def _file(path: Path) -> Location:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == MAGIC or path.suffix == ".gguf":
        return Location("gguf", path)
    if path.suffix in (".safetensors", ".json", ".bin", ".pt", ".pth", ".ckpt"):
        raise CheckpointError(f"{path}: one file of a model; give the directory that holds it and its config.json")
    raise CheckpointError(f"{path}: not a model file (only .gguf files stand alone)")


def _select(run: Path, directory: Path, selector: str, notify: Notify) -> Path:
    if selector == "latest":
        found = latest_checkpoint(
            directory, on_skip=lambda path, reason: notify(f"skipped {path.name}: {reason}"), sections=("model",)
        )
        if found is None:
            raise CheckpointError(f"{directory}: no complete checkpoint")
        return found
    if selector == "best":
        return _best(run, directory)
    steps = {str(step_of(path)): path for path in checkpoint_directories(directory)}
    if selector not in steps:
        raise CheckpointError(f"{run}@{selector}: no such step; there are latest, best, {', '.join(steps)}")
    return steps[selector]


def _best(run: Path, directory: Path) -> Path:
    newest = latest_checkpoint(directory, sections=())
    if newest is not None:
        evaluate = open_checkpoint(newest).config.evaluate
        found = best_checkpoint(open_storage(directory), evaluate.best_metric, evaluate.best_mode)
        if found is not None:
            return directory / found
        raise CheckpointError(f"{run}@best: no checkpoint carries the metric `{evaluate.best_metric}`; use @latest")
    raise CheckpointError(f"{directory}: no complete checkpoint")


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
