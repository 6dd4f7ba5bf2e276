"""Sources: a stream of documents out of files, one document in memory at a time.

A source is read in the order of its sorted files, so that the same files always give the same stream.
"""

from __future__ import annotations

import json
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from modelworks.config import SourceConfig, UserError, nearest
from modelworks.data.documents import Decoding, Document, Skipped
from modelworks.data.files import open_bytes, reading, source_files


def read_documents(source: SourceConfig, skipped: Skipped, files: list[Path] | None = None) -> Iterator[Document]:
    """Yield the documents of `source` and count in `skipped` what is left out. Raises UserError."""
    decoding = Decoding(source.name, source.invalid_utf8, skipped)
    for path in source_files(source) if files is None else files:
        with reading(path):
            for identifier, text in _READERS[source.type](path, source, decoding):
                if text is None:
                    continue
                if not text:
                    skipped.empty += 1
                    continue
                yield Document(source.name, identifier, text)


Texts = Iterator[tuple[str, str | None]]  # identifier, text or None where the document is left out


def _read_python(path: Path, source: SourceConfig, decoding: Decoding) -> Texts:
    """Source files say their own encoding (PEP 263). Those that break it are the library's own test inputs."""
    data = path.read_bytes()
    try:
        with path.open("rb") as file:
            encoding = tokenize.detect_encoding(file.readline)[0]
        yield str(path), data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError):
        skipping = Decoding(source.name, "skip", decoding.skipped)
        yield str(path), skipping.text(data, str(path))


def _read_text(path: Path, source: SourceConfig, decoding: Decoding) -> Texts:
    with open_bytes(path) as file:
        if source.split == "file":
            yield str(path), decoding.text(file.read(), str(path))
            return
        paragraph: list[bytes] = []
        first = start = offset = 0
        for number, line in enumerate(file, start=1):
            if line.strip():
                if not paragraph:
                    first, start = number, offset
                paragraph.append(line)
            elif paragraph:
                yield f"{path}:{first}", decoding.text(b"".join(paragraph), str(path), start)
                paragraph = []
            offset += len(line)
        if paragraph:
            yield f"{path}:{first}", decoding.text(b"".join(paragraph), str(path), start)


def _read_jsonl(path: Path, source: SourceConfig, decoding: Decoding) -> Texts:
    offset = 0
    with open_bytes(path) as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            text = decoding.text(line, where, offset)
            offset += len(line)
            if text is None or not text.strip():
                continue
            try:
                row = json.loads(text)
            except json.JSONDecodeError as error:
                raise UserError(f"{where}: not valid JSON ({error.msg} at column {error.colno})") from None
            yield where, decoding.checked(_field(row, source.field, where), where)


def _read_parquet(path: Path, source: SourceConfig, decoding: Decoding) -> Texts:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        file = parquet.ParquetFile(path)
    except arrow.ArrowInvalid as error:
        raise UserError(f"{path}: not a Parquet file ({error})") from None
    with file:
        names = file.schema_arrow.names
        if source.field not in names:
            raise _missing(source.field, names, str(path))
        kind = file.schema_arrow.field(source.field).type
        if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind) or arrow.types.is_binary(kind)):
            raise UserError(f"{path}: column `{source.field}` is {kind}, expected text")
        row = 0
        # small batches: a row group may hold gigabytes
        for batch in file.iter_batches(batch_size=256, columns=[source.field]):
            # as bytes: pyarrow would stop at invalid UTF-8 without saying where
            for value in batch.column(0).cast(arrow.large_binary()):
                data = value.as_py()
                yield f"{path}:{row}", decoding.text(data or b"", f"{path}: row {row}")
                row += 1


_READERS = {
    "python-stdlib": _read_python,
    "text": _read_text,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
}


def _field(row: Any, field: str, where: str) -> str:
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected a JSON object, got {type(row).__name__}")
    if field not in row:
        raise _missing(field, list(row), where)
    value = row[field]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{where}: field `{field}` is {type(value).__name__}, expected text")
    return value


def _missing(field: str, present: list[str], where: str) -> UserError:
    near = nearest(field, present)
    hint = f" (did you mean `{near}`?)" if near else ""
    return UserError(f"{where}: no field `{field}`, present are {', '.join(present) or 'none'}{hint}")
