"""Making checkpoints as many ranks do, in one process: for the tests of this room."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from threading import Event

import numpy as np
import torch
from torch import Tensor

from modelworks.checkpoint.checksums import XXH3, Scheme
from modelworks.checkpoint.commit import Identity, commit
from modelworks.checkpoint.owners import Shard
from modelworks.checkpoint.part import PartWriter
from modelworks.checkpoint.storage import Folder, Storage
from modelworks.config import ModelConfig, RunConfig
from modelworks.layout import ShardSpec

CONFIG = RunConfig(model=ModelConfig(n_layers=1, d_model=8, n_heads=2, vocab_size=8192, d_ff=16))
SMALL_BLOCKS = Scheme(XXH3.name, XXH3.digits, 4096, XXH3.digest)  # so that small tensors have many
Cuts = Sequence[Sequence[int]]


def shards_of(name: str, tensor: Tensor, cuts: Cuts, section: str = "model") -> list[Shard]:
    """One shard for each combination of intervals [cuts[d][i], cuts[d][i + 1]); one for a tensor without elements."""
    if 0 in tensor.shape:
        return [Shard(section, ShardSpec.whole(name, tuple(tensor.shape)), tensor)]
    intervals = [list(itertools.pairwise(positions)) for positions in cuts]
    return [
        Shard(section, ShardSpec(name, tuple(tensor.shape), box), tensor[tuple(slice(a, b) for a, b in box)])
        for box in itertools.product(*intervals)
    ]


def write_parts(
    storage: Storage, ranks: Sequence[Sequence[Shard]], *, step: int = 1, state: Mapping[str, object] | None = None
) -> Folder:
    """A checkpoint whose rank r wrote `ranks[r]`."""
    name = f"step-{step:08d}"
    attempt = storage.begin(name)
    for rank, shards in enumerate(ranks):
        writer = PartWriter(storage.writing(attempt), rank, Event(), max_shard_bytes=1 << 16)
        writer.add(shards)
        writer.finish()
    identity = Identity.of_run(CONFIG, world_size=len(ranks), state=state or {}, metrics={}, tokenizer=None)
    return commit(storage, attempt, step, identity, len(ranks))


def dealt_out(shards: Sequence[Shard], n_ranks: int, seed: int = 0) -> list[list[Shard]]:
    """The shards in any order over so many ranks, some of which may get none."""
    order = np.random.default_rng(seed)
    ranks: list[list[Shard]] = [[] for _ in range(n_ranks)]
    for index in order.permutation(len(shards)):
        ranks[int(order.integers(n_ranks))].append(shards[index])
    return ranks


def numbers(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor whose elements differ, as far as the dtype can tell them apart."""
    return torch.arange(int(np.prod(shape))).reshape(list(shape)).to(dtype)
