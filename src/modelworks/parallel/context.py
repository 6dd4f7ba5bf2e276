"""Context (sequence) parallel: the columns of a row are spread over the ranks of the axis `cp`.

Each rank runs the whole model on its own columns; only attention needs the others'. Two ways to give it them:

    ring      keys and values travel round the ranks; see `modelworks.parallel.ring_attention`
    ulysses   an all-to-all turns shards of the sequence into shards of the heads, ordinary attention runs on whole
              rows with some of the heads, and another turns them back (Jacobs et al. 2023)

Ring works with any number of heads and hides its messages behind the products. Ulysses sends less as ranks grow,
and needs query and key/value heads that divide over the ranks (after tensor parallelism has taken its share).

Which columns a rank holds is `sequence_columns`; everything of a batch that has columns is cut by it, positions and
document ids included, so that they stay those of the whole row. Invariant: all ranks of a group make their contexts
and call them in the same order, which recomputation and pipeline schedules keep because they are alike on all.
Letters: B rows, T this rank's columns, H query heads, G key/value heads (this rank's under tensor parallelism),
K head_dim, N ranks.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from modelworks.models import AttentionContext, CausalContext, DocumentContext, DropoutKey, Routing
from modelworks.parallel.collectives import Group, all_to_all
from modelworks.parallel.mesh import Mesh
from modelworks.parallel.ring_attention import Block, plan_turns, ring_attention
from modelworks.parallel.untraced import not_traced

ContextMode = Literal["ring", "ulysses"]


def sequence_columns(seq_len: int, cp: int, place: int, mode: ContextMode) -> Tensor:
    """The columns of a row that the rank at `place` of `cp` holds, ascending: int64 (seq_len / cp,), on the CPU.

    ring: the pieces `place` and `2 cp - 1 - place` of 2 cp equal ones, which balances causal work. ulysses: one piece.
    """
    if mode == "ulysses" or cp == 1:
        piece = _piece(seq_len, cp)
        return torch.arange(place * piece, (place + 1) * piece)
    piece = _piece(seq_len, 2 * cp)
    starts = (place * piece, (2 * cp - 1 - place) * piece)
    return torch.cat([torch.arange(start, start + piece) for start in starts])


def row_order(seq_len: int, cp: int, mode: ContextMode) -> Tensor:
    """The inverse: columns gathered from all ranks, one after the other, indexed by this are a row in its order."""
    return torch.cat([sequence_columns(seq_len, cp, place, mode) for place in range(cp)]).argsort()


def context_parallel(
    mesh: Mesh,
    mode: ContextMode,
    columns: Tensor,
    document_ids: Tensor | None,
    *,
    dropout: DropoutKey | None = None,
    routing: Routing | None = None,
) -> AttentionContext:
    """The attention context of one micro-batch under cp > 1. document_ids: see `RingContext`."""
    if mode == "ring":
        return RingContext(mesh, columns, document_ids, dropout=dropout, routing=routing)
    return UlyssesContext(mesh, document_ids, dropout=dropout, routing=routing)


class RingContext:
    """Causal attention over rows whose columns are spread zig-zag. For training, one for each micro-batch.

    columns: what this rank holds, by `sequence_columns`. document_ids: int (B, T) of those columns, equal within a
    row exactly where tokens may attend to each other; None if each row is one sequence.
    """

    def __init__(
        self,
        mesh: Mesh,
        columns: Tensor,
        document_ids: Tensor | None = None,
        *,
        dropout: DropoutKey | None = None,
        routing: Routing | None = None,
    ) -> None:
        self.dropout, self.routing = dropout, routing
        self._group = mesh.group("cp")
        self._length = len(columns)
        expected = sequence_columns(self._length * self._group.size, self._group.size, self._group.index, "ring")
        if not torch.equal(columns.cpu(), expected):
            raise ValueError(f"ring attention needs the zig-zag columns of place {self._group.index}, got others")
        self._documents = _WholeRows(self._group, document_ids, "ring")
        self._turns: dict[tuple[int | None, torch.device], list[list[Block]]] = {}

    @not_traced
    def prepare(self, length: int, window: int | None, dtype: torch.dtype, device: torch.device) -> None:
        """length: this rank's columns. Gathers the documents of all ranks, once, and plans what to compute."""
        if length != self._length:
            raise ValueError(f"the context was made for {self._length} columns of this rank, got {length}")
        self._plan(window, device)

    @not_traced
    def attend(
        self,
        layer: int,
        q_BTHK: Tensor,
        k_BTGK: Tensor,
        v_BTGK: Tensor,
        *,
        window: int | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        _refuse_dropout(dropout)
        return ring_attention(q_BTHK, k_BTGK, v_BTGK, self._group, self._plan(window, q_BTHK.device))

    def _plan(self, window: int | None, device: torch.device) -> list[list[Block]]:
        key = (window, device)
        if key not in self._turns:
            size, place = self._group.size, self._group.index
            documents = self._documents.gathered(self._length)
            self._turns[key] = plan_turns(_piece(self._length, 2), size, place, window, documents, device)
        return self._turns[key]


class UlyssesContext:
    """Causal attention on whole rows with N-th parts of the heads. For training, one for each micro-batch.

    document_ids: as for `RingContext`; this rank's columns are one contiguous piece.
    Bytes that a rank sends for one layer, with Q and KV those of its queries and of its keys and values: (N - 1) / N
    · (2 Q + KV) in the forward pass, as many in the backward pass, counted as `all_to_all` on the axis `cp`.
    """

    def __init__(
        self,
        mesh: Mesh,
        document_ids: Tensor | None = None,
        *,
        dropout: DropoutKey | None = None,
        routing: Routing | None = None,
    ) -> None:
        self.dropout, self.routing = dropout, routing
        self._group = mesh.group("cp")
        self._documents = _WholeRows(self._group, document_ids, "ulysses")
        self._rows: AttentionContext | None = None

    @not_traced
    def prepare(self, length: int, window: int | None, dtype: torch.dtype, device: torch.device) -> None:
        """length: this rank's columns. Gathers the documents of all ranks, once, and makes the whole rows' mask."""
        self._context(length).prepare(length * self._group.size, window, dtype, device)

    @not_traced
    def attend(
        self,
        layer: int,
        q_BTHK: Tensor,
        k_BTGK: Tensor,
        v_BTGK: Tensor,
        *,
        window: int | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        _refuse_dropout(dropout)
        q, k, v = _to_heads((q_BTHK, k_BTGK, v_BTGK), self._group)
        rows = self._context(q_BTHK.shape[1])
        return _to_columns(rows.attend(layer, q, k, v, window=window), self._group)

    def _context(self, length: int) -> AttentionContext:
        if self._rows is None:
            documents = self._documents.gathered(length)
            self._rows = CausalContext() if documents is None else DocumentContext(documents)
        return self._rows


class _WholeRows:
    """The document ids of whole rows, gathered from all ranks on first use: (N - 1) · B · T ids sent a batch."""

    def __init__(self, group: Group, local: Tensor | None, mode: ContextMode) -> None:
        self.group, self.local, self.mode = group, local, mode
        self._whole: Tensor | None = None

    def gathered(self, length: int) -> Tensor | None:
        """(B, N T) in the order of the row; None where each row is one document, on all ranks alike.

        length: this rank's columns, T.
        """
        if self.local is not None:
            if self.local.shape[1] != length:
                raise ValueError(f"document_ids: got {self.local.shape[1]} columns, expected this rank's {length}")
            whole = self.group.all_gather(self.local, dim=1)
            order = row_order(whole.shape[1], self.group.size, self.mode).to(whole.device)
            whole = whole[:, order]
            self._whole = None if bool((whole == whole[:, :1]).all()) else whole
            self.local = None
        return self._whole


def _to_heads(parts: tuple[Tensor, ...], group: Group) -> list[Tensor]:
    """Each (B, T, heads, K) -> (B, N T, heads / N, K), in one exchange: every rank gets its heads of all columns."""
    rows, length, _, head_dim = parts[0].shape
    size = group.size
    counts = [part.shape[2] // size for part in parts]
    for part in parts:
        if part.shape[2] % size:
            raise ValueError(f"{part.shape[2]} heads of a rank do not divide over cp={size} (use cp_mode ring)")
    # For each destination its heads of all parts, side by side: (N, B, T, heads / N, K).
    by_rank = [
        part.reshape(rows, length, size, count, head_dim).movedim(2, 0)
        for part, count in zip(parts, counts, strict=True)
    ]
    received = all_to_all(torch.cat(by_rank, dim=3), group, [1] * size, [1] * size)
    whole = received.transpose(0, 1).reshape(rows, size * length, sum(counts), head_dim)
    return list(torch.split(whole, counts, dim=2))


def _to_columns(x: Tensor, group: Group) -> Tensor:
    """The way back: (B, N T, H / N, K) -> (B, T, H, K)."""
    rows, length, n_heads, head_dim = x.shape
    size = group.size
    by_rank = x.reshape(rows, size, length // size, n_heads, head_dim).transpose(0, 1)
    received = all_to_all(by_rank, group, [1] * size, [1] * size)
    return received.movedim(0, 2).reshape(rows, length // size, size * n_heads, head_dim)


def _piece(seq_len: int, pieces: int) -> int:
    if seq_len % pieces:
        raise ValueError(f"a row of {seq_len} columns does not divide into {pieces} equal pieces")
    return seq_len // pieces


def _refuse_dropout(dropout: float) -> None:
    if dropout > 0.0:
        raise ValueError("model.attention_dropout: got a chance above 0, expected 0 with cp > 1")
