"""Attention contexts: which keys each query sees, and where keys of earlier calls are kept.

A context is made for one batch (or one generation) and passed to the model; there are no globals. Layers hand it
their queries, keys and values and get the attended values back. All contexts are causal and honour a sliding
window: token t sees the last `window` tokens, itself included. Letters: B rows, T tokens, S keys, H query heads,
G key/value heads, K head_dim.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from modelworks.models.dropout import DropoutKey
from modelworks.models.dropout import dropout as drop
from modelworks.models.layers.blockwise_attention import LONGEST_BLOCKWISE, blockwise_attention
from modelworks.models.routing import Routing


class AttentionContext(Protocol):
    """What a layer needs of a context. `dropout` is the key of the residual stream's masks, if it has any; `routing` is
    for layers with experts, in training alone."""

    dropout: DropoutKey | None
    routing: Routing | None

    def prepare(self, length: int, window: int | None, dtype: torch.dtype, device: torch.device) -> None:
        """Make what all layers share, before the first of them (and outside what is compiled)."""

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
        """Softmax attention scaled by 1/sqrt(K): (B, T, H, K). `dropout` is the chance to drop a weight."""


class _RowContext:
    """Self-attention of whole rows: what the two contexts of training share. They differ in what a token may see.

    dropout: key of the masks of the residual stream; attention_dropout: of those of the attention weights, where it is
    another one because a device has some of the tokens of the stream, or some of the heads.
    """

    def __init__(
        self,
        document_ids: Tensor | None,
        dropout: DropoutKey | None,
        attention_dropout: DropoutKey | None,
        routing: Routing | None,
    ) -> None:
        self.dropout, self.routing = dropout, routing
        self.attention_dropout = attention_dropout or dropout
        self._masks = _Masks(document_ids)

    def prepare(self, length: int, window: int | None, dtype: torch.dtype, device: torch.device) -> None:
        self._masks.additive(length, window, dtype, device)

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
        return _attend_row(self._masks, self.attention_dropout, layer, q_BTHK, k_BTGK, v_BTGK, window, dropout)


class CausalContext(_RowContext):
    """Each row is one sequence: a token sees every token before it in its row, and itself."""

    def __init__(
        self,
        *,
        dropout: DropoutKey | None = None,
        attention_dropout: DropoutKey | None = None,
        routing: Routing | None = None,
    ) -> None:
        super().__init__(None, dropout, attention_dropout, routing)


class DocumentContext(_RowContext):
    """Documents lie side by side in a row, and tokens see only their own: the mask is block-diagonal and causal.

    document_ids: int (B, T), equal within a row exactly where tokens may attend to each other. Masks are built once
    and shared by all layers. Masked weights are exactly 0, so what another document holds cannot change a bit.
    """

    def __init__(
        self,
        document_ids: Tensor,
        *,
        dropout: DropoutKey | None = None,
        attention_dropout: DropoutKey | None = None,
        routing: Routing | None = None,
    ) -> None:
        one_document_a_row = bool((document_ids == document_ids[:, :1]).all())
        super().__init__(None if one_document_a_row else document_ids, dropout, attention_dropout, routing)


class CachedContext:
    """Keys and values of all earlier calls are kept, so that each call passes only new tokens (generation).

    All rows have the same length. Memory is taken in blocks of `block` tokens as the sequence grows: a layer's cache
    holds 2 · rows · capacity · G · K elements. Not for training: what is cached carries no gradient.
    """

    dropout: DropoutKey | None = None
    routing: Routing | None = None

    def __init__(self, n_layers: int, *, block: int = 256) -> None:
        self.block = block
        self._keys: list[Tensor | None] = [None] * n_layers  # each (B, G, capacity, K)
        self._values: list[Tensor | None] = [None] * n_layers
        self._lengths = [0] * n_layers

    @property
    def length(self) -> int:
        """Tokens seen by every layer so far."""
        return min(self._lengths)

    def prepare(self, length: int, window: int | None, dtype: torch.dtype, device: torch.device) -> None:
        """Nothing: a cache is taken by each layer with its first keys."""

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
        if dropout > 0.0:
            raise ValueError("attention dropout exists only in training, which uses no KV cache")
        past, n_new = self._lengths[layer], q_BTHK.shape[1]
        k_BGSK, v_BGSK = self._append(layer, k_BTGK.transpose(1, 2), v_BTGK.transpose(1, 2))
        q_BHTK = q_BTHK.transpose(1, 2)
        if n_new == 1:
            if window is not None:
                k_BGSK, v_BGSK = k_BGSK[:, :, -window:], v_BGSK[:, :, -window:]
            return attend_one(q_BHTK, k_BGSK, v_BGSK).transpose(1, 2)
        if past == 0 and (window is None or window >= n_new):
            return grouped_attention(q_BHTK, k_BGSK, v_BGSK, None).transpose(1, 2)
        mask = additive(_causal(n_new, past + n_new, window, q_BTHK.device), q_BTHK.dtype)
        return grouped_attention(q_BHTK, k_BGSK, v_BGSK, mask).transpose(1, 2)

    def _append(self, layer: int, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values; return all of the layer's, as views (B, G, S, K)."""
        start = self._lengths[layer]
        stop = self._lengths[layer] = start + k_BGTK.shape[2]
        keys = self._keys[layer] = _grown(self._keys[layer], k_BGTK, start, stop, self.block)
        values = self._values[layer] = _grown(self._values[layer], v_BGTK, start, stop, self.block)
        keys[:, :, start:stop] = k_BGTK
        values[:, :, start:stop] = v_BGTK
        return keys[:, :, :stop], values[:, :, :stop]


