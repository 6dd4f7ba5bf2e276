"""`PagedContext`: attention of a ragged batch over a paged cache, for the same layers that train.

Every layer writes its new keys and values first, and then attends to what the cache holds:

    one new token    many sequences at once: their blocks are gathered side by side, short tables are padded with blocks
                     of the same sequence, and a mask hides what is not seen
    a chunk          sequence by sequence, its blocks gathered; a prompt's beginning reads its own keys directly, where
                     the cache holds them exactly

Batch-invariant, tables begin and end at multiples of KEYS keys and rows are filled up to ROWS (`serve.invariant`), so
that a token's softmax and sum run over the same tiles whatever it is computed with.

Nothing is read but a sequence's own blocks: numbers that are not finite stay with whom they belong to. Which indices
and masks that takes is worked out once a step, for all layers. With a window, blocks before it are not gathered.

Letters: T tokens, S sequences, L keys, H query heads, G key/value heads, K head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from modelworks.models import DropoutKey, Routing, additive, attend_one, grouped_attention
from modelworks.serve.batch import RaggedBatch
from modelworks.serve.invariant import KEYS, ROWS
from modelworks.serve.kv_cache import KVCache

# Keys gathered at once, on a CPU and elsewhere: beyond this, more calls are cheaper than memory that fits no cache.
GATHERED_KEYS = 1 << 15, 1 << 20
_NOTED_ROWS = 64
_PADDING = 1.5  # at most so many times the keys that are there, before tables of like lengths are put together


class PagedContext:
    """The context of one step. The batch's rows are one: tokens (1, T).

    key_of_query: int64 (H,), the key/value head that each query head uses, where they do not come in equal groups.
    batch_invariant: where blocks divide KEYS. observed: of how many of each sequence's last tokens the attention is
    noted, empty for none. Then `mass`, float32 (S, widest), is the weight that falls on each block of a table, summed
    over these tokens, query heads and layers.
    """

    dropout: DropoutKey | None = None
    routing: Routing | None = None

    def __init__(
        self,
        cache: KVCache,
        batch: RaggedBatch,
        key_of_query: Tensor | None = None,
        *,
        batch_invariant: bool = False,
        observed: Sequence[int] = (),
    ) -> None:
        self._observed = observed
        self._cache, self._batch, self._key_of_query = cache, batch, key_of_query
        self._rows = ROWS if batch_invariant else 1
        self._tile = KEYS // cache.block_size if batch_invariant else 1  # blocks that are gathered at least, together

    def prepare(self, length: int, window: int | None, dtype: torch.dtype, device: torch.device) -> None:
        """Indices and masks of all layers, and blocks that begin emptied."""
        cache, batch = self._cache, self._batch
        self._slots = batch.slots.to(device)
        self.mass = torch.zeros(batch.tables.shape, dtype=torch.float32, device=device)
        if len(begun := _begun(batch.slots, cache.block_size)):
            cache.clear(begun.to(device))
        starts, lengths = batch.starts.long(), batch.lengths.long()
        counts = starts.diff()
        one = (counts == 1).nonzero().flatten()
        seen = lengths if window is None else lengths.clamp(max=window)
        first = (lengths - seen) // cache.block_size // self._tile * self._tile
        last = (lengths - 1) // cache.block_size
        most = GATHERED_KEYS[device.type != "cpu"] // cache.block_size
        self._singles = [
            self._single(group, starts[group], lengths[group], seen[group], first[group], last[group], dtype, device)
            for group in (one[part] for part in _groups((last - first + 1)[one], most))
        ]
        self._chunks = [
            self._chunk(s, int(starts[s]), int(counts[s]), int(lengths[s]), window, dtype, device)
            for s in (counts > 1).nonzero().flatten().tolist()
        ]

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
        """As every context's; rows must be one."""
        q_THK, k_TGK, v_TGK = q_BTHK[0], k_BTGK[0], v_BTGK[0]
        self._cache.write(layer, self._slots, k_TGK, v_TGK)
        if len(self._singles) == 1 and not self._chunks and self._singles[0].in_order:
            return self._attend_single(layer, q_THK, self._singles[0])[None]
        out_THK = torch.empty_like(q_THK)
        for single in self._singles:
            out_THK[single.tokens] = self._attend_single(layer, q_THK[single.tokens], single)
        for chunk in self._chunks:
            part = slice(chunk.start, chunk.stop)
            if chunk.blocks is None:
                k_LGK, v_LGK = self._for_queries(k_TGK[None, part]), self._for_queries(v_TGK[None, part])
            else:
                k_LGK, v_LGK = self._read(layer, chunk.blocks)
            q_HTK = self._filled_up(q_THK[None, part].transpose(1, 2))
            out_HTK = grouped_attention(q_HTK, k_LGK.transpose(1, 2), v_LGK.transpose(1, 2), chunk.mask)
            out_THK[part] = out_HTK[0, :, : chunk.stop - chunk.start].transpose(0, 1)
            if self._observed and self._observed[chunk.sequence]:
                self._note_chunk(q_THK[part], k_LGK[0], chunk)
        return out_THK[None]

    def _attend_single(self, layer: int, q_SHK: Tensor, single: _Single) -> Tensor:
        k_SLGK, v_SLGK = self._read(layer, single.blocks)
        k_SGLK, v_SGLK = k_SLGK.transpose(1, 2), v_SLGK.transpose(1, 2)
        if self._observed:
            n = torch.arange(single.blocks.shape[1], device=q_SHK.device)
            weights_SL = _weights(q_SHK[:, :, None], k_SGLK, single.mask).sum((1, 2))
            places = (single.first[:, None] + n).clamp(max=self.mass.shape[1] - 1)  # padding has no weight
            by_block = weights_SL.view(*single.blocks.shape, -1).sum(-1) * single.observed[:, None]
            self.mass.index_put_((single.sequences[:, None], places), by_block, accumulate=True)
        if self._rows == 1:
            return attend_one(q_SHK[:, :, None], k_SGLK, v_SGLK, single.mask)[:, :, 0]
        q_SGQK = q_SHK.view(len(q_SHK), k_SGLK.shape[1], -1, q_SHK.shape[-1])
        out_SGQK = grouped_attention(self._filled_up(q_SGQK), k_SGLK, v_SGLK, single.mask)
        return out_SGQK[:, :, : q_SGQK.shape[2]].flatten(1, 2)

    def _note_chunk(self, q_THK: Tensor, k_LGK: Tensor, chunk: _Chunk) -> None:
        n = self._observed[chunk.sequence]
        mask = chunk.mask
        if mask is None:  # causal over these tokens alone
            query = torch.arange(len(q_THK) - n, len(q_THK), device=q_THK.device)[:, None]
            mask = additive(torch.arange(len(q_THK), device=q_THK.device) <= query, q_THK.dtype)
        else:
            mask = mask[len(q_THK) - n : len(q_THK)]
        for rows in torch.split(torch.arange(n), _NOTED_ROWS):  # few at a time: weights are (H, rows, L)
            q_HTK = q_THK[len(q_THK) - n :][rows].transpose(0, 1)[None]
            weights_L = _weights(q_HTK, k_LGK.transpose(0, 1)[None], mask[rows])[0].sum((0, 1))
            weights_L = F.pad(weights_L, (0, -len(weights_L) % self._cache.block_size))
            by_block = weights_L.view(-1, self._cache.block_size).sum(-1)[: self.mass.shape[1] - chunk.first]
            self.mass[chunk.sequence, chunk.first : chunk.first + len(by_block)] += by_block

    def _filled_up(self, q: Tensor) -> Tensor:
        """(..., rows, K) with as many rows as a batch-invariant product needs, zeros."""
        missing = -q.shape[-2] % self._rows
        return F.pad(q, (0, 0, 0, missing)) if missing else q

    def _read(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        k_SLGK, v_SLGK = self._cache.read(layer, blocks)
        return self._for_queries(k_SLGK), self._for_queries(v_SLGK)

    def _for_queries(self, x_SLGK: Tensor) -> Tensor:
        """Heads of keys or values such that query heads use them in equal groups."""
        return x_SLGK if self._key_of_query is None else x_SLGK.index_select(-2, self._key_of_query)

    def _single(
        self,
        sequences: Tensor,
        tokens: Tensor,
        lengths: Tensor,
        seen: Tensor,
        first: Tensor,
        last: Tensor,
        dtype: torch.dtype,
        device: torch.device,
    ) -> _Single:
        """Sequences with one new token. lengths: keys of each; seen: the last so many of them, which lie in the places
        `first` to `last` of their tables."""
        size = self._cache.block_size
        place = first[:, None] + torch.arange(_up(int((last - first).max()) + 1, self._tile))
        blocks = self._batch.tables[sequences].long().gather(1, place.minimum(last[:, None]))
        key = (place[:, :, None] * size + torch.arange(size)).flatten(1)
        visible = (key < lengths[:, None]) & (key >= (lengths - seen)[:, None])
        mask = None if bool(visible.all()) else additive(visible, dtype)[:, None, None].to(device)
        in_order = bool((tokens == torch.arange(len(tokens))).all())
        observed = torch.tensor(self._observed or [0] * self._batch.n_sequences, dtype=torch.float32)[sequences]
        sequences, tokens, observed = sequences.to(device), tokens.to(device), observed.to(device)
        return _Single(sequences, tokens, observed, first.to(device), blocks.to(device), mask, in_order)

    def _chunk(
        self,
        sequence: int,
        start: int,
        count: int,
        length: int,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> _Chunk:
        """A sequence with `count` new tokens and `length` keys."""
        size, past = self._cache.block_size, length - count
        if window is not None and window >= length:
            window = None
        if past == 0 and window is None and self._cache.exact and self._tile == 1:
            return _Chunk(sequence, start, start + count, 0, None, None)
        first = 0 if window is None else max(0, past + 1 - window) // size // self._tile * self._tile
        last = (length - 1) // size
        place = torch.arange(first, first + _up(last + 1 - first, self._tile)).clamp(max=last)
        blocks = self._batch.tables[sequence].long()[None, place]
        query = torch.arange(past, past + _up(count, self._rows))[:, None]
        key = torch.arange(first * size, (first + blocks.shape[1]) * size)
        visible = key <= query if window is None else (key <= query) & (key > query - window)
        return _Chunk(sequence, start, start + count, first, blocks.to(device), additive(visible, dtype).to(device))


@dataclass(frozen=True)
class _Single:
    """sequences, tokens: int64 (S,), in the batch. observed: float32 (S,), 1 or 0. first: int64 (S,), the place of each
    one's first block in its table. blocks: int64 (S, width). mask: (S, 1, 1, L), None where all is seen. in_order:
    these are the batch's first tokens."""

    sequences: Tensor
    tokens: Tensor
    observed: Tensor
    first: Tensor
    blocks: Tensor
    mask: Tensor | None
    in_order: bool


@dataclass(frozen=True)
class _Chunk:
    """Tokens start to stop of the batch. blocks: int64 (1, width), those from place `first` of the table, None where
    the new keys are all there are. mask: (T, L), None where it is causal."""

    sequence: int
    start: int
    stop: int
    first: int
    blocks: Tensor | None
    mask: Tensor | None


def _weights(q_BHTK: Tensor, k_BGLK: Tensor, mask: Tensor | None) -> Tensor:
    """The weights of attention, float32 (B, H, T, L)."""
    B, H, T, K = q_BHTK.shape
    q_BGQK = q_BHTK.reshape(B, k_BGLK.shape[1], -1, K)  # the heads of a group, each with its tokens
    scores = (q_BGQK @ k_BGLK.transpose(2, 3)).reshape(B, H, T, -1) / math.sqrt(K)
    return (scores if mask is None else scores + mask).softmax(-1, dtype=torch.float32)


def _up(number: int, multiple: int) -> int:
    """The next multiple, or the number itself where it is one."""
    return -(-number // multiple) * multiple


def _begun(slots: Tensor, block_size: int) -> Tensor:
    """The blocks whose first slot is among these and whose last is not."""
    place = slots % block_size
    begun, ended = slots[place == 0] // block_size, slots[place == block_size - 1] // block_size
    return begun[~torch.isin(begun, ended)]


def _groups(widths: Tensor, most: int) -> list[Tensor]:
    """Indices of sequences that are gathered together, given their widths in blocks: of like widths, where padding
    would cost more than calls do, and no more than `most` blocks at once."""
    if not len(widths):
        return []
    groups = [torch.arange(len(widths))]
    if len(widths) * int(widths.max()) > _PADDING * int(widths.sum()):
        classes = widths.double().log2().ceil()
        groups = [(classes == each).nonzero().flatten() for each in sorted(set(classes.tolist()))]
    return [part for group in groups for part in torch.split(group, max(1, most // int(widths[group].max())))]
