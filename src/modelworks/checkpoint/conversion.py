"""Converting a model between our checkpoint and a Hugging Face directory, and from GGUF, DeepSpeed and Megatron-Core.

The idea: tensors stream through one at a time, and so does the check: the same few tokens go through source and result
layer by layer. The model is never whole in memory.

The invariant: a conversion finishes only after the result was read back and gave the same logits as the source; it
is written under a temporary name and renamed, so a failed one leaves nothing at the destination.
"""

from __future__ import annotations

import glob
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from modelworks.checkpoint.errors import CheckpointError
from modelworks.checkpoint.formats.hugging_face import export_hugging_face, open_hugging_face
from modelworks.checkpoint.formats.safetensors_files import volume_bytes
from modelworks.checkpoint.formats.source import ModelSource
from modelworks.checkpoint.formats.without_mup import without_mup
from modelworks.checkpoint.import_sources import open_source
from modelworks.checkpoint.lazy_tensor import LazyTensor
from modelworks.checkpoint.loading import open_model
from modelworks.checkpoint.local_storage import in_use, lock_directory
from modelworks.checkpoint.manifest import MANIFEST, read_manifest
from modelworks.checkpoint.names import TEMPORARY, is_step
from modelworks.checkpoint.part import MAX_SHARD_BYTES
from modelworks.checkpoint.places import Notify
from modelworks.checkpoint.write import write_model
from modelworks.config import ModelConfig
from modelworks.models import streamed_logits

Target = Literal["hf", "modelworks"]
Progress = Callable[[int, int], None]  # bytes written so far, bytes in all
# Reading back gives the same weights bit for bit; the margin is for kernels that are not deterministic.
TOLERANCE = 1e-5
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/")  # one slash is left of two in a `Path`


@dataclass(frozen=True)
class Conversion:
    """What was done. tensors, bytes: of weights, and of optimiser state where there is any. max_difference: largest
    difference of a logit, result against source. remarks: what a user should know about the source."""

    source: str
    path: Path
    to: Target
    tensors: int
    bytes: int
    max_difference: float
    remarks: tuple[str, ...] = ()


def convert(
    src: str,
    dst: str | Path,
    to: Target,
    *,
    model: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    progress: Progress | None = None,
    notify: Notify | None = None,
) -> Conversion:
    """Convert the model `src` (whatever `open_source` takes) and check the result before it appears at `dst`.

    to: `hf`, a Hugging Face directory, or `modelworks`, a checkpoint directory that `load_model`, `init_from` and
    `convert` take. model: describes it where `src` does not; see `open_source`. dtype: cast floating-point weights;
    None keeps each as it is. Raises CheckpointError.
    """
    destination = Path(dst).expanduser()
    _check_destination(destination, overwrite)
    source = open_source(src, model, notify=notify)
    if dtype is not None:
        source = replace(source, tensors={name: _cast(tensor, dtype) for name, tensor in source.tensors.items()})
    written_too = source.optimizer if to == "modelworks" else {}
    everything = [*source.tensors.values(), *written_too.values()]
    total = sum(volume_bytes(tensor.shape, tensor.dtype) for tensor in everything)
    counted = source if progress is None else _counting(source, total, progress)
    with _workplace(destination) as workplace:
        written = workplace / destination.name
        if to == "hf":
            export_hugging_face(without_mup(counted), written, max_shard_bytes=max_shard_bytes)
        else:
            _write_own(counted, written, max_shard_bytes)
        difference = _check_logits(source, written, to)
        if destination.exists():
            shutil.rmtree(destination)
        os.rename(written, destination)
    return Conversion(source.origin, destination, to, len(everything), total, difference, source.remarks)


@contextmanager
def _workplace(destination: Path) -> Iterator[Path]:
    """A locked temporary directory beside the destination; those that killed conversions to it left are removed."""
    parent, prefix = destination.parent, f"{TEMPORARY}{destination.name}-"
    parent.mkdir(parents=True, exist_ok=True)
    for path in parent.glob(f"{glob.escape(prefix)}*"):
        if path.is_dir() and not in_use(path):
            shutil.rmtree(path)
    workplace = parent / f"{prefix}{secrets.token_hex(4)}"
    workplace.mkdir()
    lock = lock_directory(workplace)
    try:
        yield workplace
    finally:
        shutil.rmtree(workplace, ignore_errors=True)
        os.close(lock)


