"""Writing a checkpoint so that a reader sees it complete or not at all.

The sequence, each step durable before the next: tensor files and tokeniser under `.tmp-…` (fsync each), the manifest
last, fsync of the directory, rename to `step-…`, fsync of the parent, then the `latest` pointer (atomic replace).
Retention comes after, in `retention.py`, and only on complete checkpoints.

The invariant: killed between any two of these steps, the newest complete checkpoint is still found, and what is left
of the attempt has a name starting with a dot that the next writer recognises. A writer holds a lock (flock) on its
temporary directory, which dies with it; that is how leftovers of dead writers are told from a live one.
"""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

import modelworks
from modelworks.checkpoint.errors import CheckpointError
from modelworks.checkpoint.formats.safetensors_files import (
    DTYPE_NAMES,
    plan_shards,
    shard_names,
    volume_bytes,
    write_safetensors,
)
from modelworks.checkpoint.lazy_tensor import LazyTensor, loaded
from modelworks.checkpoint.manifest import FORMAT, MANIFEST, MANIFEST_CRC, VERSION, encode_numbers
from modelworks.checkpoint.names import LATEST, REPLACED, TEMPORARY, step_name
from modelworks.checkpoint.retention import clean_leftovers
from modelworks.config import ModelConfig, RunConfig

MAX_SHARD_BYTES = 4 << 30


Sections = Mapping[str, Mapping[str, Tensor | LazyTensor]]


