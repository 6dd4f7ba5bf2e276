"""Writing a whole checkpoint by one process: a model that was imported or converted, or the state of a small run.

The same pieces as where all ranks of a run write together (`save.py`): shard files and the manifest in the folder of an
attempt, which the storage then makes visible. Killed at any moment, what was complete before is still found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from modelworks.checkpoint.commit import Identity, write_manifest
from modelworks.checkpoint.errors import CheckpointError
from modelworks.checkpoint.formats.safetensors_files import DTYPE_NAMES, plan_shards, volume_bytes, write_safetensors
from modelworks.checkpoint.grid import whole_box
from modelworks.checkpoint.lazy_tensor import LazyTensor
from modelworks.checkpoint.local_storage import LocalStorage
from modelworks.checkpoint.names import step_name
from modelworks.checkpoint.part import MAX_SHARD_BYTES, File, Part, Piece
from modelworks.checkpoint.storage import Folder, Storage, WritableFolder, open_storage
from modelworks.config import ModelConfig, RunConfig

Sections = Mapping[str, Mapping[str, Tensor | LazyTensor]]


def write_checkpoint(
    directory: Path | str,
    *,
    step: int,
    config: RunConfig,
    sections: Sections,
    state: Mapping[str, Any],
    tokenizer: Path | None,
    metrics: Mapping[str, float] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path | str:
    """Write `directory/step-XXXXXXXX` and return its path or URL. An existing checkpoint of the same step is replaced.

    sections: section name -> full tensor name -> tensor (any device); tensors that share memory are stored once.
    state: what JSON can hold, non-finite numbers included. tokenizer: a file or directory that is copied in.
    Raises OSError when the disk is full; nothing partial is then visible and older checkpoints are untouched.
    """
    storage = open_storage(directory)
    identity = Identity.of_run(config, world_size=1, state=state, metrics=metrics or {}, tokenizer=tokenizer)
    folder = _write(storage, step_name(step), step, identity, sections, max_shard_bytes)
    storage.point_latest(step_name(step))
    return folder.local() or folder.label


def write_model(
    path: Path,
    *,
    config: ModelConfig,
    tensors: Mapping[str, Tensor | LazyTensor],
    tokenizer: Path | None,
    origin: str,
    biases: Mapping[str, Tensor | LazyTensor] | None = None,
    optimizer: Mapping[str, Tensor | LazyTensor] | None = None,
    updates: int = 0,
    step: int = 0,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write a checkpoint at `path` that holds a model and no run: the result of importing one from elsewhere.

    biases: of the routers of experts, where the model has them. optimizer: `<parameter>/<state>`, after `updates`
    updates, where that came with it. step: how far it had been trained.
    """
    sections = {"model": tensors, "routing": biases or {}, "optimizer": optimizer or {}}
    sections = {name: values for name, values in sections.items() if values}
    state = {"origin": origin, **({"updates": updates} if optimizer else {})}
    identity = Identity(config, None, {"world_size": 1}, state, {}, tokenizer)
    _write(LocalStorage(path.parent), path.name, step, identity, sections, max_shard_bytes)
    return path


def _write(
    storage: Storage, name: str, step: int, identity: Identity, sections: Sections, max_shard_bytes: int
) -> Folder:
    attempt = storage.begin(name)
    try:
        folder = storage.writing(attempt)
        write_manifest(folder, step, identity, [_write_part(folder, sections, max_shard_bytes)])
        return storage.commit(attempt)
    except BaseException:
        storage.abort(attempt)
        raise


def _write_part(folder: WritableFolder, sections: Sections, max_shard_bytes: int) -> Part:
    """All tensors as one rank's part: each is one piece."""
    values = {(section, name): value for section, tensors in sections.items() for name, value in tensors.items()}
    owners = _owners(values)
    unique = {f"{owner[0]}/{owner[1]}": values[owner] for owner in dict.fromkeys(owners.values())}
    for key, value in unique.items():
        if value.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{key}: tensors of {value.dtype} cannot be stored in safetensors")
    sizes = {key: volume_bytes(value.shape, value.dtype) for key, value in unique.items()}
    files: list[File] = []
    place: dict[str, tuple[int, str]] = {}  # key -> file, checksums
    for keys in plan_shards({key: size for key, size in sizes.items() if size}, max_shard_bytes):
        stem = "rank-00000" if not files else f"rank-00000-{len(files) + 1}"
        name = folder.file_name(stem, ".safetensors")
        with folder.create(name) as file:
            written = write_safetensors(file, [(key, unique[key]) for key in keys])
        place |= {key: (len(files), checksums) for key, checksums in written.checksums.items()}
        files.append(File(name, written.bytes, written.header))
    pieces = []
    for (section, name), value in values.items():
        key = "/".join(owners[section, name])
        number, checksums = place.get(key, (0, ""))
        shape = tuple(value.shape)
        piece = Piece(section, name, DTYPE_NAMES[value.dtype], shape, whole_box(shape), number, checksums)
        pieces.append(piece if key == f"{section}/{name}" else replace(piece, key=key))
    return Part(0, files, pieces)


_Name = tuple[str, str]  # section, name


def _owners(values: Mapping[_Name, Tensor | LazyTensor]) -> dict[_Name, _Name]:
    """name -> the first name whose tensor is the very same memory (tied weights), else itself."""
    first: dict[object, _Name] = {}
    owners = {}
    for name, value in values.items():
        if isinstance(value, Tensor) and value.numel():
            identity: object = (value.device, value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
        else:
            identity = name
        owners[name] = first.setdefault(identity, name)
    return owners
