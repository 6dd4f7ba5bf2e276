"""Compiled steps under test: small models, and sequences that an executor computes in batches as a test says."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from modelworks.config import ModelConfig
from modelworks.models import CausalContext, Transformer, initialize
from modelworks.serve.batch import RaggedBatch
from modelworks.serve.executor import Executor
from modelworks.serve.native_executor import NativeExecutor

SMALL: dict[str, Any] = {
    "n_layers": 2,
    "d_model": 96,
    "n_heads": 6,
    "n_kv_heads": 2,
    "head_dim": 16,
    "d_ff": 80,
    "vocab_size": 201,
    "max_seq_len": 2048,
}


def make(dtype: torch.dtype = torch.float32, **settings: Any) -> Transformer:
    """A small model whose every parameter is random: zero biases would hide that they are forgotten."""
    model = Transformer(ModelConfig(**{**SMALL, **settings}))
    initialize(model, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + 0.3 * noise if parameter.ndim == 1 else parameter * 3)
    return model.to(dtype).eval()


class Served:
    """Sequences in an executor's cache, each in blocks at random places. Keeps all logits by (sequence, position)."""

    def __init__(self, executor: Executor, seed: int = 0) -> None:
        self.executor, self.size = executor, executor.block_size
        self.free = list(range(executor.n_blocks))
        random.Random(seed).shuffle(self.free)
        self.blocks: dict[str, list[int]] = {}
        self.done: dict[str, int] = {}
        self.logits: dict[tuple[str, int], Tensor] = {}
        self.last: RaggedBatch | None = None

    def step(self, *work: tuple[str, list[int]]) -> None:
        """The next tokens of some sequences, in one batch; logits of all of them."""
        tokens: list[int] = []
        positions: list[int] = []
        slots, starts, lengths, owners = [], [0], [], []
        for name, new in work:
            start = self.done.get(name, 0)
            blocks = self.blocks.setdefault(name, [])
            while len(blocks) * self.size < start + len(new):
                blocks.append(self.free.pop())
            for position in range(start, start + len(new)):
                slots.append(blocks[position // self.size] * self.size + position % self.size)
                owners.append((name, position))
            tokens += new
            positions += range(start, start + len(new))
            starts.append(len(tokens))
            self.done[name] = start + len(new)
            lengths.append(self.done[name])
        widest = max(len(self.blocks[name]) for name, _ in work)
        tables = [self.blocks[name] + [0] * (widest - len(self.blocks[name])) for name, _ in work]
        long, short = torch.int64, torch.int32
        self.last = RaggedBatch(
            tokens=torch.tensor(tokens, dtype=long),
            positions=torch.tensor(positions, dtype=long),
            slots=torch.tensor(slots, dtype=long),
            starts=torch.tensor(starts, dtype=short),
            lengths=torch.tensor(lengths, dtype=short),
            tables=torch.tensor(tables, dtype=short),
            wanted=torch.arange(len(tokens)),
        )
        logits = self.executor.run(self.last)
        self.logits |= dict(zip(owners, logits, strict=True))

    def of(self, name: str) -> Tensor:
        return torch.stack([self.logits[name, position] for position in range(self.done[name])])


def open_executor(model: Transformer, **settings: Any) -> NativeExecutor:
    return NativeExecutor(model, **{"n_blocks": 64, "block_size": 16, "n_threads": 2, **settings})


def tokens_of(length: int, seed: int = 0, vocab_size: int = 201) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


@torch.no_grad()
def expected(model: Transformer, tokens: list[int]) -> Tensor:
    row = torch.tensor([tokens])
    hidden = model(row, torch.arange(len(tokens))[None], CausalContext())
    return model.logits(hidden)[0].to(torch.float32)


def chunks_of(tokens: list[int], sizes: list[int]) -> Iterator[list[int]]:
    for size in sizes:
        yield tokens[:size]
        tokens = tokens[size:]
    assert not tokens


def error(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, against the spread of the logits."""
    return float((found - wanted).abs().max() / wanted.std())


SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "one head each": {"n_kv_heads": 6},
    "odd sizes": {"d_model": 70, "head_dim": 10, "d_ff": 77, "vocab_size": 203, "n_kv_heads": 3},
    "wide heads": {"n_heads": 2, "n_kv_heads": 1, "head_dim": 80},
    "biases": {"attention_bias": True, "attention_output_bias": True, "feed_forward_bias": True},
    "qk norm": {"qk_norm": True, "family": "qwen3"},
    "gpt2": {"family": "gpt2", "n_kv_heads": 6},
    "geglu": {"feed_forward": "geglu"},
    "gelu": {"feed_forward": "gelu", "feed_forward_bias": True},
    "relu": {"feed_forward": "relu"},
    "no positions": {"positions": "none"},
    "tied": {"tie_embeddings": True},
    "no residual": {"residual": False, "n_layers": 1},
    "window": {"sliding_window": 20},
    "mup": {"mup_base_width": 48, "mup_base_head_dim": 8},
    "llama3 scaling": {"rope_scaling": {"type": "llama3", "factor": 8.0, "original_max_seq_len": 32}},
    "yarn": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_seq_len": 32}},
}


def alone(model: Transformer, tokens: list[int], **settings: Any) -> Tensor:
    served = Served(open_executor(model, **settings))
    served.step(("a", tokens))
    return served.of("a")
