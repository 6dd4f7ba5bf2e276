"""A step of the scheduler as tensors: the tokens of all its sequences side by side, without padding.

    tokens, positions, slots   one entry a token; a sequence's tokens lie together
    starts, lengths, tables    one entry a sequence: where its tokens begin, how many keys it sees, where those lie

Slot b · block_size + i is place i of block b. A sequence's kept keys fill the slots of its table from the first on. As
long as nothing was evicted, the key of position p is its p-th; afterwards a kept key still has its true position (it
was rotated by it), and only its place in the table is another.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelworks.serve.scheduler import Step, Work
from modelworks.serve.sequence import Sequence, Status


@dataclass(frozen=True)
class RaggedBatch:
    """T tokens of S sequences, R of whose logits are wanted. All tensors are on the CPU and contiguous.

    tokens: int64 (T,). positions: int64 (T,), true ones. slots: int64 (T,), where each token's key and value go.
    starts: int32 (S + 1,): sequence s has the tokens starts[s]:starts[s + 1], at least one.
    lengths: int32 (S,): kept keys that the last token of each sequence sees, its own included. Token j of its n (from
    0) sees the first lengths - (n - 1 - j) of them.
    tables: int32 (S, widest): the blocks of each sequence that hold these keys. What follows them in a row are numbers
    of blocks too (0, or such as it has taken for later tokens), and mean nothing.
    wanted: int64 (R,): tokens whose logits are wanted, ascending.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    starts: Tensor
    lengths: Tensor
    tables: Tensor
    wanted: Tensor

    @property
    def n_tokens(self) -> int:
        return self.tokens.shape[0]

    @property
    def n_sequences(self) -> int:
        return self.lengths.shape[0]

    def alone(self) -> list[RaggedBatch]:
        """A batch of each sequence. Their wanted tokens, one batch after the other, are those of this batch."""
        batches = []
        for s, (start, stop) in enumerate(itertools.pairwise(self.starts.tolist())):
            own = slice(start, stop)
            wanted = self.wanted[(self.wanted >= start) & (self.wanted < stop)] - start
            starts = torch.tensor([0, stop - start], dtype=torch.int32)
            batches.append(
                RaggedBatch(
                    self.tokens[own], self.positions[own], self.slots[own], starts,
                    self.lengths[s : s + 1], self.tables[s : s + 1], wanted,
                )
            )  # fmt: skip
        return batches


class BatchBuilder:
    """Makes the batches of one scheduler's steps. Tables of blocks are kept from step to step: of a running sequence
    only the end is looked at, where its table may have grown or its last block been replaced by a copy."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._tables: NDArray[np.int32] = np.zeros((8, 8), np.int32)
        self._free = list(range(len(self._tables)))  # rows of `_tables`
        self._kept: dict[Sequence, _Row] = {}

    def build(self, step: Step, *, every_token: Collection[Sequence] = ()) -> RaggedBatch:
        """The batch of a step that has work, its sequences in the step's order.

        Logits are wanted of each work's last token where it `samples`, and of all tokens of the sequences in
        `every_token` (scores of a prompt).
        """
        work, size = step.work, self.block_size
        n = len(work)
        rows = self._rows(work)
        first = np.fromiter([each.start for each in work], np.int64, n)
        count = np.fromiter([each.count for each in work], np.int64, n)
        known = np.fromiter([len(each.sequence.tokens) for each in work], np.int64, n)
        ends = np.cumsum(count)
        total = int(ends[-1])
        if total == n:  # decoding alone
            tokens = np.fromiter([each.sequence.tokens[each.start] for each in work], np.int64, n)
            owner, positions = np.arange(n), first
        else:
            flat = [token for each in work for token in each.sequence.tokens[each.start : each.start + each.count]]
            tokens = np.array(flat, np.int64)
            owner = np.repeat(np.arange(n), count)
            positions = np.arange(total) - (ends - count)[owner] + first[owner]
        evicted = np.fromiter([each.sequence.n_evicted for each in work], np.int64, n) * size  # tokens
        lengths = first + count - evicted
        blocks = self._tables[rows, : -(-int(lengths.max()) // size)]
        slots = blocks[owner, (positions - evicted[owner]) // size].astype(np.int64) * size + positions % size
        wanted = ends[first + count == known] - 1
        if every_token:
            all_of = np.fromiter([each.sequence in every_token for each in work], np.bool_, n)
            wanted = np.union1d(wanted, np.flatnonzero(all_of[owner]))
        starts = np.concatenate(([0], ends)).astype(np.int32)
        arrays = (tokens, positions, slots, starts, lengths.astype(np.int32), blocks, wanted)
        return RaggedBatch(*(torch.from_numpy(array) for array in arrays))

    def _rows(self, work: list[Work]) -> list[int]:
        """For each work the row of `_tables` that holds its sequence's blocks as they are now."""
        rows = []
        for each in work:
            sequence = each.sequence
            row, blocks = self._kept.get(sequence), sequence.blocks
            version = sequence.n_preempted, sequence.n_evicted
            if row is None or row.version != version:
                row = self._write(sequence, row, 0)
            elif row.n_blocks != len(blocks) or row.last != blocks[-1]:
                row = self._write(sequence, row, row.n_blocks - 1)
            rows.append(row.place)
        if len(self._kept) > 2 * len(work) + 64:
            self._forget()
        return rows

    def _write(self, sequence: Sequence, row: _Row | None, start: int) -> _Row:
        """The sequence's blocks from `start` on, into its row."""
        blocks = sequence.blocks
        if row is None and not self._free:
            self._free = list(range(len(self._tables), 2 * len(self._tables)))
            self._tables = np.concatenate((self._tables, np.zeros_like(self._tables)))
        if (width := self._tables.shape[1]) < len(blocks):
            self._tables = np.pad(self._tables, ((0, 0), (0, max(width, len(blocks) - width))))
        place = self._free.pop() if row is None else row.place
        self._tables[place, start : len(blocks)] = blocks[start:]
        self._tables[place, len(blocks) :] = 0
        row = self._kept[sequence] = _Row(place, (sequence.n_preempted, sequence.n_evicted), len(blocks), blocks[-1])
        return row

    def _forget(self) -> None:
        """Give up the rows of those that hold no blocks."""
        for sequence in [each for each in self._kept if each.status is not Status.RUNNING]:
            self._free.append(self._kept.pop(sequence).place)


class _Row(NamedTuple):
    """A sequence's row of the tables, and what it was written from: equal where nothing has changed since."""

    place: int
    version: tuple[int, int]  # n_preempted, n_evicted
    n_blocks: int
    last: int
