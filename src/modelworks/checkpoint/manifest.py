"""The manifest: one JSON file that says what a checkpoint is and where each logical tensor lies.

The idea: tensors are *logical*: full name, dtype and global shape. Each is cut by a grid, and every cell of the grid is
one piece in one file. A reader takes what it needs from any layout; loading is resharding.

The invariant: the manifest is written last, so where it is, everything is; `manifest.checksum` guards the manifest,
which guards everything else. Nothing in a manifest is believed before it is checked against the files that are there:
what it can make a reader allocate is bounded by their sizes. docs/checkpoint-format.md is the specification.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from modelworks.checkpoint.checksums import XXH3, Scheme, digest
from modelworks.checkpoint.errors import CheckpointError, CorruptedCheckpoint
from modelworks.checkpoint.formats.safetensors_files import DTYPES, parse_json
from modelworks.checkpoint.grid import Cuts, cell_volumes, cuts_problem, n_cells
from modelworks.checkpoint.names import MANIFEST as MANIFEST
from modelworks.checkpoint.names import MANIFEST_CHECKSUM as MANIFEST_CHECKSUM
from modelworks.checkpoint.storage import Folder, open_folder
from modelworks.config import ModelConfig, RunConfig

FORMAT = "modelworks-checkpoint"
VERSION = 2
MAX_MANIFEST_BYTES = 1 << 28
ADVICE = "use another checkpoint, or copy this one again from where it is whole"
_HEX = b"0123456789abcdef"
_MAX_DIMENSIONS = 64
_Config = TypeVar("_Config", ModelConfig, RunConfig)


class _Stored(BaseModel):
    # Keys that this version does not know are ignored: a change that a reader must understand raises the version.
    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class FileEntry(_Stored):
    """One file. header: digest of all bytes before the tensors of a safetensors file. checksum: of any other file."""

    name: str
    bytes: int = Field(ge=0, lt=2**63)
    header: str | None = Field(default=None, pattern="^[0-9a-f]{16}$")
    checksum: str | None = Field(default=None, pattern="^[0-9a-f]{8,16}$")


class TokenizerEntry(_Stored):
    """The tokeniser's files in the checkpoint, and the SHA-256 over their sorted names and contents."""

    directory: str
    sha256: str


@dataclass(frozen=True)
class TensorEntry:
    """One logical tensor. dtype: the safetensors name. shape: global. files, checksums: of each cell, row-major.

    key: its name inside the files; tied tensors share it, and all of their pieces.
    """

    section: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    cuts: Cuts
    files: NDArray[np.int64]
    checksums: Sequence[str]
    key: str

    @property
    def full_name(self) -> str:
        """For messages."""
        return f"{self.section}/{self.name}"

    def piece_bytes(self) -> NDArray[np.int64]:
        """Of every cell."""
        return cell_volumes(self.cuts) * DTYPES[self.dtype].itemsize


class Head(_Stored):
    """What a manifest says besides files and tensors, the same in all versions."""

    format: Literal["modelworks-checkpoint"]
    version: int
    created: str
    writer: str
    step: int = Field(ge=0, lt=2**63)
    model: dict[str, Any]
    config: dict[str, Any] | None
    layout: dict[str, Any]
    tokenizer: TokenizerEntry | None
    state: dict[str, Any]
    metrics: dict[str, Any]


@dataclass(frozen=True)
class Manifest:
    """A manifest that was checked, of whatever version."""

    head: Head
    scheme: Scheme
    files: Sequence[FileEntry]
    tensors: Sequence[TensorEntry]

    @property
    def step(self) -> int:
        return self.head.step

    @property
    def metrics(self) -> dict[str, Any]:
        return self.head.metrics


class _Version2(Head):
    checksum: Literal["xxh3-64"]
    block_bytes: int = Field(ge=1 << 12, le=1 << 30, multiple_of=16)
    files: list[FileEntry]
    tensors: list[Any]


