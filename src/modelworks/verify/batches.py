"""The batches of a verification: made from the seed alone, the same in every process.

They are unkind on purpose: rows hold documents of unequal length, some rows have far fewer targets than others, one has
none, and some targets count half, so that a wrong denominator, a mean of means or a mask that leaks shows. One row has
targets to its end, so that every column has a gradient from the first step on.

With a batch ramp steps take its sizes in turn, the full batch first: suspects are looked for in the first step.
"""

from __future__ import annotations

import torch

from modelworks.config import RunConfig
from modelworks.data import Batch


def of_step(config: RunConfig, step: int) -> RunConfig:
    """The run with the batch of one step, and without a ramp."""
    sizes = config.batches.sizes
    return config.with_batch(sizes[-1 - step % len(sizes)])


def verification_batch(config: RunConfig, step: int) -> Batch:
    """The global batch of one step, (global_batch, seq_len). config: as `of_step` makes it."""
    rows, length, vocabulary = config.train.global_batch, config.data.seq_len, config.model.vocab_size
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    tokens = torch.randint(0, vocabulary, (rows, length + 1), generator=generator)
    starts = torch.rand(rows, length, generator=generator) < 3.0 / length
    starts[:, 0] = True
    document_ids = starts.int().cumsum(1, dtype=torch.int32) - 1
    place = torch.arange(length).expand(rows, length)
    begin = torch.where(starts, place, 0).cummax(1).values
    weights = torch.ones(rows, length)
    weights[torch.rand(rows, length, generator=generator) < 0.2] = 0.5
    for row in range(1, rows):
        kept = int(torch.randint(1, length + 1, (), generator=generator))
        weights[row, kept:] = 0.0
    if rows > 2:
        weights[rows // 2] = 0.0
    within = config.data.packing == "within-document"
    if within:  # the last token of a document has no target in it
        last = torch.ones(rows, length, dtype=torch.bool)
        last[:, :-1] = starts[:, 1:]
        weights = weights.masked_fill(last & (place < length - 1), 0.0)
    return Batch(
        tokens=tokens[:, :-1].contiguous(),
        positions=(place - begin if within else place).contiguous(),
        targets=tokens[:, 1:].contiguous(),
        loss_weights=weights,
        document_ids=document_ids if within else torch.zeros_like(document_ids),
    )
