"""Whole steps in compiled code on the CPU (`kernels/`, C++): one call from tokens to logits.

The mathematics is that of `models.Transformer`, in these precisions: products of the model's own type (float32 or
bfloat16) are summed in float32; the residual stream, norms, rotations and softmax are float32. So in bfloat16 results
are closer to the float32 model's than torch's are, which rounds the residual stream after every addition.

Invariant: a row's result does not depend, in any bit, on the other rows, on the chunks in which its sequence came, on
which blocks hold it, or on the number of threads. Every sum has one order: over the depth in products (`tiles.h`), over
keys counted from the sequence's first in attention (`attention.h`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from modelworks.config.mup import query_multiplier
from modelworks.models import Transformer
from modelworks.native import Unavailable, load
from modelworks.serve.batch import RaggedBatch
from modelworks.serve.kv_cache import kv_bytes_per_block, resolve_kv_dtype
from modelworks.serve.native_weights import LANES, LayerWeights, ModelWeights, NativeWeights, large_pages

_DTYPES = {torch.float32, torch.bfloat16}
_CACHES = ("fp32", "bf16", "int8", "fp8")  # as `CacheKind` of kernels/interface.h counts them
_ACTIVATIONS = {"swiglu": 0, "geglu": 1, "gelu": 1, "gelu_tanh": 2, "relu": 3}
_PHASES = ("embedding", "norms", "qkv", "attention", "output", "up", "down", "head", "waiting")
_FLAGS = ("-fvisibility=hidden", "-ffp-contract=fast")
_BAD_POSITION = 2
_WRONG = ("", "tokens", "positions", "slots", "starts, lengths and tables", "wanted")


class NativeExecutor:
    """An `Executor`. Raises Unavailable, with the reason, for models that it does not know, and UserError for a format
    of the cache that makes no sense (`resolve_kv_dtype`).

    n_threads: of its own; default torch's number at the time. profile: keep what `seconds` tells. Weights are copied
    (packed): a model that nothing else uses may be dropped.
    """

    name = "native"

    def __init__(
        self,
        model: Transformer,
        *,
        n_blocks: int,
        block_size: int,
        kv_dtype: str = "auto",
        batch_invariant: bool = False,  # it always is
        n_threads: int | None = None,
        profile: bool = False,
    ) -> None:
        if reason := unsupported(model):
            raise Unavailable(reason)
        self.kv_dtype = resolve_kv_dtype(kv_dtype, model.head_weight().dtype)
        self._library = _library(profile)
        self.config, self.n_blocks, self.block_size = model.config, n_blocks, block_size
        self._weights = NativeWeights(model)
        self.bytes_per_block = kv_bytes_per_block(self.config, block_size, self.kv_dtype, lanes=LANES)
        self._cache = large_pages(n_blocks * self.bytes_per_block)
        half = n_blocks * self.bytes_per_block // self.config.n_layers // 2  # a layer's keys, or values
        for i, layer in enumerate(self._weights.layers):
            layer.keys = self._cache.data_ptr() + 2 * i * half
            layer.values = layer.keys + half
        self._key_positions = torch.zeros(n_blocks * block_size + LANES, dtype=torch.int32)
        self._weights.model.key_positions = self._key_positions.data_ptr()
        self._rotary = model.rotary
        self._angles: list[Tensor] = []  # cosines and sines of all positions so far
        self._rotations: tuple[int | None, int | None, int] = (None, None, model.config.max_seq_len)
        self._rotate_up_to(1)
        shape = _shape(model, self.kv_dtype, n_blocks, block_size, n_threads or torch.get_num_threads())
        self._engine: int | None = self._library.modelworks_serve_open(
            ctypes.byref(shape), ctypes.byref(self._weights.model)
        )

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        if any(not 0 <= block < self.n_blocks for pair in pairs for block in pair):
            raise ValueError(f"blocks to copy are out of range: {pairs}; there are {self.n_blocks}")
        flat = [block for pair in pairs for block in pair]
        self._library.modelworks_serve_copy_blocks(self._open, (ctypes.c_int64 * len(flat))(*flat), len(pairs))

    def run(self, batch: RaggedBatch) -> Tensor:
        logits = torch.empty((batch.wanted.shape[0], self.config.vocab_size), dtype=torch.float32)
        # Little of torch and Python on this way: the weights of the last step have pushed them out of all caches.
        wrong = self._library.modelworks_serve_run(self._open, ctypes.byref(self._describe(batch, logits)))
        if wrong == _BAD_POSITION and self._rotate_up_to(int(batch.positions.max()) + 1):
            wrong = self._library.modelworks_serve_run(self._open, ctypes.byref(self._describe(batch, logits)))
        if wrong:
            raise ValueError(f"a batch's {_WRONG[wrong]} are out of range")
        return logits

    def seconds(self) -> dict[str, float]:
        """What the calling thread has spent so far on each phase of a step; zeros without `profile`."""
        return {name: self._library.modelworks_serve_seconds(self._open, i) for i, name in enumerate(_PHASES)}

    @property
    def packed_weights(self) -> Tensor:
        """All packed matrices, one after another."""
        return self._weights.matrices

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            self._library.modelworks_serve_close(engine)
            self._cache = torch.empty(0)
            del self._weights

    @property
    def _open(self) -> int:
        if self._engine is None:
            raise ValueError("this executor is closed")
        return self._engine

    def _describe(self, batch: RaggedBatch, logits: Tensor) -> _Batch:
        return _Batch(
            batch.tokens.shape[0],
            batch.lengths.shape[0],
            batch.wanted.shape[0],
            batch.tables.shape[1],
            batch.tokens.data_ptr(),
            batch.positions.data_ptr(),
            batch.slots.data_ptr(),
            batch.starts.data_ptr(),
            batch.lengths.data_ptr(),
            batch.tables.data_ptr(),
            batch.wanted.data_ptr(),
            *self._rotations,
            logits.data_ptr(),
        )

    def _rotate_up_to(self, length: int) -> bool:
        """Make room for positions below `length`; False where there is enough, or no rotation."""
        known = len(self._angles[0]) if self._angles else 0
        if self._rotary is None or length <= known:
            return False
        cosine, sine = self._rotary(torch.arange(max(length, 2 * known, 512))[None], torch.float32)
        self._angles = [each[0, :, 0].contiguous() for each in (cosine, sine)]
        self._rotations = (self._angles[0].data_ptr(), self._angles[1].data_ptr(), len(self._angles[0]))
        return True


def unsupported(model: Transformer) -> str | None:
    """Why compiled steps cannot be had of this model, or None."""
    config, part = model.config, model.part
    scaling = config.rope_scaling.type if config.rope_scaling else None
    weights = list(model.parameters())
    dtypes = {each.dtype for each in weights}
    reasons = [
        (config.n_experts > 0, "it has experts"),
        (config.norm_position != "pre", "its norms come after the residual connection"),
        (scaling == "dynamic", "dynamic rope scaling depends on what else is in the batch"),
        (not (part.first and part.last), "it is a part of a model"),
        (any(each.device.type != "cpu" for each in weights), "it is not on the CPU"),
        (any(type(each.data) is not torch.Tensor for each in weights), "its weights are sharded or wrapped"),
        (
            len(dtypes) != 1 or not dtypes <= _DTYPES,
            f"its weights are {_names(dtypes)}, not fp32 or bf16",
        ),
    ]
    return next((reason for applies, reason in reasons if applies), None)


def _names(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


class _Shape(ctypes.Structure):
    """`ModelShape` of kernels/interface.h."""

    _fields_ = [
        *(
            (name, ctypes.c_int32)
            for name in (
                *("n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff", "vocab_size"),
                *("norm_kind", "activation", "gated", "residual", "window"),
                *("weights_are_bfloat16", "cache_kind", "n_blocks", "block_size", "n_threads"),
            )
        ),
        *((name, ctypes.c_float) for name in ("norm_epsilon", "score_scale", "output_multiplier")),
    ]


def _shape(model: Transformer, kv_dtype: str, n_blocks: int, block_size: int, n_threads: int) -> _Shape:
    config = model.config
    return _Shape(
        **{name: getattr(config, name) for name in ("n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim")},
        **{name: getattr(config, name) for name in ("d_ff", "vocab_size", "gated", "residual")},
        norm_kind=int(config.norm == "layernorm"),
        activation=_ACTIVATIONS[config.feed_forward],
        window=min(config.sliding_window or 0, 2**31 - 1),
        weights_are_bfloat16=next(model.parameters()).dtype == torch.bfloat16,
        cache_kind=_CACHES.index(kv_dtype),
        n_blocks=n_blocks,
        block_size=block_size,
        n_threads=n_threads,
        norm_epsilon=config.norm_eps,
        score_scale=query_multiplier(config) / config.head_dim**0.5,
        output_multiplier=model.output_multiplier,
    )


class _Batch(ctypes.Structure):
    """`Batch` of kernels/interface.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("n_tokens", "n_sequences", "n_wanted", "table_width")),
        *(
            (name, ctypes.c_void_p)
            for name in ("tokens", "positions", "slots", "starts", "lengths", "tables", "wanted")
        ),
        *((name, ctypes.c_void_p) for name in ("cosines", "sines")),
        ("n_positions", ctypes.c_int64),
        ("logits", ctypes.c_void_p),
    ]


def _library(profile: bool = False) -> ctypes.CDLL:
    directory = Path(__file__).with_name("kernels")
    sources = sorted((*directory.glob("*.cpp"), *directory.glob("*.h")))
    library = load("serve", sources, flags=(*_FLAGS, *["-DMODELWORKS_PROFILE"] * profile))
    pointer = ctypes.c_void_p
    library.modelworks_serve_open.restype = pointer
    library.modelworks_serve_open.argtypes = [pointer, pointer]
    library.modelworks_serve_close.argtypes = [pointer]
    library.modelworks_serve_close.restype = None
    library.modelworks_serve_run.argtypes = [pointer, pointer]
    library.modelworks_serve_copy_blocks.argtypes = [pointer, pointer, ctypes.c_int64]
    library.modelworks_serve_copy_blocks.restype = None
    library.modelworks_serve_seconds.restype = ctypes.c_double
    library.modelworks_serve_seconds.argtypes = [pointer, ctypes.c_int32]
    library.modelworks_serve_size.restype = ctypes.c_int64
    for which, mirror in enumerate((_Shape, LayerWeights, ModelWeights, _Batch)):
        assert library.modelworks_serve_size(which) == ctypes.sizeof(mirror), mirror.__name__
    return library
