"""The memory of a paged KV cache, in one of several formats, and what a block of it costs.

    fp32, bf16     as they are (also fp16 and fp64, for models of these dtypes)
    int8, fp8      one byte an element, and a float32 scale for each token's key (or value) in each head:
                   x ~ scale · q,   scale = max |x| / largest q      (int8: 127, fp8 e4m3: 448)

A scale of its own for each head and token needs no calibration, and no outlier of another token or head can coarsen
it. Of a vector with the largest element m, int8 is off by at most m / 254 in each element, and fp8 by 1/16 of the
element's own size or m / 2^18, whichever is more. (Formats: Micikevicius et al. 2022, 2209.05433.)

A block that starts to be filled is emptied first, so that what its last holder left, which may not even be finite, is
never read: whoever pads reads his own block or zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from modelworks.config import ModelConfig, UserError, nearest

_PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
_SCALED = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
KV_DTYPES = ("auto", "fp32", "bf16", "int8", "fp8")
_SCALE_BYTES = 4


def resolve_kv_dtype(kv_dtype: str, model_dtype: torch.dtype) -> str:
    """The format of the cache: one of KV_DTYPES without `auto`, or the name of the model's own dtype.

    Raises UserError for a name that is none, and for one that costs more than the model's own and holds no more.
    """
    own = next((name for name, dtype in _PLAIN.items() if dtype == model_dtype), None)
    if own is None:
        raise UserError(f"a model of {model_dtype} cannot be served; load it as float32 or bfloat16")
    if kv_dtype in ("auto", own):
        return own
    if kv_dtype not in KV_DTYPES:
        near = nearest(kv_dtype, KV_DTYPES)
        hint = f" (did you mean `{near}`?)" if near else ""
        raise UserError(f"kv_dtype: got {kv_dtype!r}, expected {', '.join(KV_DTYPES)}{hint}")
    if kv_dtype in _PLAIN and _PLAIN[kv_dtype].itemsize >= model_dtype.itemsize:
        raise UserError(
            f"kv_dtype: got {kv_dtype}, but keys and values are computed in {own}: it would take as much memory or "
            f"more and hold no more; expected auto ({own}), int8 or fp8"
        )
    return kv_dtype


def kv_bytes_per_block(config: ModelConfig, block_size: int, kv_dtype: str, *, lanes: int = 1) -> int:
    """What a block takes in all layers. kv_dtype: resolved. lanes: the number to whose multiples tokens of a block, and
    channels of a head, are filled up."""
    vectors = 2 * config.n_layers * (block_size + -block_size % lanes) * config.n_kv_heads
    channels = config.head_dim + -config.head_dim % lanes
    if kv_dtype in _PLAIN:
        return vectors * channels * _PLAIN[kv_dtype].itemsize
    return vectors * (channels + _SCALE_BYTES)


class KVCache:
    """Keys and values of blocks 0 to n_blocks - 1 in every layer. G key/value heads, K head_dim.

    kv_dtype: resolved. dtype: of the keys and values that come and go. Memory is zero at first.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        n_blocks: int,
        block_size: int,
        kv_dtype: str,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.n_blocks, self.block_size, self.kv_dtype, self.dtype = n_blocks, block_size, kv_dtype, dtype
        self.exact = _PLAIN.get(kv_dtype) == dtype
        # Key and value of a token lie side by side: one copy in, one copy out.
        shape = (config.n_layers, n_blocks, block_size, 2, config.n_kv_heads)
        stored, self._largest = _SCALED[kv_dtype] if kv_dtype in _SCALED else (_PLAIN[kv_dtype], 0.0)
        data = torch.zeros((*shape, config.head_dim), dtype=stored, device=device)
        self._stored = stored
        # Few operations know the one-byte floats, so their bytes are moved.
        self._data = data.view(torch.uint8) if stored.itemsize == 1 else data
        self._scales = torch.zeros(shape, dtype=torch.float32, device=device) if kv_dtype in _SCALED else None

    def write(self, layer: int, slots: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> None:
        """Keys and values of T tokens into their slots, int64 (T,)."""
        new = torch.stack((k_TGK, v_TGK), dim=1)
        if self._scales is not None:
            data, scales = quantized(new, self._stored, self._largest)
            self._scales[layer].flatten(0, 1).index_copy_(0, slots, scales)
            self._data[layer].flatten(0, 1).index_copy_(0, slots, data.view(torch.uint8))
        else:
            self._data[layer].flatten(0, 1).index_copy_(0, slots, new.to(self._stored))

    def read(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of blocks, int64 (N, width): each (N, width · block_size, G, K) of `dtype`."""
        data = self._data[layer].index_select(0, blocks.flatten())
        if self._scales is not None:
            scales = self._scales[layer].index_select(0, blocks.flatten())
            data = (data.view(self._stored).to(torch.float32) * scales[..., None]).to(self.dtype)
        both = data.to(self.dtype).view(len(blocks), -1, *data.shape[2:])
        return both[:, :, 0], both[:, :, 1]

    def clear(self, blocks: Tensor) -> None:
        """Zeros in all layers. blocks: int64 (N,)."""
        self._data.index_fill_(1, blocks, 0)
        if self._scales is not None:
            self._scales.index_fill_(1, blocks, 0)

    def close(self) -> None:
        """Let the memory go."""
        self._data, self._scales = self._data.new_empty(0), None

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(from, to), in all layers."""
        if not pairs:
            return
        sources, targets = torch.tensor(pairs, dtype=torch.int64, device=self._data.device).unbind(1)
        # All are read before any is written: as good as one by one, since no block is both copied to and copied from
        # later in a step.
        self._data.index_copy_(1, targets, self._data.index_select(1, sources))
        if self._scales is not None:
            self._scales.index_copy_(1, targets, self._scales.index_select(1, sources))


def quantized(x: Tensor, dtype: torch.dtype, largest: float) -> tuple[Tensor, Tensor]:
    """x (..., K) -> elements of `dtype` up to `largest`, and float32 scales (...): x ~ elements · scales."""
    wide = x.to(torch.float32)
    scales = (wide.abs().amax(dim=-1) / largest).clamp_(min=torch.finfo(torch.float32).tiny)
    scaled = wide / scales[..., None]
    if not dtype.is_floating_point:
        scaled = scaled.round_()
    return scaled.clamp_(-largest, largest).to(dtype), scales
