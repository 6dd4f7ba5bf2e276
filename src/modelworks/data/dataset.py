"""`Dataset`: tokenised documents on disk, by source and split, with their tokeniser.

One data set serves every run over the same texts and tokeniser: how it is packed, mixed and shuffled is the
loader's business and no part of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from modelworks.config import UserError
from modelworks.data.shards import FileRecord, StreamRecord, TokenStream, check_content, check_size, token_dtype
from modelworks.data.tokenizers.tokenizer import Tokenizer

FORMAT_VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class SourceData:
    """One source's two streams, and what reading it left out (a count by reason)."""

    name: str
    train: TokenStream
    validation: TokenStream
    skipped: dict[str, int]


class Dataset:
    """directory: where it lies. reused: whether `build_dataset` found it ready rather than built it."""

    def __init__(self, directory: Path, manifest: dict[str, Any], *, reused: bool = True) -> None:
        self.directory = directory
        self.manifest = manifest
        self.reused = reused
        self.dtype: np.dtype[Any] = token_dtype(manifest["vocab_size"])
        self.sources = tuple(
            SourceData(
                row["name"],
                TokenStream(directory, StreamRecord.read(row["train"]), self.dtype),
                TokenStream(directory, StreamRecord.read(row["validation"]), self.dtype),
                row["skipped"],
            )
            for row in manifest["sources"]
        )

    @property
    def key(self) -> str:
        """A hash of the texts, how they were read, the tokeniser and the split: the same everywhere."""
        return self.directory.name

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.directory / "tokenizer")

    @property
    def tokenizer_directory(self) -> Path:
        return self.directory / "tokenizer"

    @property
    def vocab_size(self) -> int:
        """The largest id plus one: what a model's vocabulary must hold."""
        return int(self.manifest["vocab_size"])

    @property
    def train_tokens(self) -> int:
        return sum(len(source.train) for source in self.sources)

    @property
    def validation_tokens(self) -> int:
        return sum(len(source.validation) for source in self.sources)

    def require_vocabulary(self, vocab_size: int) -> None:
        """Raises UserError where a model of `vocab_size` has no embedding for some of the ids."""
        if vocab_size < self.vocab_size:
            raise UserError(
                f"model.vocab_size is {vocab_size}, but the tokenizer has {self.vocab_size} tokens: "
                f"set model.vocab_size to at least {self.vocab_size}"
            )

    def validation_texts(self, limit: int) -> list[str]:
        """The first `limit` validation documents' texts, sources in turn."""
        streams = [source.validation for source in self.sources if source.validation.n_documents]
        most = max(stream.n_documents for stream in streams)
        places = [(stream, number) for number in range(min(most, limit)) for stream in streams]
        return [stream.text(number) for stream, number in places if number < stream.n_documents][:limit]

    def verify(self) -> int:
        """Read every file and compare its checksum; the number of files. Raises UserError."""
        files = _files(self.manifest)
        for record in files:
            check_content(self.directory, record)
        return len(files)


def open_dataset(directory: str | Path, *, reused: bool = True) -> Dataset:
    """Open a built data set. Every file's size is checked. Raises UserError where it is not whole."""
    root = Path(directory).expanduser()
    path = root / MANIFEST
    if not path.exists():
        raise UserError(f"{root}: not a data set (no {MANIFEST}): build one with `modelworks data build CONFIG`")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["format_version"]
        if version != FORMAT_VERSION:
            raise UserError(f"{path}: format version {version}, this Modelworks reads {FORMAT_VERSION}: build it again")
        for record in _files(manifest):
            check_size(root, record)
        return Dataset(root, manifest, reused=reused)
    except OSError as error:
        raise UserError(f"{error.filename or path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a data set's manifest ({error})") from None


def _files(manifest: dict[str, Any]) -> list[FileRecord]:
    streams = [StreamRecord.read(source[split]) for source in manifest["sources"] for split in ("train", "validation")]
    own = [FileRecord(**row) for row in manifest["tokenizer_files"]]
    return [*own, *(file for stream in streams for file in stream.files())]
