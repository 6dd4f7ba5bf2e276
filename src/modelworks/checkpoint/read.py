"""Reading a checkpoint: strict, bounded, and only what is asked for.

The invariant: an element is only handed out after its dtype, shape and checksum agree with the manifest; loading into
a model fills every parameter exactly once and uses every tensor, or says which do not match.

A slice of a tensor reads the blocks that hold it, whatever the layout that wrote the checkpoint: loading is
resharding.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelworks.checkpoint.block_checks import BlockChecks
from modelworks.checkpoint.errors import ADVICE, CheckpointError, CorruptedCheckpoint
from modelworks.checkpoint.formats.safetensors_files import DTYPES
from modelworks.checkpoint.grid import Cell, cell_box, cells_in, whole_box
from modelworks.checkpoint.manifest import (
    FileEntry,
    Manifest,
    check_size,
    decode_numbers,
    parse_model,
    parse_run,
    read_manifest,
)
from modelworks.checkpoint.names import MANIFEST
from modelworks.checkpoint.shard_reader import ShardReader
from modelworks.checkpoint.storage import Folder, check_inside, open_folder
from modelworks.checkpoint.tensor_entries import TensorEntry
from modelworks.config import ModelConfig, RunConfig


def open_checkpoint(where: Path | str | Folder) -> Checkpoint:
    """Open a checkpoint: its directory, its URL, or its folder in a storage.

    Raises CheckpointError unless it is complete: every file there with its size. Contents are checked when read.
    """
    folder = open_folder(where) if isinstance(where, str | Path) else where
    return Checkpoint(folder, read_manifest(folder))


class Checkpoint:
    """A complete checkpoint. Tensors are read when asked for, and checked then."""

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._shards = ShardReader(folder, manifest)

    @property
    def label(self) -> str:
        """For messages: path or URL."""
        return self.folder.label

    @property
    def path(self) -> Path | str:
        """The directory, or the URL of one that is not on this machine."""
        return self.folder.local() or self.folder.label

    @property
    def step(self) -> int:
        return self.manifest.step

    @cached_property
    def config(self) -> RunConfig:
        """The run's configuration; raises CheckpointError for an imported model, which has none."""
        return parse_run(self.manifest, self.label)

    @cached_property
    def model_config(self) -> ModelConfig:
        return parse_model(self.manifest, self.label)

    @cached_property
    def state(self) -> dict[str, Any]:
        return dict(decode_numbers(self.manifest.head.state))

    @cached_property
    def metrics(self) -> dict[str, float]:
        return dict(decode_numbers(self.manifest.metrics))

    @property
    def layout(self) -> dict[str, Any]:
        """How the run was split that wrote it, `world_size` included: for people, a reader never needs it."""
        return dict(self.manifest.head.layout)

    @cached_property
    def tokenizer(self) -> Path | None:
        """The directory of the tokeniser's files, checked; fetched, where the checkpoint is not on this machine, to a
        temporary one that lives as long as this object. None where there is none."""
        entry = self.manifest.head.tokenizer
        if entry is None:
            return None
        check_inside(self.label, entry.directory)
        contents = {file.name: self._checked(file) for file in self._other_files(f"{entry.directory}/")}
        if not contents:
            raise CorruptedCheckpoint(f"{self.label}/{MANIFEST}: lists no file of its tokeniser; {ADVICE}")
        local = self.folder.local()
        if local is not None:
            return local / entry.directory
        fetched = Path(tempfile.mkdtemp(prefix="modelworks-tokenizer-"))
        weakref.finalize(self, shutil.rmtree, fetched, ignore_errors=True)
        for name, data in contents.items():
            target = fetched / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        return fetched / entry.directory

    def sections(self) -> list[str]:
        return list(self._sections)

    def tensor_types(self, section: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Full tensor name -> (dtype, global shape), in the order on disk."""
        return {tensor.name: (DTYPES[tensor.dtype], tensor.shape) for tensor in self._in_order(section)}

    def shapes(self, section: str) -> dict[str, tuple[int, ...]]:
        """Full tensor name -> global shape."""
        return {tensor.name: tensor.shape for tensor in self._section(section).values()}

    def tensor(self, section: str, name: str) -> Tensor:
        """One logical tensor, whole, checked."""
        entry = self._section(section)[name]
        return self._read(entry, whole_box(entry.shape))

    def slice(self, section: str, name: str, bounds: Sequence[tuple[int, int]]) -> Tensor:
        """The part of a logical tensor within bounds (start, stop) along each dimension; only that is read, and
        checked. Raises ValueError for bounds outside of it, KeyError for a name that it does not have."""
        entry = self._section(section)[name]
        inside = len(bounds) == len(entry.shape) and all(
            0 <= start <= stop <= size for (start, stop), size in zip(bounds, entry.shape, strict=True)
        )
        if not inside:
            raise ValueError(f"{entry.full_name}: {list(bounds)} is not inside its shape {list(entry.shape)}")
        return self._read(entry, tuple((start, stop) for start, stop in bounds))

    def tensors(self, section: str) -> Iterator[tuple[str, Tensor]]:
        """(full name, whole tensor) in the order they lie on disk, each checked."""
        for entry in self._in_order(section):
            yield entry.name, self._read(entry, whole_box(entry.shape))

    def expect(self, section: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError, naming the first tensors that do not match, unless the section has these shapes."""
        check_shapes(f"{self.label}: section `{section}`", self.shapes(section), shapes)

    def load(self, section: str, targets: Mapping[str, Tensor]) -> None:
        """Copy the section into `targets` (full name -> tensor), strictly: same names and shapes, nothing left over."""
        self.expect(section, {name: tuple(tensor.shape) for name, tensor in targets.items()})
        with torch.no_grad():
            for name, tensor in self.tensors(section):
                targets[name].copy_(tensor)

    def verify(self, sections: Collection[str] | None = None, part: tuple[int, int] = (0, 1)) -> int:
        """Read the sections (default: all) once and check every checksum; returns the bytes checked.

        part: (index, count): only that share of them, so that `count` processes check all of it together. Raises
        CorruptedCheckpoint that names file and tensor.
        """
        index, count = part
        pieces, before = self._all_pieces if sections is None else _pieces(self.manifest.tensors, sections)
        total = max(int(before[-1]), 1)
        # Shares are ranges of pieces: found, not searched for, since there may be many of both.
        first, last = (int(np.searchsorted(before[:-1], -(-total * end // count))) for end in (index, index + 1))
        checked = 0
        for entry, cell in pieces[first:last]:
            checked += self._shards.check(entry, Cell(cell, cell_box(entry.cuts, cell)))
        return checked + (self.check_files() if index == 0 else 0)

    def check_files(self) -> int:
        """Read what is no shard, such as the tokeniser's files, and check it; returns the bytes checked."""
        return sum(len(self._checked(file)) for file in self._other_files())

    def _other_files(self, prefix: str = "") -> Iterator[FileEntry]:
        return (file for file in self.manifest.files if file.checksum is not None and file.name.startswith(prefix))

    def _checked(self, file: FileEntry) -> bytes:
        """The contents of a file that is no shard."""
        check_size(self.folder, file, self.folder.size(file.name))
        data = self.folder.read(file.name, 0, file.bytes)
        if self.manifest.scheme.digest(data) != file.checksum:
            raise CorruptedCheckpoint(f"{self.label}/{file.name}: its checksum differs from the manifest; {ADVICE}")
        return data

    def _in_order(self, section: str) -> list[TensorEntry]:
        return sorted(self._section(section).values(), key=lambda entry: int(entry.files[0]) if len(entry.files) else 0)

    def _section(self, section: str) -> dict[str, TensorEntry]:
        return self._sections.get(section, {})

    @cached_property
    def _all_pieces(self) -> tuple[list[tuple[TensorEntry, int]], NDArray[np.int64]]:
        """Worked out once for the many shares of `verify`."""
        return _pieces(self.manifest.tensors, None)

    @cached_property
    def _sections(self) -> dict[str, dict[str, TensorEntry]]:
        sections: dict[str, dict[str, TensorEntry]] = {}
        for tensor in self.manifest.tensors:
            sections.setdefault(tensor.section, {})[tensor.name] = tensor
        return sections

    def _read(self, entry: TensorEntry, bounds: tuple[tuple[int, int], ...]) -> Tensor:
        out = torch.empty([stop - start for start, stop in bounds], dtype=DTYPES[entry.dtype])
        with BlockChecks(self.manifest.scheme) as checks:
            for cell in cells_in(entry.cuts, bounds):
                self._shards.read(entry, cell, bounds, out, checks)
        return out


def _pieces(
    tensors: Sequence[TensorEntry], sections: Collection[str] | None
) -> tuple[list[tuple[TensorEntry, int]], NDArray[np.int64]]:
    """Every piece (tensor, number of its cell) of the sections once, by file; the bytes before each, and of all."""
    found = {
        (file, entry.key): (entry, cell, size)
        for entry in tensors
        if sections is None or entry.section in sections
        for cell, (file, size) in enumerate(zip(entry.files.tolist(), entry.piece_bytes().tolist(), strict=True))
    }
    ordered = [piece for _, piece in sorted(found.items(), key=lambda item: item[0])]
    sizes = np.array([0, *(size for _, _, size in ordered)], np.int64)
    return [(entry, cell) for entry, cell, _ in ordered], np.cumsum(sizes)


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
