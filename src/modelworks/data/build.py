"""`build_dataset`: texts to token shards, once.

A data set's directory is named by a hash of all that decides its content: the sources' bytes and how they are read,
the tokeniser, the share of validation, the format's version. The same texts therefore give the same directory on any
machine, an unchanged build is reused at once, and a changed one never overwrites another.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from modelworks.config import DataConfig, UserError, format_bytes, format_count
from modelworks.data.dataset import FORMAT_VERSION, MANIFEST, Dataset, open_dataset
from modelworks.data.documents import Skipped
from modelworks.data.files import ContentHashes, source_files
from modelworks.data.publish import published, remove_leavings, sole_builder, write_synced
from modelworks.data.scan import Corpus, SourceScan, scan
from modelworks.data.shards import FileRecord, StreamWriter, as_row, token_dtype
from modelworks.data.split import content_fraction, split_of
from modelworks.data.tokenizers.pieces import pieces
from modelworks.data.tokenizers.tokenizer import Tokenizer
from modelworks.data.tokenizers.training import train_tokenizer
from modelworks.data.workers import tokenised

# Below this, starting worker processes takes longer than they save.
_WORTH_PROCESSES = 64 << 20


def build_dataset(config: DataConfig, *, progress: bool = True) -> Dataset:
    """The data set of `config`: found ready, or built. Raises UserError.

    progress: bars and remarks on stderr. `seq_len`, packing, weights and shuffling leave the data set as it is.
    """
    say = Console(stderr=True, quiet=not progress, soft_wrap=True, highlight=False)
    root = Path(config.cache).expanduser() / "datasets"
    corpus = _corpus(config)
    loaded = Tokenizer.load(config.tokenizer) if isinstance(config.tokenizer, str) else None
    with _writing(root):
        return _found_or_built(root, config, corpus, loaded, say)


def _found_or_built(root: Path, config: DataConfig, corpus: Corpus, loaded: Tokenizer | None, say: Console) -> Dataset:
    identity = _identity(config, corpus, loaded, ContentHashes(root.parent / "content-hashes.json"))
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]
    final = root / key
    with sole_builder(root, key, lambda: say.print(f"data: another process is building {final}, waiting for it")):
        remove_leavings(root, key)
        if final.exists():
            dataset = open_dataset(final, reused=True)
            say.print(f"data: reused {final} ({_summary(dataset)})")
            return dataset
        with published(final) as directory:
            _fill(directory, config, corpus, loaded, identity, say)
        dataset = open_dataset(final, reused=False)
    say.print(f"data: built {final} ({_summary(dataset)})")
    return dataset


def _corpus(config: DataConfig) -> Corpus:
    if config.validation.unit != "percent":
        raise UserError(
            f"data.validation: got `{config.validation}`, expected a percentage of the documents, e.g. `1%`"
        )
    names = [source.name for source in config.sources]
    if len(set(names)) < len(names):
        raise UserError(f"data.sources: names must differ, got {', '.join(names)}")
    return Corpus(config.sources, [source_files(s) for s in config.sources], config.validation.value / 100)


def _identity(config: DataConfig, corpus: Corpus, loaded: Tokenizer | None, hashes: ContentHashes) -> dict[str, Any]:
    sources = []
    for source, files in zip(corpus.sources, corpus.files, strict=True):
        contents = hashlib.sha256("\n".join(hashes.of(file) for file in files).encode()).hexdigest()
        sources.append({**source.model_dump(mode="json", exclude={"weight", "path"}), "contents": contents})
    hashes.save()
    tokenizer = config.tokenizer
    return {
        "format_version": FORMAT_VERSION,
        "sources": sources,
        "tokenizer": loaded.fingerprint() if loaded else tokenizer.model_dump(mode="json"),  # type: ignore[union-attr]
        "validation": float(config.validation.value),  # 1 and 1.0 are one share
    }


def _fill(
    directory: Path,
    config: DataConfig,
    corpus: Corpus,
    loaded: Tokenizer | None,
    identity: dict[str, Any],
    say: Console,
) -> None:
    raw = sum(file.stat().st_size for files in corpus.files for file in files)
    with _bar(say, "reading", raw) as advance:
        scans = scan(corpus, advance)
    _say_scans(say, corpus, scans)
    tokenizer = loaded or _train(config, corpus, scans, say)
    tokenizer.save(directory / "tokenizer")
    total = sum(found.text_bytes for found in scans)
    workers = _workers(config.workers, total)
    rows = []
    with _bar(say, f"tokenising ({workers} {'process' if workers == 1 else 'processes'})", total) as advance:
        for place, found in enumerate(scans):
            streams = _write_source(directory, corpus, place, tokenizer.vocab_size, workers, advance)
            rows.append({"name": corpus.sources[place].name, "skipped": dataclasses.asdict(found.skipped), **streams})
    manifest = {
        "format_version": FORMAT_VERSION,
        "identity": identity,
        "vocab_size": tokenizer.vocab_size,
        "start_id": tokenizer.start_id,
        "eos_id": tokenizer.eos_id,
        "sources": rows,
        "tokenizer_files": [dataclasses.asdict(record) for record in _record_files(directory, "tokenizer")],
    }
    write_synced(directory / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def _write_source(
    directory: Path, corpus: Corpus, place: int, vocab_size: int, workers: int, advance: Callable[[int], None]
) -> dict[str, Any]:
    """Tokenise one source into its two streams; their manifest rows."""
    slug = f"{place:02d}-{corpus.sources[place].name}"
    dtype = token_dtype(vocab_size)
    writers = {
        "train": StreamWriter(directory, f"train/{slug}", dtype, keep_text=False),
        "validation": StreamWriter(directory, f"validation/{slug}", dtype, keep_text=True),
    }
    try:
        documents = corpus.documents(place, Skipped())  # counted by the scan already
        for document, ids in tokenised(documents, directory / "tokenizer", workers):
            writers[split_of(document.text, corpus.validation)].write(ids, document.text)
            advance(len(document.text.encode("utf-8")))
        return {split: as_row(writer.finish()) for split, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.close()


def _train(config: DataConfig, corpus: Corpus, scans: list[SourceScan], say: Console) -> Tokenizer:
    """Train on the training split: all of it, or pieces chosen by their hash, about `sample` bytes."""
    training = config.tokenizer
    assert not isinstance(training, str)
    total = sum(found.train_bytes for found in scans)
    share = min(1.0, training.sample / total)
    say.print(
        f"data: training a {training.train} tokenizer on {format_bytes(share * total)} of the training split"
        + (" (data.tokenizer.sample)" if share < 1 else ""),
    )

    def texts() -> Iterator[str]:
        with _bar(say, "training the tokenizer", total) as advance:
            for text in corpus.train_texts():
                yield from (p for p in pieces(text) if share == 1.0 or content_fraction(p, b"tokenizer") < share)
                advance(len(text.encode("utf-8")))

    tokenizer = train_tokenizer(texts(), training)
    if tokenizer.vocab_size < training.vocab_size:
        say.print(
            f"data: the text yields {tokenizer.vocab_size} tokens, fewer than the {training.vocab_size} asked for",
        )
    return tokenizer


def _workers(asked: int, total_bytes: int) -> int:
    if total_bytes < _WORTH_PROCESSES:
        return 1
    return asked or len(os.sched_getaffinity(0))


def _record_files(directory: Path, name: str) -> list[FileRecord]:
    records = []
    for path in sorted((directory / name).iterdir()):
        data = path.read_bytes()
        with path.open("rb") as file:
            os.fsync(file.fileno())
        records.append(FileRecord(f"{name}/{path.name}", len(data), hashlib.sha256(data).hexdigest()))
    return records


def _say_scans(say: Console, corpus: Corpus, scans: list[SourceScan]) -> None:
    for source, found in zip(corpus.sources, scans, strict=True):
        left_out = ", ".join(
            f"{count} {reason.replace('_', ' ')}"
            for reason, count in dataclasses.asdict(found.skipped).items()
            if count
        )
        say.print(
            f"data: source `{source.name}`: {found.documents} documents, {format_bytes(found.text_bytes)}"
            + (f"; {left_out}" if left_out else ""),
        )


def _summary(dataset: Dataset) -> str:
    train, validation = format_count(dataset.train_tokens), format_count(dataset.validation_tokens)
    return f"{train} training and {validation} validation tokens, vocabulary {dataset.vocab_size}"


@contextmanager
def _writing(root: Path) -> Iterator[None]:
    """A full disk, a directory without permission. Failures of reading were made the user's line where they arose."""
    try:
        yield
    except OSError as error:
        raise UserError(f"data.cache: {error.filename or root} cannot be written ({error.strerror or error})") from None


@contextmanager
def _bar(say: Console, description: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar over bytes of text; of compressed files more may come than their size says."""
    columns = [
        TextColumn("data: {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=say, transient=True, disable=not say.is_terminal) as bars:
        task = bars.add_task(description, total=total)
        yield lambda size: bars.advance(task, size)
