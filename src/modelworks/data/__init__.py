"""Texts to batches: sources, tokenisers, token shards, mixture, order, packing, the loader, validation.

Names are imported on first use: tokenising needs no torch, and neither do the processes that do it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelworks.lazy_names import lazily

if TYPE_CHECKING:
    from modelworks.data.batch import Batch as Batch
    from modelworks.data.build import build_dataset as build_dataset
    from modelworks.data.compression import (
        CompressionBaseline as CompressionBaseline,
    )
    from modelworks.data.compression import (
        compression_baselines as compression_baselines,
    )
    from modelworks.data.dataset import Dataset as Dataset
    from modelworks.data.dataset import open_dataset as open_dataset
    from modelworks.data.loader import TrainLoader as TrainLoader
    from modelworks.data.skips import Skip as Skip
    from modelworks.data.skips import Skips as Skips
    from modelworks.data.tokenizers.stream import StreamDecoder as StreamDecoder
    from modelworks.data.tokenizers.tokenizer import Tokenizer as Tokenizer
    from modelworks.data.validation import (
        ScoredText as ScoredText,
    )
    from modelworks.data.validation import (
        scored_texts as scored_texts,
    )
    from modelworks.data.validation import (
        text_batches as text_batches,
    )
    from modelworks.data.validation import (
        validation_batches as validation_batches,
    )

_OFFERS = {
    "batch": ["Batch"],
    "build": ["build_dataset"],
    "compression": ["CompressionBaseline", "compression_baselines"],
    "dataset": ["Dataset", "open_dataset"],
    "loader": ["TrainLoader"],
    "skips": ["Skip", "Skips"],
    "tokenizers.stream": ["StreamDecoder"],
    "tokenizers.tokenizer": ["Tokenizer"],
    "validation": ["ScoredText", "scored_texts", "text_batches", "validation_batches"],
}
_HOME = {name: module for module, names in _OFFERS.items() for name in names}

__getattr__ = lazily(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted(_HOME)
