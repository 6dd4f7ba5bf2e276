"""What general compressors make of the validation text: the baseline that a language model has to beat.

Two ways, both stated: every document by itself, and all documents end to end, which lets the compressor learn from
one for the next and is usually the stronger. The model's figure pays for the ends of documents, these do not.
"""

from __future__ import annotations

import bz2
import json
import lzma
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Protocol

from rich.console import Console
from rich.progress import track

from modelworks.data.dataset import Dataset

_CACHE = "baselines.json"


@dataclass(frozen=True)
class CompressionBaseline:
    """Bits per byte of `compressor` (`bz2` level 9, `xz` level 9 extreme) on the validation documents' UTF-8 bytes."""

    compressor: str
    concatenated: float
    per_document: float
    n_bytes: int

    @property
    def best(self) -> float:
        """The stronger of the two: what to compare a model with."""
        return min(self.concatenated, self.per_document)


class _Compressor(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...
    def flush(self) -> bytes: ...


_COMPRESSORS: dict[str, Callable[[], _Compressor]] = {
    "bz2": lambda: bz2.BZ2Compressor(9),
    "xz": lambda: lzma.LZMACompressor(preset=9 | lzma.PRESET_EXTREME),
}


def compression_baselines(dataset: Dataset, *, progress: bool = True) -> dict[str, CompressionBaseline]:
    """By compressor. Worked out once and kept in the data set's directory."""
    path = dataset.directory / _CACHE
    try:
        return {name: CompressionBaseline(**row) for name, row in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError):  # absent, or not whole: work it out
        pass
    found = {name: _measure(name, dataset, progress) for name in _COMPRESSORS}
    temporary = path.with_name(f".{_CACHE}-{os.getpid()}")
    temporary.write_text(json.dumps({name: asdict(baseline) for name, baseline in found.items()}, indent=1) + "\n")
    os.replace(temporary, path)
    return found


def _measure(name: str, dataset: Dataset, progress: bool) -> CompressionBaseline:
    whole = _COMPRESSORS[name]()
    n_bytes = together = apart = 0
    for text in _bar(_texts(dataset), f"data: {name} on the validation text", _count(dataset), progress):
        data = text.encode("utf-8")
        single = _COMPRESSORS[name]()
        n_bytes += len(data)
        apart += len(single.compress(data)) + len(single.flush())
        together += len(whole.compress(data))
    together += len(whole.flush())
    return CompressionBaseline(name, 8 * together / n_bytes, 8 * apart / n_bytes, n_bytes)


def _texts(dataset: Dataset) -> Iterator[str]:
    for source in dataset.sources:
        for number in range(source.validation.n_documents):
            yield source.validation.text(number)


def _count(dataset: Dataset) -> int:
    return sum(source.validation.n_documents for source in dataset.sources)


def _bar(texts: Iterable[str], description: str, total: int, progress: bool) -> Iterable[str]:
    if not progress:
        return texts
    return track(texts, description, total, console=Console(stderr=True), transient=True)
