"""Scoring text: every token of every document once, and the bytes that they cost.

Each document is `start_id`, its tokens, EOS. The start is given, as it is before any document; all the others are
targets: the first token of a document (predicted from the start alone), the rest, and the EOS that says where it ends.
Documents lie one after the other, cut into rows of seq_len; a document that goes over a row's end goes on in the
next one without what came before, which makes the score a little worse than the model, never better. So

    bits per byte = sum of the targets' losses in nats / ln 2 / UTF-8 bytes of the documents' text

is what an encoder driven by the model would write for these documents, the ends of documents paid for, and can be set
beside a compressor's figure on the same bytes. Weights are 1 on targets and 0 on starts and padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from modelworks.config import UserError
from modelworks.data.batch import Batch
from modelworks.data.dataset import Dataset
from modelworks.data.objectives import Packing, next_token
from modelworks.data.permutation import permute
from modelworks.data.shards import TokenStream
from modelworks.data.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class ScoredText:
    """Documents ready to be scored; iterate for batches of at most `rows` rows of `seq_len`, any number of times.

    documents: ids with start and EOS. n_bytes: UTF-8 bytes of their text. n_targets: tokens that count.
    """

    documents: list[NDArray[Any]]
    n_bytes: int
    seq_len: int
    rows: int
    packing: Packing

    @property
    def n_documents(self) -> int:
        return len(self.documents)

    @property
    def n_targets(self) -> int:
        return sum(len(document) - 1 for document in self.documents)

    @property
    def n_rows(self) -> int:
        return -(-(sum(map(len, self.documents)) - 1) // self.seq_len)

    def __len__(self) -> int:
        """Batches."""
        return -(-self.n_rows // self.rows)

    def __iter__(self) -> Iterator[Batch]:
        tokens = np.concatenate(self.documents)
        starts = np.cumsum([0, *map(len, self.documents[:-1])])
        begins = np.zeros(len(tokens), bool)
        begins[starts] = True
        for first in range(0, self.n_rows, self.rows):
            rows = min(self.rows, self.n_rows - first)
            # row r holds inputs [r L, (r + 1) L) and, moved by one, their targets
            where = (first + np.arange(rows))[:, None] * self.seq_len + np.arange(self.seq_len + 1)
            inside = where < len(tokens)
            where = np.minimum(where, len(tokens) - 1)
            batch = next_token(tokens[where], begins[where] & inside, self.packing)
            counted = inside[:, 1:] & ~begins[where][:, 1:]
            batch.loss_weights.copy_(torch.from_numpy(counted.astype(np.float32)))
            yield batch


def validation_batches(
    dataset: Dataset, *, seq_len: int, rows: int, packing: Packing = "within-document", max_tokens: int | None = None
) -> ScoredText:
    """The validation split, or `max_tokens` tokens of it, always the same ones.

    The last document is then cut, and counts the bytes of its beginning.
    """
    chosen = list(_chosen(dataset, max_tokens))
    documents = [stream.document(number)[:length] for stream, number, length in chosen]
    return ScoredText(documents, sum(_n_bytes(dataset, *place) for place in chosen), seq_len, rows, packing)


def scored_texts(dataset: Dataset, max_tokens: int | None = None) -> Iterator[bytes]:
    """The UTF-8 text that `validation_batches` scores, document by document: what to compare a score with.

    In the corpus's own order, in which neighbours are alike: a compressor does best there.
    """
    source = {id(source.validation): place for place, source in enumerate(dataset.sources)}
    in_order = sorted(_chosen(dataset, max_tokens), key=lambda chosen: (source[id(chosen[0])], chosen[1]))
    for stream, number, length in in_order:
        yield stream.text(number).encode("utf-8")[: _n_bytes(dataset, stream, number, length)]


def text_batches(
    texts: Iterable[str], tokenizer: Tokenizer, *, seq_len: int, rows: int, packing: Packing = "within-document"
) -> ScoredText:
    """Any texts, one document each, accounted for in the same way. Raises UserError where there is none."""
    documents, n_bytes = [], 0
    for text in texts:
        if text:
            documents.append(tokenizer.encode_document(text))
            n_bytes += len(text.encode("utf-8"))
    if not documents:
        raise UserError("no text to score: every document is empty")
    return ScoredText(documents, n_bytes, seq_len, rows, packing)


def _chosen(dataset: Dataset, max_tokens: int | None) -> Iterator[tuple[TokenStream, int, int]]:
    """(stream, number, tokens that count) of documents until there are `max_tokens`, the last one cut."""
    left = dataset.validation_tokens if max_tokens is None else max(2, max_tokens)
    for stream, number in _spread(dataset):
        if left < 2:
            return
        length = min(left, int(stream.starts[number + 1] - stream.starts[number]))
        yield stream, number, length
        left -= length


def _n_bytes(dataset: Dataset, stream: TokenStream, number: int, length: int) -> int:
    """UTF-8 bytes that the first `length` tokens of a document stand for."""
    ids = stream.document(number)
    if length == len(ids):
        return int(stream.text_bytes[number])
    return sum(len(dataset.tokenizer.token_bytes(token)) for token in ids[1:length].tolist())


def _spread(dataset: Dataset) -> list[tuple[TokenStream, int]]:
    """Validation documents in an order in which every beginning is a fair sample of all sources."""
    ordered = []
    for source in dataset.sources:
        count = source.validation.n_documents
        numbers = permute(np.arange(count, dtype=np.int64), count, "validation").tolist()
        ordered += [((place + 0.5) / count, source.validation, number) for place, number in enumerate(numbers)]
    ordered.sort(key=lambda entry: entry[0])
    return [(stream, number) for _, stream, number in ordered]