def write_checkpoint(
    directory: Path,
    *,
    step: int,
    config: RunConfig,
    sections: Sections,
    state: Mapping[str, Any],
    tokenizer: Path | None,
    metrics: Mapping[str, float] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write `directory/step-XXXXXXXX` and return its path. An existing checkpoint of the same step is replaced.

    sections: section name -> full tensor name -> tensor (any device); tensors that share memory are stored once.
    state: what JSON can hold, non-finite numbers included. tokenizer: a file or directory that is copied in.
    Raises OSError when the disk is full; nothing partial is then visible and older checkpoints are untouched.
    """
    directory.mkdir(parents=True, exist_ok=True)
    clean_leftovers(directory)
    final = directory / step_name(step)
    identity = {
        "step": step,
        "model": config.model.model_dump(mode="json"),
        "config": config.model_dump(mode="json", by_alias=True),
        "layout": {"world_size": 1, **config.parallel.model_dump(mode="json")},
        "state": encode_numbers(dict(state)),
        "metrics": encode_numbers(dict(metrics or {})),
    }
    _commit(final, identity, sections, tokenizer, max_shard_bytes)
    _point_latest(directory, final.name)
    return final


def write_model(
    path: Path,
    *,
    config: ModelConfig,
    tensors: Mapping[str, Tensor | LazyTensor],
    tokenizer: Path | None,
    origin: str,
    biases: Mapping[str, Tensor | LazyTensor] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write a checkpoint at `path` that holds a model and no run: the result of importing one from elsewhere.

    biases: of the routers of experts, where the model has them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    identity = {
        "step": 0,
        "model": config.model_dump(mode="json"),
        "config": None,
        "layout": {"world_size": 1},
        "state": {"origin": origin},
        "metrics": {},
    }
    sections = {"model": tensors, "routing": biases} if biases else {"model": tensors}
    _commit(path, identity, sections, tokenizer, max_shard_bytes)
    return path


def _commit(
    final: Path, identity: dict[str, Any], sections: Sections, tokenizer: Path | None, max_shard_bytes: int
) -> None:
    parent = final.parent
    temporary = parent / f"{TEMPORARY}{final.name}-{secrets.token_hex(4)}"
    replaced = parent / f"{REPLACED}{final.name}"
    temporary.mkdir()
    lock = os.open(temporary, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _write_contents(temporary, identity, sections, tokenizer, max_shard_bytes)
        # A directory cannot be renamed over another: the old one steps aside first. Readers know the aside name.
        if final.exists():
            os.rename(final, replaced)
        os.rename(temporary, final)
        _fsync_directory(parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        if replaced.exists() and not final.exists():
            os.rename(replaced, final)
        raise
    finally:
        os.close(lock)
    if replaced.exists():
        shutil.rmtree(replaced)


def _write_contents(
    temporary: Path, identity: dict[str, Any], sections: Sections, tokenizer: Path | None, max_shard_bytes: int
) -> None:
    files: dict[str, dict[str, Any]] = {}
    tensors = [
        entry
        for section, values in sections.items()
        for entry in _write_section(temporary, section, values, max_shard_bytes, files)
    ]
    tokenizer_entry = None if tokenizer is None else _copy_tokenizer(tokenizer, temporary, files)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "writer": f"modelworks {modelworks.__version__}",
        **identity,
        "tokenizer": tokenizer_entry,
        "tensors": tensors,
        "files": files,
    }
    text = json.dumps(manifest, indent=1, ensure_ascii=False, allow_nan=False).encode()
    _write_file(temporary / MANIFEST_CRC, f"{zlib.crc32(text):08x}\n".encode())
    _write_file(temporary / MANIFEST, text)
    _fsync_directory(temporary)


def _write_section(
    directory: Path,
    section: str,
    values: Mapping[str, Tensor | LazyTensor],
    max_shard_bytes: int,
    files: dict[str, dict[str, Any]],
) -> list[dict[str, Any]]:
    owners = _owners(values)
    unique = {name: values[name] for name in dict.fromkeys(owners.values())}
    for name, value in unique.items():
        if value.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{section}/{name}: tensors of {value.dtype} cannot be stored in safetensors")
    shards = plan_shards({name: volume_bytes(v.shape, v.dtype) for name, v in unique.items()}, max_shard_bytes)
    pieces: dict[str, dict[str, Any]] = {}
    for file, names in zip(shard_names(section, len(shards)), shards, strict=True):
        written = write_safetensors(
            directory / file,
            {name: (unique[name].dtype, tuple(unique[name].shape)) for name in names},
            lambda name: loaded(unique[name]),
        )
        files[file] = {"bytes": written.bytes, "crc32": f"{written.crc32:08x}"}
        for name, (size, crc32) in written.tensors.items():
            shape = list(unique[name].shape)
            box = {"offset": [0] * len(shape), "extent": shape}
            pieces[name] = {"file": file, "key": name, **box, "bytes": size, "crc32": f"{crc32:08x}"}
    return [
        {
            "section": section,
            "name": name,
            "dtype": DTYPE_NAMES[value.dtype],
            "shape": list(value.shape),
            "pieces": [pieces[owners[name]]],
        }
        for name, value in values.items()
    ]


def _owners(values: Mapping[str, Tensor | LazyTensor]) -> dict[str, str]:
    """name -> the first name whose tensor is the very same memory (tied weights), else itself."""
    first: dict[object, str] = {}
    owners = {}
    for name, value in values.items():
        if isinstance(value, Tensor) and value.numel():
            identity: object = (value.device, value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
        else:
            identity = name
        owners[name] = first.setdefault(identity, name)
    return owners


def _copy_tokenizer(source: Path, checkpoint: Path, files: dict[str, dict[str, Any]]) -> dict[str, str]:
    directory = checkpoint / "tokenizer"
    directory.mkdir()
    sources = [source] if source.is_file() else sorted(path for path in source.iterdir() if path.is_file())
    if not sources:
        raise CheckpointError(f"{source}: no tokeniser files to keep with the checkpoint")
    digest = hashlib.sha256()
    for path in sources:
        data = path.read_bytes()
        digest.update(path.name.encode() + b"\0" + len(data).to_bytes(8, "little") + data)
        _write_file(directory / path.name, data)
        files[f"tokenizer/{path.name}"] = {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}
    _fsync_directory(directory)
    return {"directory": "tokenizer", "sha256": digest.hexdigest()}


def _point_latest(directory: Path, name: str) -> None:
    """Replace the pointer file `latest` atomically. It is for people and other tools; our reader scans."""
    temporary = directory / f"{TEMPORARY}{LATEST}-{secrets.token_hex(4)}"
    try:
        _write_file(temporary, f"{name}\n".encode())
        os.replace(temporary, directory / LATEST)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _fsync_directory(directory)


def _write_file(path: Path, data: bytes) -> None:
    with path.open("wb", buffering=0) as file:
        view = memoryview(data)
        while len(view):
            view = view[os.write(file.fileno(), view) :]
        os.fsync(file.fileno())


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