_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def read_manifest(where: Folder | Path | str) -> Manifest:
    """Read and check the manifest of a checkpoint; every claim is checked against the sizes of the files.

    Raises CheckpointError for what is no checkpoint or of a newer version, `CorruptedCheckpoint` for a damaged one.
    """
    folder = open_folder(where) if isinstance(where, str | Path) else where
    path = f"{folder.label}/{MANIFEST}"
    sizes = folder.sizes()
    size = sizes.get(MANIFEST)
    if size is None:
        raise CheckpointError(f"{folder.label}: not a checkpoint (no {MANIFEST})")
    if size > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{path}: larger than a manifest may be ({MAX_MANIFEST_BYTES:,} bytes)")
    text = folder.read(MANIFEST, 0, size)
    try:
        raw = parse_json(text, path)
    except CheckpointError as error:
        raise CorruptedCheckpoint(f"{error}; {ADVICE}") from None
    if raw.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not a {FORMAT} manifest (format is {raw.get('format')!r})")
    version = raw.get("version")
    if type(version) is not int or version < 1:
        raise CheckpointError(f"{path}: format version {version!r} does not exist")
    if version > VERSION:
        raise CheckpointError(
            f"{path}: format version {version} is newer than this Modelworks reads ({VERSION}); upgrade Modelworks"
        )
    if version == 1:
        from modelworks.checkpoint.manifest_v1 import read_version_1

        manifest = read_version_1(folder, raw, text)
        _check_files(folder, manifest.files, sizes)
        return manifest
    _check_own_checksum(folder, digest(text))
    stored = validated(_Version2, raw, path)
    _check_files(folder, stored.files, sizes)
    scheme = Scheme(XXH3.name, XXH3.digits, stored.block_bytes, XXH3.digest)
    return Manifest(stored, scheme, stored.files, _tensors(stored, scheme, path))


def validated(kind: type[_Model], raw: Mapping[str, Any], path: str) -> _Model:
    """The manifest as that kind of model, or `CorruptedCheckpoint` naming the first key that is wrong."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise CorruptedCheckpoint(f"{path}: {place}: {first['msg']}; the manifest is corrupted") from None


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


def parse_model(manifest: Manifest, label: str) -> ModelConfig:
    config = _parse(ModelConfig, manifest.head.model, label)
    if config.n_layers > len(manifest.tensors):  # or listing its tensors would never end
        raise CheckpointError(
            f"{label}/{MANIFEST}: claims {config.n_layers:,} layers, but lists {len(manifest.tensors):,} tensors"
        )
    return config


def parse_run(manifest: Manifest, label: str) -> RunConfig:
    """The run's configuration; a checkpoint that holds only a model (an imported one) has none."""
    if manifest.head.config is None:
        raise CheckpointError(
            f"{label}: holds a model but no run, so it cannot be resumed; start from it with `init_from`"
        )
    return _parse(RunConfig, manifest.head.config, label)


def _parse(kind: type[_Config], data: dict[str, Any], label: str) -> _Config:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(
            f"{label}/{MANIFEST}: its configuration does not fit this version of Modelworks: {place}: {first['msg']}"
        ) from None


def _check_own_checksum(folder: Folder, found: str) -> None:
    """The file has one digest on each line: two while a manifest is being replaced where nothing can be renamed."""
    size = folder.size(MANIFEST_CHECKSUM)
    if size is None:
        raise CorruptedCheckpoint(
            f"{folder.label}/{MANIFEST_CHECKSUM}: missing; the checkpoint is incomplete; {ADVICE}"
        )
    accepted = folder.read(MANIFEST_CHECKSUM, 0, min(size, 1024)).decode("ascii", "replace").split()
    if found not in accepted:
        raise CorruptedCheckpoint(
            f"{folder.label}/{MANIFEST}: was changed after it was written (its checksum differs); {ADVICE}"
        )


def _check_files(folder: Folder, files: Sequence[FileEntry], sizes: Mapping[str, int]) -> None:
    """Every file must lie inside the checkpoint, links followed, and have the size that the manifest gives."""
    if len({file.name for file in files}) != len(files):
        raise CorruptedCheckpoint(f"{folder.label}/{MANIFEST}: lists a file twice; the manifest is corrupted")
    for file in files:
        size = sizes.get(file.name)
        if size is None:
            size = folder.size(file.name)  # raises for one that lies outside
        check_size(folder, file, size)


def check_size(folder: Folder, file: FileEntry, size: int | None) -> None:
    if size is None:
        raise CorruptedCheckpoint(f"{folder.label}/{file.name}: missing; the checkpoint is incomplete; {ADVICE}")
    if size != file.bytes:
        word = "truncated" if size < file.bytes else "too long"
        raise CorruptedCheckpoint(
            f"{folder.label}/{file.name}: {word} ({size:,} bytes, expected {file.bytes:,}); {ADVICE}"
        )


