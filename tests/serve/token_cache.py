"""An executor whose cache holds token ids and whose logits are a function of what a sequence finds there: wrong tables,
slots, positions, lengths or copies are other logits at once. `logits_after` is the same function without any cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from modelworks.config import ModelConfig
from modelworks.serve.batch import RaggedBatch

VOCAB_SIZE = 24
EMPTY = -1


@lru_cache(maxsize=100_000)
def _row(tokens: tuple[int, ...]) -> Tensor:
    """Logits after these tokens: of no pattern, the same everywhere (a hash of integers does not depend on the run)."""
    return torch.from_numpy(np.random.default_rng(hash(tokens) % 2**63).normal(0, 2, VOCAB_SIZE).astype(np.float32))


def logits_after(tokens: Sequence[int]) -> Tensor:
    return _row(tuple(tokens))


def greedy(prompt: Sequence[int], count: int, ends: Sequence[int] = ()) -> list[int]:
    """The most likely tokens after `prompt`, the one that ends it included."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_after(tokens).argmax()))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]


class TokenCache:
    """spoiled: sequences for whose tokens it is true have NaN for logits."""

    name, kv_dtype, bytes_per_block = "tokens", "fp32", 8

    def __init__(self, n_blocks: int = 64, block_size: int = 4) -> None:
        self.config = ModelConfig(n_layers=1, d_model=8, n_heads=1, vocab_size=VOCAB_SIZE, max_seq_len=4096)
        self.n_blocks, self.block_size = n_blocks, block_size
        self.cache = np.full((n_blocks, block_size), EMPTY)
        self.spoiled: Callable[[list[int]], bool] = lambda tokens: False
        self.fails = False
        self.n_tokens = 0

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self.cache[target] = self.cache[source]

    def run(self, batch: RaggedBatch) -> Tensor:
        if self.fails:
            raise RuntimeError("out of\nmemory")
        self.n_tokens += batch.n_tokens
        self.cache.reshape(-1)[batch.slots.numpy()] = batch.tokens.numpy()
        rows = []
        owners = np.searchsorted(batch.starts.numpy(), batch.wanted.numpy(), side="right") - 1
        for place, owner in zip(batch.wanted.tolist(), owners.tolist(), strict=True):
            n_seen = int(batch.lengths[owner]) - (int(batch.starts[owner + 1]) - 1 - place)
            n_blocks = math.ceil(n_seen / self.block_size)
            seen = self.cache[batch.tables[owner, :n_blocks].numpy()].reshape(-1)[:n_seen].tolist()
            assert int(batch.positions[place]) == n_seen - 1
            assert EMPTY not in seen, "a slot is read that nobody wrote"
            rows.append(torch.full((VOCAB_SIZE,), math.nan) if self.spoiled(seen) else logits_after(seen))
        return torch.stack(rows) if rows else torch.empty(0, VOCAB_SIZE)

    def close(self) -> None: ...
