"""The manifest: one JSON file that says what a checkpoint is and where each logical tensor lies.

The idea: tensors are *logical*: full parameter name and global shape. Each is made of pieces (a file and a box inside
the global shape). One process writes one piece per tensor; sharded runs will write several, and a reader takes
what it needs whatever the layout was.

The invariant: `manifest.json` is written last, inside a directory that is then renamed into place, so a visible
`step-…` directory is complete; `manifest.crc32` guards the manifest, which guards everything else.
docs/checkpoint-format.md is the specification.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from modelworks.checkpoint.errors import CheckpointError
from modelworks.checkpoint.formats.safetensors_files import DTYPES, parse_json
from modelworks.config import ModelConfig, RunConfig

FORMAT = "modelworks-checkpoint"
VERSION = 1
MANIFEST, MANIFEST_CRC = "manifest.json", "manifest.crc32"
MAX_MANIFEST_BYTES = 1 << 28
_Config = TypeVar("_Config", ModelConfig, RunConfig)


class _Part(BaseModel):
    # Keys that this version does not know are ignored: a change that a reader must understand raises the version.
    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class FileEntry(_Part):
    bytes: int = Field(ge=0)
    crc32: str = Field(pattern="^[0-9a-f]{8}$")


class Piece(_Part):
    """The box [offset, offset + extent) of a logical tensor, stored under `key` of a safetensors `file`."""

    file: str
    key: str
    offset: list[int]
    extent: list[int]
    bytes: int = Field(ge=0)
    crc32: str = Field(pattern="^[0-9a-f]{8}$")


class TensorEntry(_Part):
    """One logical tensor. dtype: the safetensors name. shape: global. Tied tensors share their pieces."""

    section: str
    name: str
    dtype: str
    shape: list[int]
    pieces: list[Piece] = Field(min_length=1)


class TokenizerEntry(_Part):
    """The tokeniser's files in the checkpoint, and the SHA-256 over their sorted names and contents."""

    directory: str
    sha256: str


class Manifest(_Part):
    format: Literal["modelworks-checkpoint"]
    version: int
    created: str
    writer: str
    step: int = Field(ge=0, lt=2**63)
    model: dict[str, Any]
    config: dict[str, Any] | None
    layout: dict[str, Any]
    tokenizer: TokenizerEntry | None
    tensors: list[TensorEntry]
    files: dict[str, FileEntry]
    state: dict[str, Any]
    metrics: dict[str, Any]


_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def read_manifest(directory: Path) -> Manifest:
    """Read and check the manifest of a checkpoint directory; every claim is checked against the files' sizes."""
    path = directory / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{directory}: not a checkpoint (no {MANIFEST})")
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{path}: larger than a manifest may be ({MAX_MANIFEST_BYTES:,} bytes)")
    text = path.read_bytes()
    raw = parse_json(text, path)
    if raw.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not a {FORMAT} manifest (format is {raw.get('format')!r})")
    version = raw.get("version")
    if not isinstance(version, int) or version < 1:
        raise CheckpointError(f"{path}: format version {version!r} does not exist")
    if version > VERSION:
        raise CheckpointError(
            f"{path}: format version {version} is newer than this Modelworks reads ({VERSION}); upgrade Modelworks"
        )
    _check_own_checksum(directory, text)
    try:
        manifest = Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{path}: {place}: {first['msg']}; the manifest is corrupted") from None
    for name, entry in manifest.files.items():
        check_file(directory, name, entry)
    seen: set[tuple[str, str]] = set()
    for tensor in manifest.tensors:
        problem = _tensor_problem(tensor, manifest.files)
        if (tensor.section, tensor.name) in seen:
            problem = "appears twice"
        seen.add((tensor.section, tensor.name))
        if problem:
            raise CheckpointError(
                f"{path}: tensor `{tensor.section}/{tensor.name}`: {problem}; the manifest is corrupted"
            )
    return manifest


