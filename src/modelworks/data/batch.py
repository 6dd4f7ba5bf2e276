"""`Batch`: what the model and the loss are given.

Rows of tokens; within a row any number of documents may lie side by side. `positions` restart in each document
when documents are packed apart (`data.packing: within-document`) and run through when they are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """All tensors are (rows, seq_len).

    tokens: int64 ids. positions: int64, place of the token in its document. targets: int64, the next token.
    loss_weights: float32, 0 where there is no target to learn (across a document boundary, padding).
    document_ids: int32, equal within a row exactly where tokens may attend to each other.
    source_*: the other side of an encoder-decoder, None for decoder-only models.
    """

    tokens: Tensor
    positions: Tensor
    targets: Tensor
    loss_weights: Tensor
    document_ids: Tensor
    source_tokens: Tensor | None = None
    source_positions: Tensor | None = None
    source_document_ids: Tensor | None = None

    @property
    def n_rows(self) -> int:
        return self.tokens.shape[0]

    def target_weight(self) -> Tensor:
        """Sum of the loss weights: the denominator of the loss, a float64 scalar (exact for whole weights)."""
        return self.loss_weights.sum(dtype=torch.float64)

    def split(self, rows: int) -> Iterator[Batch]:
        """Micro-batches of at most `rows` rows, in order."""
        for start in range(0, self.n_rows, rows):
            yield self._map(itemgetter(slice(start, start + rows)))

    def rows(self, index: slice) -> Batch:
        """These rows."""
        return self._map(itemgetter(index))

    def joined(self, others: Sequence[Batch]) -> Batch:
        """These rows, and below them those of the others."""
        parts: list[Any] = [self, *others]
        columns = {f.name: [getattr(part, f.name) for part in parts] for f in fields(self)}
        values: dict[str, Any] = {n: None if column[0] is None else torch.cat(column) for n, column in columns.items()}
        return Batch(**values)

    def columns(self, index: Tensor) -> Batch:
        """These columns of every row, int64 (columns,). Positions and document ids stay those of the whole row."""
        return self._map(lambda tensor: tensor.index_select(1, index))

    def to(self, device: torch.device | str) -> Batch:
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        changed: dict[str, Any] = {name: None if value is None else change(value) for name, value in values.items()}
        return Batch(**changed)
