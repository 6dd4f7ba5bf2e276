"""What a model is asked to predict from a window of tokens. For now: the next token."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from modelworks.data.batch import Batch

Packing = Literal["within-document", "across"]


def next_token(tokens: NDArray[Any], begins: NDArray[np.bool_], packing: Packing) -> Batch:
    """Inputs, and the same moved by one as targets.

    tokens: (rows, seq_len + 1) ids. begins: same shape, True at each document's first token.

    within-document: positions count from the document's first token in the row, document ids number the documents of
    a row from 0, and the last token of a document (its EOS) has no target: the next document's start says nothing.
    across: positions run through the row, one document id, every target counts.
    """
    rows, length = tokens.shape[0], tokens.shape[1] - 1
    places = np.broadcast_to(np.arange(length), (rows, length))
    if packing == "within-document":
        inputs = begins[:, :-1]
        document_ids = np.cumsum(inputs[:, 1:], axis=1, dtype=np.int32)
        document_ids = np.concatenate([np.zeros((rows, 1), np.int32), document_ids], axis=1)
        firsts = np.maximum.accumulate(np.where(inputs, places, 0), axis=1)
        positions = places - firsts
        weights = np.where(begins[:, 1:], np.float32(0), np.float32(1))
    else:
        document_ids = np.zeros((rows, length), np.int32)
        positions = places.copy()
        weights = np.ones((rows, length), np.float32)
    ids = torch.from_numpy(tokens.astype(np.int64))
    return Batch(
        tokens=ids[:, :-1].contiguous(),
        positions=torch.from_numpy(positions),
        targets=ids[:, 1:].contiguous(),
        loss_weights=torch.from_numpy(weights),
        document_ids=torch.from_numpy(document_ids),
    )
