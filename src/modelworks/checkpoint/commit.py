"""The second phase of a save, on one rank: from the part files of all ranks to one checkpoint that is visible.

Each step is durable before the next: tokeniser files, the manifest's checksum, the manifest; then the storage makes it
visible. The part files go before the manifest comes, so that what is complete holds nothing else.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import modelworks
from modelworks.checkpoint.checksums import XXH3, digest
from modelworks.checkpoint.errors import CheckpointError
from modelworks.checkpoint.faults import reached
from modelworks.checkpoint.grid import grid_of
from modelworks.checkpoint.manifest import FORMAT, VERSION, encode_numbers
from modelworks.checkpoint.names import MANIFEST, MANIFEST_CHECKSUM
from modelworks.checkpoint.part import Part, Piece, part_name, read_part
from modelworks.checkpoint.storage import Folder, Storage, WritableFolder
from modelworks.config import ModelConfig, RunConfig


@dataclass(frozen=True)
class Identity:
    """What a checkpoint says of itself besides its tensors.

    config: of the run; None: a model that belongs to no run. state: what JSON can hold, non-finite numbers included.
    layout: how the run was split, for people. tokenizer: a file or directory that is copied in.
    """

    model: ModelConfig
    config: RunConfig | None
    layout: Mapping[str, Any]
    state: Mapping[str, Any]
    metrics: Mapping[str, float]
    tokenizer: Path | None

    @classmethod
    def of_run(
        cls,
        config: RunConfig,
        *,
        world_size: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, float],
        tokenizer: Path | None,
    ) -> Identity:
        layout = {"world_size": world_size, **config.parallel.model_dump(mode="json")}
        return cls(config.model, config, layout, state, metrics, tokenizer)


def commit(storage: Storage, attempt: str, step: int, identity: Identity, world_size: int) -> Folder:
    """Complete what `world_size` ranks have written. Raises OSError or `CheckpointError`; nothing is visible then."""
    folder = storage.writing(attempt)
    parts = [read_part(folder, rank) for rank in range(world_size)]
    reached("parts read")
    for rank in range(world_size):
        folder.remove(part_name(folder, rank))
    reached("part files removed")
    write_manifest(folder, step, identity, parts)
    reached("before the commit")
    committed = storage.commit(attempt)
    reached("committed")
    return committed


def write_manifest(folder: WritableFolder, step: int, identity: Identity, parts: Sequence[Part]) -> None:
    """The tokeniser's files and, last, the manifest."""
    files: list[dict[str, Any]] = [
        {"name": file.name, "bytes": file.bytes, "header": file.header, "checksum": None}
        for part in parts
        for file in part.files
    ]
    tensors = list(_tensors(parts, folder.label))
    tokenizer = None if identity.tokenizer is None else _copy_tokenizer(identity.tokenizer, folder, files)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "writer": f"modelworks {modelworks.__version__}",
        "step": step,
        "model": identity.model.model_dump(mode="json"),
        "config": None if identity.config is None else identity.config.model_dump(mode="json", by_alias=True),
        "layout": dict(identity.layout),
        "tokenizer": tokenizer,
        "state": encode_numbers(dict(identity.state)),
        "metrics": encode_numbers(dict(identity.metrics)),
        "checksum": XXH3.name,
        "block_bytes": XXH3.block_bytes,
        "files": files,
        "tensors": tensors,
    }
    text = json.dumps(manifest, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    # Where nothing can be renamed, a complete checkpoint of the same step may be there: until its manifest is replaced
    # it must remain readable, so the checksum file holds both digests.
    older = folder.read(MANIFEST)
    digests = [digest(text), *([] if older is None else [digest(older)])]
    reached("before the manifest's checksum")
    _write(folder, MANIFEST_CHECKSUM, "".join(f"{each}\n" for each in digests).encode())
    reached("before the manifest")
    _write(folder, MANIFEST, text)
    reached("manifest durable")


def _tensors(parts: Sequence[Part], label: str) -> Iterator[dict[str, Any]]:
    """Logical tensors, section by section, by name: the same list whatever the layout."""
    found: dict[tuple[str, str], list[tuple[Piece, int]]] = {}
    first_file = 0
    for part in parts:
        for piece in part.pieces:
            found.setdefault((piece.section, piece.name), []).append((piece, first_file + piece.file))
        first_file += len(part.files)
    for (section, name), pieces in sorted(found.items()):
        first = pieces[0][0]
        kinds = {(piece.dtype, piece.shape) for piece, _ in pieces}
        if len(kinds) > 1:
            raise CheckpointError(f"{label}: ranks disagree about {section}/{name}: {sorted(map(str, kinds))}")
        try:
            cuts, order = grid_of(first.shape, [piece.box for piece, _ in pieces])
        except ValueError as error:
            raise CheckpointError(f"{label}: {section}/{name}: {error}") from None
        yield {
            "section": section,
            "name": name,
            "dtype": first.dtype,
            "shape": first.shape,
            "cuts": cuts,
            "files": [pieces[index][1] for index in order],
            "checksums": [pieces[index][0].checksums for index in order],
            **({"key": first.key} if first.key is not None else {}),
        }


def _copy_tokenizer(source: Path, folder: WritableFolder, files: list[dict[str, Any]]) -> dict[str, str]:
    sources = [source] if source.is_file() else sorted(path for path in source.iterdir() if path.is_file())
    if not sources:
        raise CheckpointError(f"{source}: no tokeniser files to keep with the checkpoint")
    sha256 = hashlib.sha256()
    for path in sources:
        data, name = path.read_bytes(), f"tokenizer/{path.name}"
        sha256.update(path.name.encode() + b"\0" + len(data).to_bytes(8, "little") + data)
        reached("before a tokeniser file")
        _write(folder, name, data)
        files.append({"name": name, "bytes": len(data), "header": None, "checksum": digest(data)})
    return {"directory": "tokenizer", "sha256": sha256.hexdigest()}


def _write(folder: WritableFolder, name: str, data: bytes) -> None:
    with folder.create(name) as file:
        file.write(data)