def check_file(directory: Path, name: str, entry: FileEntry) -> None:
    """A file must lie inside the directory, links followed, and have the size that the manifest gives."""
    parts = PurePosixPath(name).parts
    inside = parts and not name.startswith("/") and ".." not in parts and "\\" not in name and "\0" not in name
    path = directory / name
    root = os.path.realpath(directory)
    if not inside or os.path.commonpath([root, os.path.realpath(path)]) != root:
        raise CheckpointError(f"{directory / MANIFEST}: names the file {name!r}, which is not inside the checkpoint")
    if not path.is_file():
        raise CheckpointError(f"{path}: missing; the checkpoint is incomplete, use another one")
    size = path.stat().st_size
    if size != entry.bytes:
        word = "truncated" if size < entry.bytes else "too long"
        raise CheckpointError(f"{path}: {word} ({size:,} bytes, expected {entry.bytes:,}); use another checkpoint")


def encode_numbers(value: Any) -> Any:
    """Non-finite floats as `{"non_finite": "nan"}`, since JSON has none; everything else unchanged."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"non_finite": str(value)}
    if isinstance(value, Mapping):
        return {str(key): encode_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode_numbers(item) for item in value]
    return value


def decode_numbers(value: Any) -> Any:
    """The inverse of `encode_numbers`."""
    if isinstance(value, dict):
        if set(value) == {"non_finite"}:
            return _NON_FINITE.get(str(value["non_finite"]), value)
        return {key: decode_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode_numbers(item) for item in value]
    return value


def parse_model(manifest: Manifest, where: Path) -> ModelConfig:
    config = _parse(ModelConfig, manifest.model, where)
    if config.n_layers > len(manifest.tensors):  # or listing its tensors would never end
        raise CheckpointError(
            f"{where / MANIFEST}: claims {config.n_layers:,} layers, but lists {len(manifest.tensors):,} tensors"
        )
    return config


def parse_run(manifest: Manifest, where: Path) -> RunConfig:
    """The run's configuration; a checkpoint that holds only a model (an imported one) has none."""
    if manifest.config is None:
        raise CheckpointError(
            f"{where}: holds a model but no run, so it cannot be resumed; start from it with `init_from`"
        )
    return _parse(RunConfig, manifest.config, where)


def _parse(kind: type[_Config], data: dict[str, Any], where: Path) -> _Config:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(
            f"{where / MANIFEST}: its configuration does not fit this version of Modelworks: {place}: {first['msg']}"
        ) from None


def _check_own_checksum(directory: Path, text: bytes) -> None:
    path = directory / MANIFEST_CRC
    if not path.is_file():
        raise CheckpointError(f"{path}: missing; the checkpoint is incomplete, use another one")
    with path.open("rb") as file:
        expected = file.read(64).decode("ascii", "replace").strip()
    if expected != f"{zlib.crc32(text):08x}":
        raise CheckpointError(f"{directory / MANIFEST}: was changed after it was written (its checksum differs)")


def _tensor_problem(tensor: TensorEntry, files: Mapping[str, FileEntry]) -> str | None:
    if tensor.dtype not in DTYPES:
        return f"unknown dtype {tensor.dtype!r}"
    if any(size < 0 for size in tensor.shape):
        return f"impossible shape {tensor.shape}"
    itemsize, covered = DTYPES[tensor.dtype].itemsize, 0
    for piece in tensor.pieces:
        if piece.file not in files:
            return f"lies in {piece.file!r}, which is not among the checkpoint's files"
        fits = len(piece.offset) == len(piece.extent) == len(tensor.shape) and all(
            start >= 0 and extent >= 0 and start + extent <= size
            for start, extent, size in zip(piece.offset, piece.extent, tensor.shape, strict=True)
        )
        if not fits:
            return f"piece at {piece.offset} of {piece.extent} is outside the shape {tensor.shape}"
        if piece.bytes != math.prod(piece.extent) * itemsize or piece.bytes > files[piece.file].bytes:
            return f"piece of {piece.extent} cannot have {piece.bytes:,} bytes"
        covered += math.prod(piece.extent)
    if covered != math.prod(tensor.shape) or _any_overlap(tensor.pieces):
        return "its pieces do not cover it exactly once"
    return None


def _any_overlap(pieces: list[Piece]) -> bool:
    def overlap(a: Piece, b: Piece) -> bool:
        return all(s < t + f and t < s + e for s, e, t, f in zip(a.offset, a.extent, b.offset, b.extent, strict=True))

    return any(overlap(a, b) for i, a in enumerate(pieces) for b in pieces[:i])
