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
import itertools
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

    `layers` and `model` point into memory that this object owns. matrices: packed, one after another; dtype: theirs.
    """

    def __init__(self, model: Transformer) -> None:
        self._named = {name: parameter.detach() for name, parameter in model.named_parameters()}
        self.dtype = next(iter(self._named.values())).dtype
        self._depth = 4 // self.dtype.itemsize
        self._held: list[Tensor] = []
        head = model.head_weight().detach()
        blocks = [f"blocks.{layer}" for layer in model.blocks]
        self.matrices = large_pages(self._packed_size(blocks, head) * self.dtype.itemsize).view(self.dtype)
        self._used = 0
        self.layers = (LayerWeights * len(blocks))(*(self._layer(block) for block in blocks))
        self.model = ModelWeights(
            embedding=self._hold(self._named["embedding.weight"]),
            positions=self._hold(self._named.get("position_embedding.weight")),
            head=self._pack(head),
            final_norm=self._vector(self._named["final_norm.weight"]),
            final_norm_bias=self._vector(self._named.get("final_norm.bias")),
            layers=ctypes.addressof(self.layers),
        )

    def _layer(self, block: str) -> LayerWeights:
        attention, feed_forward = f"{block}.attention", f"{block}.feed_forward"
        return LayerWeights(
            **{name: self._pack(rows) for name, rows in self._matrices(block).items()},
            qkv_bias=self._vector(self._qkv(attention, "bias")),
            output_bias=self._vector(self._named.get(f"{attention}.o.bias")),
            up_bias=self._vector(self._up(feed_forward, "bias")),
            down_bias=self._vector(self._named.get(f"{feed_forward}.down.bias")),
            attention_norm=self._vector(self._named[f"{block}.attention_norm.weight"]),
            attention_norm_bias=self._vector(self._named.get(f"{block}.attention_norm.bias")),
            feed_forward_norm=self._vector(self._named[f"{block}.feed_forward_norm.weight"]),
            feed_forward_norm_bias=self._vector(self._named.get(f"{block}.feed_forward_norm.bias")),
            query_norm=self._vector(self._named.get(f"{attention}.q_norm.weight")),
            key_norm=self._vector(self._named.get(f"{attention}.k_norm.weight")),
        )

    def _matrices(self, block: str) -> dict[str, Tensor]:
        """The four products of a block, in the order in which a step reads them."""
        attention, feed_forward = f"{block}.attention", f"{block}.feed_forward"
        qkv, up = self._qkv(attention, "weight"), self._up(feed_forward, "weight")
        assert qkv is not None
        assert up is not None
        output, down = self._named[f"{attention}.o.weight"], self._named[f"{feed_forward}.down.weight"]
        return {"qkv": qkv, "output": output, "up": up, "down": down}

    def _qkv(self, attention: str, kind: str) -> Tensor | None:
        parts = [self._named.get(f"{attention}.{each}.{kind}") for each in "qkv"]
        return None if parts[0] is None else torch.cat([part for part in parts if part is not None])

    def _up(self, feed_forward: str, kind: str) -> Tensor | None:
        """Weight or bias of the product into the feed-forward's channels."""
        gate, up = self._named.get(f"{feed_forward}.gate.{kind}"), self._named.get(f"{feed_forward}.up.{kind}")
        if gate is None or up is None:
            return up
        missing = (*(0,) * 2 * (up.ndim - 1), 0, -len(up) % LANES)
        parts = [F.pad(each, missing).view(-1, LANES, *up.shape[1:]) for each in (gate, up)]
        return torch.stack(parts, dim=1).flatten(0, 2)

    def _packed_size(self, blocks: list[str], head: Tensor) -> int:
        """Elements of all packed matrices."""
        matrices = (rows for block in blocks for rows in self._matrices(block).values())  # one after another: copies
        shapes = (rows.shape for rows in itertools.chain(matrices, (head,)))
        return sum((n_out + -n_out % PANEL) * (n_in + -n_in % self._depth) for n_out, n_in in shapes)

    def _pack(self, rows: Tensor) -> int:
        """The address of the packed copy of `rows` (d_out, d_in)."""
        n_out, n_in = rows.shape
        padded = F.pad(rows, (0, -n_in % self._depth, 0, -n_out % PANEL))
        lanes = padded.view(-1, PANEL, padded.shape[1] // self._depth, self._depth).transpose(1, 2)
        place = self.matrices[self._used : self._used + padded.numel()]
        place.view(lanes.shape).copy_(lanes)
        self._used += padded.numel()
        return place.data_ptr()

    def _vector(self, values: Tensor | None) -> int | None:
        return None if values is None else self._hold(F.pad(values.to(torch.float32), (0, -len(values) % PANEL)))

    def _hold(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._held.append(tensor.contiguous())
        return self._held[-1].data_ptr()
