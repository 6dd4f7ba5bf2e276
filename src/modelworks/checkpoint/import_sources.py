"""What can be imported or converted: all that `open_model` reads, and checkpoints of DeepSpeed and Megatron-Core.

Those two hold tensors without saying what model they are of, so a description of the model is needed beside them.
"""

from __future__ import annotations

from pathlib import Path

from modelworks.checkpoint.errors import CheckpointError
from modelworks.checkpoint.formats.deepspeed import find_deepspeed, open_deepspeed
from modelworks.checkpoint.formats.hugging_face import read_config
from modelworks.checkpoint.formats.megatron import find_megatron, open_megatron
from modelworks.checkpoint.formats.source import ModelSource
from modelworks.checkpoint.loading import open_model
from modelworks.checkpoint.places import Notify
from modelworks.config import ModelConfig, load_run_config, nearest, preset, preset_names

_CONFIG = "config.json"


def open_source(src: str, model: str | None = None, *, notify: Notify | None = None) -> ModelSource:
    """The model that `src` names, its tensors still on disk.

    model: what `describe_model` takes; for checkpoints of DeepSpeed (where a `config.json` lies beside it, it is not
    needed) and Megatron-Core only. Raises CheckpointError.
    """
    path = Path(src).expanduser()
    if path.is_dir():
        if (directory := find_deepspeed(path)) is not None:
            return open_deepspeed(directory, _described(model, (path, directory, directory.parent), src, "DeepSpeed"))
        if (directory := find_megatron(path)) is not None:
            return open_megatron(directory, _described(model, (), src, "Megatron-Core"))
    if model is not None:
        raise CheckpointError(f"--model: {src} says itself what model it holds; leave --model out")
    return open_model(src, notify=notify)


def describe_model(text: str) -> ModelConfig:
    """The shape of a model from a preset's name, a run description (YAML), or Hugging Face's config.json or the
    directory that holds it. Raises UserError naming the nearest preset."""
    path = Path(text).expanduser()
    if path.is_dir():
        path = path / _CONFIG
    if path.is_file():
        return read_config(path.parent, path.name) if path.suffix == ".json" else load_run_config(path).model
    if text in preset_names():
        return preset(text)
    near = nearest(text, preset_names())
    hint = f"; did you mean `{near}`?" if near else ""
    raise CheckpointError(
        f"--model: {text!r} is no preset and no file{hint} (give a preset's name, a run description in YAML, or a "
        f"Hugging Face {_CONFIG})"
    )


def _described(model: str | None, places: tuple[Path, ...], src: str, kind: str) -> ModelConfig:
    if model is not None:
        return describe_model(model)
    for place in places:
        if (place / _CONFIG).is_file():
            return read_config(place)
    beside = f" and no {_CONFIG} lies beside it" if places else ""
    raise CheckpointError(
        f"{src}: a {kind} checkpoint does not say what model it holds{beside}; name it with --model (a preset, a run "
        f"description, or a Hugging Face {_CONFIG})"
    )