class _Masks:
    """Additive masks of one batch by (length, window, dtype, device), made on first use. None: plain causal."""

    def __init__(self, document_ids: Tensor | None) -> None:
        self.document_ids = document_ids
        self._made: dict[tuple[int, int | None, torch.dtype, torch.device], Tensor] = {}

    def additive(self, length: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """0 where visible, -inf where not: (1 or B, 1, T, T)."""
        if window is not None and window >= length:
            window = None
        if self.document_ids is None and window is None:
            return None
        key = (length, window, dtype, device)
        if key not in self._made:
            visible = _causal(length, length, window, device)[None]
            if self.document_ids is not None:
                visible = visible & (self.document_ids[:, :, None] == self.document_ids[:, None, :])
            self._made[key] = additive(visible[:, None], dtype)
        return self._made[key]


def _attend_row(
    masks: _Masks,
    key: DropoutKey | None,
    layer: int,
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    window: int | None,
    dropout: float,
) -> Tensor:
    """Self-attention of whole rows."""
    mask = masks.additive(q_BTHK.shape[1], window, q_BTHK.dtype, q_BTHK.device)
    q_BHTK, k_BGTK, v_BGTK = q_BTHK.transpose(1, 2), k_BTGK.transpose(1, 2), v_BTGK.transpose(1, 2)
    if dropout > 0.0:
        return _plain_attention(q_BHTK, k_BGTK, v_BGTK, mask, key, layer, dropout).transpose(1, 2)
    if q_BTHK.device.type == "cpu" and q_BTHK.requires_grad and q_BTHK.shape[1] <= LONGEST_BLOCKWISE:
        # Faster forward and backward than torch's kernel, for the price of the weights' memory.
        return blockwise_attention(q_BTHK, k_BTGK, v_BTGK, mask)
    return grouped_attention(q_BHTK, k_BGTK, v_BGTK, mask).transpose(1, 2)


def grouped_attention(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Tensor | None) -> Tensor:
    """PyTorch's fused attention; causal where no mask is given (then T = S)."""
    grouped = q_BHTK.shape[1] != k_BGSK.shape[1]
    if grouped and mask is not None and q_BHTK.device.type != "cpu":
        # On CUDA no fused kernel takes both a mask and grouped heads; without this the slow one would be chosen.
        k_BGSK, v_BGSK = _expanded(k_BGSK, q_BHTK.shape[1]), _expanded(v_BGSK, q_BHTK.shape[1])
        grouped = False
    return F.scaled_dot_product_attention(
        q_BHTK, k_BGSK, v_BGSK, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    )


def attend_one(q_BH1K: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Tensor | None = None) -> Tensor:
    """One new token in each row sees all keys, or those that `mask` (B, 1, 1, S) adds 0 to: the heads of a group become
    its queries, and no key is ever copied."""
    rows, n_groups, _, head_dim = k_BGSK.shape
    q_BGQK = q_BH1K.reshape(rows, n_groups, -1, head_dim)
    return F.scaled_dot_product_attention(q_BGQK, k_BGSK, v_BGSK, attn_mask=mask).flatten(1, 2).unsqueeze(2)


def _plain_attention(
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    mask: Tensor | None,
    key: DropoutKey | None,
    layer: int,
    dropout: float,
) -> Tensor:
    """Attention written out, the only path with dropout on its weights: fused kernels draw from their own stream."""
    length = q_BHTK.shape[2]
    if mask is None:
        mask = additive(_causal(length, length, None, q_BHTK.device), q_BHTK.dtype)
    k_BHTK, v_BHTK = _expanded(k_BGTK, q_BHTK.shape[1]), _expanded(v_BGTK, q_BHTK.shape[1])
    scores_BHTS = q_BHTK @ k_BHTK.transpose(-1, -2) / math.sqrt(q_BHTK.shape[-1]) + mask
    wide = torch.float64 if scores_BHTS.dtype == torch.float64 else torch.float32
    weights_BTHS = scores_BHTS.softmax(dim=-1, dtype=wide).transpose(1, 2)
    weights_BTHS = drop(weights_BTHS, dropout, key, layer, "attention_weights").to(v_BHTK.dtype)
    return weights_BTHS.transpose(1, 2) @ v_BHTK


def _expanded(x_BGTK: Tensor, n_heads: int) -> Tensor:
    """Each key/value head repeated for the query heads of its group: (B, H, T, K)."""
    return x_BGTK.repeat_interleave(n_heads // x_BGTK.shape[1], dim=1)


def _causal(n_queries: int, n_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Bool (n_queries, n_keys): True where visible; the last query stands at the last key."""
    query = torch.arange(n_keys - n_queries, n_keys, device=device)[:, None]
    key = torch.arange(n_keys, device=device)
    visible = key <= query
    return visible if window is None else visible & (key > query - window)


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where visible, -inf where not."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -math.inf)


def _grown(cache: Tensor | None, like: Tensor, used: int, needed: int, block: int) -> Tensor:
    """`cache`, or one with room for `needed` tokens that starts with its `used` ones."""
    if cache is not None and cache.shape[2] >= needed:
        return cache
    capacity = -(-needed // block) * block
    grown = like.new_empty((*like.shape[:2], capacity, like.shape[3]))
    if cache is not None:
        grown[:, :, :used] = cache[:, :, :used]
    return grown