def _write_own(source: ModelSource, path: Path, max_shard_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = None
        if source.tokenizer is not None:
            tokenizer = Path(directory)
            source.tokenizer.save(tokenizer)
        write_model(
            path,
            config=source.config,
            tensors=source.tensors,
            biases=source.biases,
            optimizer=source.optimizer,
            updates=source.updates,
            step=source.step,
            tokenizer=tokenizer,
            origin=source.origin,
            max_shard_bytes=max_shard_bytes,
        )


def _check_logits(source: ModelSource, path: Path, to: Target) -> float:
    """The largest difference of a logit over a few tokens, in float32. Raises CheckpointError beyond the tolerance."""
    result = open_hugging_face(path) if to == "hf" else open_model(str(path))
    expected = without_mup(source).config if to == "hf" else source.config
    old, new = dict(_plain(expected)), dict(_plain(result.config))
    if old != new:
        changed = [f"{key} {value!r} -> {new[key]!r}" for key, value in old.items() if new[key] != value]
        raise CheckpointError(f"{source.origin}: the result would not be the same model: {', '.join(changed)}")
    before, after = _logits(source), _logits(result)
    difference = float((before - after).abs().max())
    if not difference <= TOLERANCE * max(1.0, float(before.abs().max())):
        raise CheckpointError(
            f"{source.origin}: the converted model gives other logits (difference {difference:.2e}); "
            "nothing was written"
        )
    return difference


def _plain(config: ModelConfig) -> ModelConfig:
    """The config with the default of a scaling's original length written out, where it plays a part."""
    scaling = config.rope_scaling
    if scaling is None:
        return config
    original = None if scaling.type == "linear" else scaling.original_max_seq_len or config.max_seq_len
    return config.model_copy(update={"rope_scaling": scaling.model_copy(update={"original_max_seq_len": original})})


def _logits(source: ModelSource) -> Tensor:
    """Logits of a fixed sequence, (length, vocab_size), in float32; one weight in memory at a time."""
    length = min(16, source.config.max_seq_len)
    tokens = torch.linspace(0, source.config.vocab_size - 1, length).long()
    biases = {name: bias.load() for name, bias in source.biases.items()}
    return streamed_logits(source.config, lambda name: source.tensors[name].load(), tokens[None], biases)[0]


def _check_destination(path: Path, overwrite: bool) -> None:
    if _URL.match(str(path)):
        raise CheckpointError(f"{path}: models are written to this machine's disk; give a path and copy it from there")
    if is_step(path.name):
        raise CheckpointError(f"{path}: is named like a checkpoint of a run; give another destination")
    if not path.exists() and not path.is_symlink():
        return
    if path.is_dir() and not any(path.iterdir()):
        return
    if not overwrite:
        raise CheckpointError(f"{path}: exists already; give another destination, or --overwrite to replace it")
    if path.is_symlink() or not path.is_dir() or not _is_model(path):
        raise CheckpointError(f"{path}: is not a converted model, so --overwrite will not remove it")


def _is_model(path: Path) -> bool:
    """Whether a directory holds a model and nothing else: what is replaced is removed with all that is in it."""
    folders = {entry.name for entry in path.iterdir() if entry.is_dir()}
    if (path / MANIFEST).is_file():
        return folders <= {"tokenizer"} and read_manifest(path).head.config is None
    return not folders and (path / "config.json").is_file() and any(path.glob("model*.safetensors"))


def _cast(tensor: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    if not tensor.dtype.is_floating_point:
        return tensor
    return LazyTensor(dtype, tensor.shape, lambda: tensor.load().to(dtype))


def _counting(source: ModelSource, total: int, progress: Progress) -> ModelSource:
    """The same, telling `progress` about each tensor that is read."""
    done = 0

    def counted(tensor: LazyTensor) -> LazyTensor:
        def load() -> Tensor:
            nonlocal done
            value = tensor.load()
            done += value.nbytes
            progress(min(done, total), total)
            return value

        return LazyTensor(tensor.dtype, tensor.shape, load)

    tensors, optimizer = (
        {name: counted(tensor) for name, tensor in values.items()} for values in (source.tensors, source.optimizer)
    )
    return replace(source, tensors=tensors, optimizer=optimizer)
