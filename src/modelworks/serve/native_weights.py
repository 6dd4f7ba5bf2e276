"""A model's weights in the order in which compiled steps read them.

Matrices (d_out, d_in) become panels of 32 outputs: for each step of the depth, 32 lanes of one float32 input or two
neighbouring bfloat16 ones, which is what an instruction multiplies. q, k and v are one matrix; a gated feed-forward's
gates and their factors take turns by 16 rows, so that a product's 32 sums hold both. What is missing to whole panels is
zero. See `kernels/product.h`.

All matrices lie in one allocation on large pages: reading them is what a step with few tokens costs, and with small
pages the processor spends much of that time looking up addresses.
"""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor
from torch.nn import functional as F

from modelworks.models import Transformer

PANEL = 32
LANES = 16


class LayerWeights(ctypes.Structure):
    """`LayerWeights` of kernels/interface.h."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in (
            *("qkv", "output", "up", "down", "qkv_bias", "output_bias", "up_bias", "down_bias"),
            *("attention_norm", "attention_norm_bias", "feed_forward_norm", "feed_forward_norm_bias"),
            *("query_norm", "key_norm", "keys", "values"),
        )
    ]


class ModelWeights(ctypes.Structure):
    """`ModelWeights` of kernels/interface.h."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in ("embedding", "positions", "head", "final_norm", "final_norm_bias", "key_positions", "layers")
    ]


def large_pages(n_bytes: int) -> Tensor:
    """Zeros, uint8 (n_bytes,); memory is taken when it is written to."""
    memory = mmap.mmap(-1, max(n_bytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:n_bytes]


class NativeWeights:
    """Packed copies of a whole model's weights. Of the model itself only the embeddings are held on to.

    `layers` and `model` point into memory that this object owns.
    """

    def __init__(self, model: Transformer) -> None:
        assert model.embedding is not None
        self.dtype = model.embedding.weight.dtype
        self.depth = 4 // self.dtype.itemsize
        self._held: list[Tensor] = []
        matrices = [(each, *_matrices(block)) for each, block in model.blocks.items()]
        packed_size = sum(self._size(rows) for _, *group in matrices for rows in group)
        head = model.head_weight().detach()
        self._arena = large_pages((packed_size + self._size(head)) * self.dtype.itemsize).view(self.dtype)
        self._used = 0
        self.layers = (LayerWeights * len(model.blocks))()
        for layer, (name, qkv, output, up, down) in zip(self.layers, matrices, strict=True):
            block = model.blocks[name]
            attention, feed_forward = block.attention, block.feed_forward
            layer.qkv, layer.output = self._pack(qkv), self._pack(output)
            layer.up, layer.down = self._pack(up), self._pack(down)
            if attention.q.bias is not None:
                layer.qkv_bias = self._vector(torch.cat([each.bias for each in (attention.q, attention.k, attention.v)]))
            layer.output_bias = self._vector(attention.o.bias)
            layer.up_bias = self._vector(_up(feed_forward, "bias"))
            layer.down_bias = self._vector(feed_forward.down.bias)
            for place in ("attention_norm", "feed_forward_norm"):
                norm = getattr(block, place)
                setattr(layer, place, self._vector(norm.weight))
                setattr(layer, f"{place}_bias", self._vector(getattr(norm, "bias", None)))
            if attention.q_norm is not None:
                layer.query_norm, layer.key_norm = (
                    self._vector(attention.q_norm.weight),
                    self._vector(attention.k_norm.weight),
                )
        self.model = ModelWeights(layers=ctypes.addressof(self.layers), head=self._pack(head))
        self.model.embedding = self._hold(model.embedding.weight.detach().contiguous())
        if model.position_embedding is not None:
            self.model.positions = self._hold(model.position_embedding.weight.detach().contiguous())
        assert model.final_norm is not None
        self.model.final_norm = self._vector(model.final_norm.weight)
        self.model.final_norm_bias = self._vector(getattr(model.final_norm, "bias", None))

    def _size(self, rows: Tensor) -> int:
        n_out, n_in = rows.shape
        return _up_to(n_out, PANEL) * _up_to(n_in, self.depth)

    def _pack(self, rows: Tensor) -> int:
        """The address of the packed copy of `rows` (d_out, d_in)."""
        n_out, n_in = rows.shape
        padded = F.pad(rows, (0, -n_in % self.depth, 0, -n_out % PANEL))
        lanes = padded.view(-1, PANEL, padded.shape[1] // self.depth, self.depth).transpose(1, 2)
        place = self._arena[self._used : self._used + padded.numel()]
        place.view(lanes.shape).copy_(lanes)
        self._used += padded.numel()
        return place.data_ptr()

    def _vector(self, values: Tensor | None) -> int | None:
        if values is None:
            return None
        values = values.detach().to(torch.float32)
        return self._hold(F.pad(values, (0, -len(values) % PANEL)).contiguous())

    def _hold(self, tensor: Tensor) -> int:
        self._held.append(tensor)
        return tensor.data_ptr()


def _matrices(block: torch.nn.Module) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four products of a block: q with k and v, output, up, down."""
    attention, feed_forward = block.attention, block.feed_forward
    qkv = torch.cat([each.weight.detach() for each in (attention.q, attention.k, attention.v)])  # type: ignore[union-attr]
    up = _up(feed_forward, "weight")  # type: ignore[arg-type]
    assert up is not None
    return qkv, attention.o.weight.detach(), up, feed_forward.down.weight.detach()  # type: ignore[union-attr, return-value]


def _up(feed_forward: torch.nn.Module, kind: str) -> Tensor | None:
    """Weight or bias of the product into the feed-forward's channels."""
    up: Tensor | None = getattr(feed_forward.up, kind)
    if up is None or feed_forward.gate is None:
        return None if up is None else up.detach()
    parts = []
    for each in (getattr(feed_forward.gate, kind), up):
        padding = (*(0,) * 2 * (each.ndim - 1), 0, -len(each) % LANES)
        parts.append(F.pad(each.detach(), padding).unflatten(0, (-1, LANES)))
    return torch.stack(parts, dim=1).flatten(0, 2)


def _up_to(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