def _tensors(stored: _Version2, scheme: Scheme, path: str) -> list[TensorEntry]:
    file_bytes = np.array([file.bytes for file in stored.files], np.int64)
    used = np.zeros(len(file_bytes), np.int64)
    entries: dict[tuple[str, str], TensorEntry] = {}
    by_key: dict[str, TensorEntry] = {}
    for number, raw in enumerate(stored.tensors):
        entry = _tensor(raw, number, file_bytes, scheme, path)
        problem = "appears twice" if (entry.section, entry.name) in entries else None
        first = by_key.setdefault(entry.key, entry)
        if first is entry:
            used[entry.files] += entry.piece_bytes()
            if (used[entry.files] > file_bytes[entry.files]).any():
                problem = "its files are too short for all that they shall hold"
        elif not _same_pieces(first, entry):
            problem = f"shares the key {entry.key!r} with {first.full_name}, but not its pieces"
        if problem:
            raise CorruptedCheckpoint(f"{path}: tensor `{entry.full_name}`: {problem}; the manifest is corrupted")
        entries[entry.section, entry.name] = entry
    return list(entries.values())


def _tensor(raw: Any, number: int, file_bytes: NDArray[np.int64], scheme: Scheme, path: str) -> TensorEntry:
    fields = raw if isinstance(raw, dict) else {}
    section, name, dtype = fields.get("section"), fields.get("name"), fields.get("dtype")
    if not isinstance(section, str) or not isinstance(name, str):
        raise CorruptedCheckpoint(f"{path}: tensors.{number}: has no section and name; the manifest is corrupted")
    shape, cuts, files, checksums = (fields.get(key) for key in ("shape", "cuts", "files", "checksums"))
    key = fields.get("key", f"{section}/{name}")
    problem = _shape_problem(dtype, shape, cuts)
    if problem is None:
        entry = TensorEntry(
            section, name, dtype, tuple(shape), tuple(map(tuple, cuts)), _whole_numbers(files), checksums, key
        )
        problem = _pieces_problem(entry, file_bytes, scheme)
    if problem:
        raise CorruptedCheckpoint(f"{path}: tensor `{section}/{name}`: {problem}; the manifest is corrupted")
    return entry


def _shape_problem(dtype: Any, shape: Any, cuts: Any) -> str | None:
    if not isinstance(dtype, str) or dtype not in DTYPES:
        return f"unknown dtype {dtype!r}"
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS:
        return "its shape is no list of sizes"
    if not all(type(size) is int and size >= 0 for size in shape) or math.prod(shape) * 8 >= 2**63:
        return f"impossible shape {shape}"
    return cuts_problem(cuts, shape)


def _pieces_problem(entry: TensorEntry, file_bytes: NDArray[np.int64], scheme: Scheme) -> str | None:
    count, files, checksums = n_cells(entry.cuts), entry.files, entry.checksums
    if not isinstance(entry.key, str):
        return "its key is no text"
    if len(files) != count or not isinstance(checksums, list) or len(checksums) != count:
        return f"its cuts make {count:,} pieces, but it does not list a file and a checksum for each"
    if count == 0:
        return None
    if files.min() < 0 or files.max() >= len(file_bytes):
        return "lies in a file that is not among the checkpoint's files"
    if len(np.unique(files)) != count:
        return "two of its pieces lie in one file"
    sizes = entry.piece_bytes()
    if (sizes > file_bytes[files]).any():
        return "a piece is larger than the file that it lies in"
    if set(map(type, checksums)) != {str}:
        return "its checksums are no text"
    lengths = np.fromiter(map(len, checksums), np.int64, count)
    together = "".join(checksums)
    expected = -(-sizes // scheme.block_bytes) * scheme.digits
    if (lengths != expected).any() or not together.isascii() or together.encode().translate(None, _HEX):
        return f"its checksums are not {scheme.digits} hexadecimal digits for each block"
    return None


def _whole_numbers(value: Any) -> NDArray[np.int64]:
    """A JSON list of whole numbers; no numbers at all where it is something else."""
    nothing = np.zeros(0, np.int64)
    if not isinstance(value, list) or not value or set(map(type, value)) != {int}:
        return nothing
    try:
        return np.array(value, np.int64)
    except OverflowError:
        return nothing


def _same_pieces(one: TensorEntry, other: TensorEntry) -> bool:
    same = (one.dtype, one.shape, one.cuts) == (other.dtype, other.shape, other.cuts)
    return same and np.array_equal(one.files, other.files) and list(one.checksums) == list(other.checksums)


_Model = TypeVar("_Model", bound=BaseModel)
