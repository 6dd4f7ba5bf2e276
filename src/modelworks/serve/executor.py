"""An executor computes steps: it owns the cache's memory, writes a batch's keys and values, and gives logits.

There are two, of the same mathematics: torch (every model that this library builds, any device, any format of cache),
and a native one (C++, whole steps on the CPU, for models that it knows). Which block holds what is the business of the
scheduler, which executors know nothing of.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal, Protocol

from torch import Tensor

from modelworks.config import ModelConfig, UserError
from modelworks.models import Transformer
from modelworks.native import Unavailable
from modelworks.serve.batch import RaggedBatch
from modelworks.serve.torch_executor import TorchExecutor

Native = Literal["auto", "on", "off"]


class ExecutorBroken(RuntimeError):
    """No further step is possible, such as where ranks have lost each other."""


class Executor(Protocol):
    """One model and its cache of blocks 0 to n_blocks - 1, each room for block_size tokens.

    name: "torch" or "native". kv_dtype: the format of the cache, resolved. bytes_per_block: what a block takes in all
    layers.
    """

    config: ModelConfig
    name: str
    n_blocks: int
    block_size: int
    kv_dtype: str
    bytes_per_block: int

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (from, to), in this order; a step's copies come before its `run`."""

    def run(self, batch: RaggedBatch) -> Tensor:
        """Write the batch's keys and values and return its wanted logits: float32 (R, vocab_size), on the CPU.

        A sequence whose numbers are not finite spoils its own rows only.
        """

    def close(self) -> None:
        """Let the cache go. Closing twice is closing once."""


def build_executor(
    model: Transformer,
    *,
    n_blocks: int,
    block_size: int,
    kv_dtype: str = "auto",
    native: Native = "auto",
    batch_invariant: bool = False,
) -> Executor:
    """The executor for a model on its device.

    kv_dtype: `auto` (the model's own), fp32, bf16, int8 or fp8; see `modelworks.serve.kv_cache`.
    native: `on` raises UserError where compiled code cannot serve this model here, `auto` then says so in a line of the
    log and takes torch. batch_invariant: see `modelworks.serve.torch_executor`.
    """
    if native != "off":
        try:
            return _native(model, n_blocks, block_size, kv_dtype, batch_invariant)
        except Unavailable as reason:
            if native == "on":
                raise UserError(f"native: the compiled step cannot run here: {reason}; use auto or off") from None
            logging.getLogger(__name__).warning("steps run in torch, not compiled: %s", reason)
    return TorchExecutor(
        model, n_blocks=n_blocks, block_size=block_size, kv_dtype=kv_dtype, batch_invariant=batch_invariant
    )


def _native(model: Transformer, n_blocks: int, block_size: int, kv_dtype: str, batch_invariant: bool) -> Executor:
    """Raises Unavailable where compiled code cannot run this."""
    from modelworks.serve.native_executor import NativeExecutor

    return NativeExecutor(
        model, n_blocks=n_blocks, block_size=block_size, kv_dtype=kv_dtype, batch_invariant=batch_invariant
    )
