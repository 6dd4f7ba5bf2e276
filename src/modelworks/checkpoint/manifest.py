"""The manifest: one JSON file that says what a checkpoint is and where each logical tensor lies.

The idea: tensors are *logical*: full name, dtype and global shape. Each is cut by a grid, and every cell of the grid is
one piece in one file. A reader takes what it needs from any layout; loading is resharding.

The invariant: the manifest is written last, so where it is, everything is; `manifest.checksum` guards the manifest,
which guards everything else. Nothing in a manifest is believed before it is checked against the files that are there:
what it can make a reader allocate is bounded by their sizes. docs/checkpoint-format.md is the specification.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from modelworks.checkpoint.checksums import XXH3, Scheme, digest
from modelworks.checkpoint.errors import ADVICE, CheckpointError, CorruptedCheckpoint
from modelworks.checkpoint.formats.safetensors_files import parse_json
from modelworks.checkpoint.names import MANIFEST as MANIFEST
from modelworks.checkpoint.names import MANIFEST_CHECKSUM as MANIFEST_CHECKSUM
from modelworks.checkpoint.names import is_step, step_name, step_number
from modelworks.checkpoint.storage import Folder, open_folder
from modelworks.checkpoint.tensor_entries import TensorEntry, read_entries
from modelworks.config import ModelConfig, RunConfig

FORMAT = "modelworks-checkpoint"
VERSION = 2
MAX_MANIFEST_BYTES = 1 << 28
_MAX_DEPTH = 64
_Config = TypeVar("_Config", ModelConfig, RunConfig)
_Model = TypeVar("_Model", bound=BaseModel)


class Stored(BaseModel):
    # Keys that this version does not know are ignored: a change that a reader must understand raises the version.
    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class FileEntry(Stored):
    """One file. header: digest of all bytes before the tensors of a safetensors file. checksum: of any other file."""

    name: str
    bytes: int = Field(ge=0, lt=2**63)
    header: str | None = Field(default=None, pattern="^[0-9a-f]{16}$")
    checksum: str | None = Field(default=None, pattern="^[0-9a-f]{8,16}$")


class TokenizerEntry(Stored):
    """The tokeniser's files in the checkpoint, and the SHA-256 over their sorted names and contents."""

    directory: str
    sha256: str


class Head(Stored):
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

    @field_validator("model", "config", "layout", "state", "metrics")
    @classmethod
    def _shallow(cls, value: Any) -> Any:
        """What follows goes through these level by level, and Python's stack is finite."""
        if _is_deeper(value, _MAX_DEPTH):
            raise ValueError(f"nested more than {_MAX_DEPTH} levels deep")
        return value

    @field_validator("metrics")
    @classmethod
    def _numbers(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name, number in value.items():
            number = decode_numbers(number)
            try:
                is_number = type(number) in (int, float) and type(float(number)) is float
            except OverflowError:  # a whole number of hundreds of digits
                is_number = False
            if not is_number:
                raise ValueError(f"`{name}` is no number that a metric can be")
        return value


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
        _check_name(folder, manifest.step)
        _check_files(folder, manifest.files, sizes)
        return manifest
    _check_own_checksum(folder, digest(text))
    stored = validated(_Version2, raw, path)
    _check_name(folder, stored.step)
    _check_files(folder, stored.files, sizes)
    scheme = Scheme(XXH3.name, XXH3.digits, stored.block_bytes, XXH3.digest)
    tensors = read_entries(stored.tensors, [file.bytes for file in stored.files], scheme, path)
    return Manifest(stored, scheme, stored.files, tensors)


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


def _is_deeper(value: Any, limit: int) -> bool:
    """Whether lists and objects are nested in each other more than `limit` times."""
    level = [value]
    for _ in range(limit + 1):
        level = [inner for item in level if isinstance(item, dict | list) for inner in _inside(item)]
        if not level:
            return False
    return True


def _inside(item: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return item.values() if isinstance(item, dict) else item


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


def _check_name(folder: Folder, step: int) -> None:
    """Under the name of a later step it would be what a run goes on from, again and again, whatever it saves."""
    if is_step(folder.name) and step_number(folder.name) != step:
        raise CorruptedCheckpoint(
            f"{folder.label}: is the checkpoint of step {step}, by its manifest, and was renamed; name it "
            f"{step_name(step)} again"
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
