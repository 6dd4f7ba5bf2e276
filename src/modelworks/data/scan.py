"""The first look at a corpus: what is there, before hours are spent on tokenising it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from modelworks.config import SourceConfig, UserError
from modelworks.data.documents import Document, Skipped
from modelworks.data.sources import read_documents
from modelworks.data.split import content_fraction


@dataclass
class SourceScan:
    documents: int = 0
    text_bytes: int = 0
    train_documents: int = 0
    train_bytes: int = 0
    skipped: Skipped = field(default_factory=Skipped)
    lowest: float = 1.0  # split fraction of the document nearest to validation, and of the one furthest from it
    highest: float = 0.0


@dataclass(frozen=True)
class Corpus:
    """Sources with their files, read as often as needed in the same order."""

    sources: list[SourceConfig]
    files: list[list[Path]]
    validation: float  # share of the documents, 0-1

    def documents(self, place: int, skipped: Skipped | None = None) -> Iterator[Document]:
        return read_documents(self.sources[place], skipped or Skipped(), self.files[place])

    def train_texts(self) -> Iterator[str]:
        for place in range(len(self.sources)):
            for document in self.documents(place):
                if content_fraction(document.text) >= self.validation:
                    yield document.text


def scan(corpus: Corpus, advance: Callable[[int], None]) -> list[SourceScan]:
    """Count each source's documents. Raises UserError where a corpus or one of its splits would be empty."""
    scans = []
    for place, source in enumerate(corpus.sources):
        found = SourceScan()
        for document in corpus.documents(place, found.skipped):
            size = len(document.text.encode("utf-8"))
            fraction = content_fraction(document.text)
            found.documents += 1
            found.text_bytes += size
            if fraction >= corpus.validation:
                found.train_documents += 1
                found.train_bytes += size
            found.lowest, found.highest = min(found.lowest, fraction), max(found.highest, fraction)
            advance(size)
        if not found.documents:
            raise UserError(f"source `{source.name}`: no documents ({_reasons(found.skipped)})")
        if not found.train_documents:
            raise UserError(
                f"source `{source.name}`: all {found.documents} documents fall into validation: "
                f"lower data.validation (to {_percent(found.highest, down=True)} or less) or add documents"
            )
        scans.append(found)
    if all(found.train_documents == found.documents for found in scans):
        documents = sum(found.documents for found in scans)
        least = _percent(min(found.lowest for found in scans), down=False)
        raise UserError(
            f"data.validation: {100 * corpus.validation:g}% of {documents} documents leaves none for validation: "
            f"raise it to {least} or more, or add documents"
        )
    return scans


def _reasons(skipped: Skipped) -> str:
    counts = [f"{skipped.empty} empty", f"{skipped.invalid_utf8_skipped} with invalid UTF-8 skipped"]
    return ", ".join(counts)


def _percent(fraction: float, *, down: bool) -> str:
    """A percentage with two decimals, on the side asked for."""
    hundredths = int(fraction * 10_000) if down else int(fraction * 10_000) + 1
    return f"{hundredths / 100:g}%"
