"""Reading a checkpoint: strict, bounded, one tensor at a time.

The invariant: a tensor is only handed out after its dtype, shape and checksum agree with the manifest; loading into
a model fills every parameter exactly once and uses every tensor, or says which do not match.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelworks.checkpoint.errors import CheckpointError
from modelworks.checkpoint.formats.safetensors_files import DTYPES, SafetensorsFile, byte_view
from modelworks.checkpoint.manifest import (
    MANIFEST,
    MANIFEST_CRC,
    Manifest,
    Piece,
    TensorEntry,
    check_file,
    decode_numbers,
    parse_model,
    parse_run,
    read_manifest,
)
from modelworks.checkpoint.names import TEMPORARY
from modelworks.config import ModelConfig, RunConfig

_ADVICE = "the bytes on disk changed; use another checkpoint"


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint directory. Raises CheckpointError unless it is complete: every file there with its size."""
    return Checkpoint(path, read_manifest(path))


class Checkpoint:
    """A complete checkpoint. Tensors are read from disk when asked for, and checked then."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._opened: dict[str, SafetensorsFile] = {}

    @property
    def step(self) -> int:
        return self.manifest.step

    @cached_property
    def config(self) -> RunConfig:
        """The run's configuration; raises CheckpointError for an imported model, which has none."""
        return parse_run(self.manifest, self.path)

    @cached_property
    def model_config(self) -> ModelConfig:
        return parse_model(self.manifest, self.path)

    @cached_property
    def state(self) -> dict[str, Any]:
        return dict(decode_numbers(self.manifest.state))

    @cached_property
    def metrics(self) -> dict[str, float]:
        return dict(decode_numbers(self.manifest.metrics))

    @property
    def tokenizer(self) -> Path | None:
        """The directory of the tokeniser's files."""
        entry = self.manifest.tokenizer
        return None if entry is None else self.path / entry.directory

    def sections(self) -> list[str]:
        return list(self._sections)

    def tensor_types(self, section: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Full tensor name -> (dtype, global shape), in the order on disk."""
        ordered = sorted(self._section(section).values(), key=lambda tensor: tensor.pieces[0].file)
        return {tensor.name: (DTYPES[tensor.dtype], tuple(tensor.shape)) for tensor in ordered}

    def shapes(self, section: str) -> dict[str, tuple[int, ...]]:
        """Full tensor name -> global shape."""
        return {tensor.name: tuple(tensor.shape) for tensor in self._section(section).values()}

    def tensor(self, section: str, name: str) -> Tensor:
        """One logical tensor, checked against its checksum."""
        return self._read(self._section(section)[name])

    def tensors(self, section: str) -> Iterator[tuple[str, Tensor]]:
        """(full name, tensor) in the order they lie on disk, each checked against its checksum."""
        for tensor in sorted(self._section(section).values(), key=lambda tensor: tensor.pieces[0].file):
            yield tensor.name, self._read(tensor)

    def expect(self, section: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError, naming the first tensors that do not match, unless the section has these shapes."""
        check_shapes(f"{self.path}: section `{section}`", self.shapes(section), shapes)

    def load(self, section: str, targets: Mapping[str, Tensor]) -> None:
        """Copy the section into `targets` (full name -> tensor), strictly: same names and shapes, nothing left over."""
        self.expect(section, {name: tuple(tensor.shape) for name, tensor in targets.items()})
        with torch.no_grad():
            for name, tensor in self.tensors(section):
                targets[name].copy_(tensor)

    def verify(self, sections: Collection[str] | None = None) -> None:
        """Read the sections (default: all) once and check every checksum; CheckpointError names file and tensor."""
        tensors = [t for t in self.manifest.tensors if sections is None or t.section in sections]
        pieces = {(p.file, p.key): (t, p) for t in tensors for p in t.pieces}
        for tensor, piece in pieces.values():
            self._piece(tensor, piece)
        for name, entry in self.manifest.files.items():
            if not name.endswith(".safetensors"):
                path = self.path / name
                if f"{zlib.crc32(path.read_bytes()):08x}" != entry.crc32:
                    raise CheckpointError(f"{path}: its checksum differs from the manifest; {_ADVICE}")

    def _section(self, section: str) -> dict[str, TensorEntry]:
        return self._sections.get(section, {})

    @cached_property
    def _sections(self) -> dict[str, dict[str, TensorEntry]]:
        sections: dict[str, dict[str, TensorEntry]] = {}
        for tensor in self.manifest.tensors:
            sections.setdefault(tensor.section, {})[tensor.name] = tensor
        return sections

    def _read(self, tensor: TensorEntry) -> Tensor:
        if tensor.pieces[0].extent == tensor.shape:
            return self._piece(tensor, tensor.pieces[0])
        whole = torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype])
        for piece in tensor.pieces:
            box = tuple(slice(o, o + e) for o, e in zip(piece.offset, piece.extent, strict=True))
            whole[box] = self._piece(tensor, piece)
        return whole

    def _piece(self, tensor: TensorEntry, piece: Piece) -> Tensor:
        if piece.file not in self._opened:
            check_file(self.path, piece.file, self.manifest.files[piece.file])
            self._opened[piece.file] = SafetensorsFile(self.path / piece.file)
        file = self._opened[piece.file]
        info = file.tensors.get(piece.key)
        if info is None or info.dtype != DTYPES[tensor.dtype] or list(info.shape) != piece.extent:
            raise CheckpointError(
                f"{file.path}: its header does not hold tensor `{piece.key}` as the manifest describes it; {_ADVICE}"
            )
        value = file.read(piece.key)
        if f"{zlib.crc32(byte_view(value)):08x}" != piece.crc32:
            raise CheckpointError(
                f"{file.path}: the checksum of tensor `{tensor.section}/{tensor.name}` differs; {_ADVICE}"
            )
        return value


def check_shapes(
    where: str, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], limit: int = 5
) -> None:
    """Raise CheckpointError listing the first `limit` names that are missing, unexpected or of another shape."""
    problems = [
        f"`{name}` is missing (expected {list(shape)})"
        if name not in found
        else f"`{name}` has shape {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if tuple(found.get(name, ())) != tuple(shape) or name not in found
    ]
    problems += [f"`{name}` is not in the model" for name in found if name not in expected]
    if problems:
        more = f"; and {len(problems) - limit} more" if len(problems) > limit else ""
        raise CheckpointError(f"{where} is of another model: {'; '.join(problems[:limit])}{more}")


def explain(directory: Path) -> list[str]:
    """What a directory lacks to be a complete checkpoint, one sentence each; an empty list when it is complete."""
    if not directory.is_dir():
        return [f"{directory} does not exist"]
    lacks = []
    if directory.name.startswith(TEMPORARY):
        lacks.append("its name is that of an unfinished write: the writer was stopped before it renamed it")
    lacks += [f"{name} is missing" for name in (MANIFEST_CRC, MANIFEST) if not (directory / name).is_file()]
    if not (directory / MANIFEST).is_file():
        present = sorted(path.name for path in directory.iterdir())
        return [*lacks, f"present: {', '.join(present) or 'nothing'}; the manifest is written last"]
    try:
        open_checkpoint(directory).verify()
    except (CheckpointError, OSError) as error:
        lacks.append(str(error))
    return lacks
