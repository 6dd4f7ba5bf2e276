"""What general compressors make of the text that is scored: the baseline that a language model has to beat.

Two ways, both stated: every document by itself, and all documents end to end, which lets the compressor learn from
one for the next and is usually the stronger. The model's figure pays for the ends of documents, these do not.
"""

from __future__ import annotations

import bz2
import contextlib
import json
import lzma
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from rich.console import Console
from rich.progress import track

from modelworks.data.dataset import Dataset
from modelworks.data.validation import scored_texts

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


def compression_baselines(
    dataset: Dataset, *, max_tokens: int | None = None, progress: bool = True
) -> dict[str, CompressionBaseline]:
    """By compressor, on the very text that `validation_batches` scores. Worked out once and kept with the data set.

    max_tokens: as there; None is the whole validation split.
    """
    path = dataset.directory / _CACHE
    known: dict[str, dict[str, Any]] = {}
    part = str(max_tokens)
    try:
        known = json.loads(path.read_text())
        return {name: CompressionBaseline(**row) for name, row in known[part].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # absent, or not whole: work it out
        pass
    texts = list(scored_texts(dataset, max_tokens))
    found = {name: _measure(name, texts, progress) for name in _COMPRESSORS}
    rows = {name: asdict(baseline) for name, baseline in found.items()}
    with contextlib.suppress(OSError):  # a directory that cannot be written costs only time
        temporary = path.with_name(f".{_CACHE}-{os.getpid()}")
        temporary.write_text(json.dumps({**known, part: rows}, indent=1) + "\n")
        os.replace(temporary, path)
    return found


def _measure(name: str, texts: Sequence[bytes], progress: bool) -> CompressionBaseline:
    whole = _COMPRESSORS[name]()
    n_bytes = together = apart = 0
    for data in _bar(texts, f"data: {name} on the validation text", progress):
        single = _COMPRESSORS[name]()
        n_bytes += len(data)
        apart += len(single.compress(data)) + len(single.flush())
        together += len(whole.compress(data))
    together += len(whole.flush())
    return CompressionBaseline(name, 8 * together / n_bytes, 8 * apart / n_bytes, n_bytes)


def _bar(texts: Sequence[bytes], description: str, progress: bool) -> Iterable[bytes]:
    if not progress:
        return texts
    return track(texts, description, console=Console(stderr=True), transient=True)
