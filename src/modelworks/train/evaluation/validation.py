"""Loss, perplexity and bits per byte of a model on text.

Perplexity is exp(mean loss per token) and depends on the tokeniser; bits per byte divide the total loss by the bytes
of the text itself, so models with different tokenisers, and general compressors, can be compared by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from modelworks.config import RunConfig
from modelworks.data import Batch, ScoredText
from modelworks.models import CausalContext, DocumentContext, Transformer
from modelworks.parallel import SplitModel
from modelworks.train.loss import vocabulary_loss
from modelworks.train.micro_batches import MicroBatches
from modelworks.train.precision import PRECISIONS, Precision
from modelworks.train.step import global_loss

# Batches that go through a pipeline at once: enough to fill it, few enough to hold.
_TOGETHER = 8


@dataclass(frozen=True)
class TextScore:
    """loss: nats per token. tokens: that were predicted. n_bytes: UTF-8 bytes of the text they stand for."""

    loss: float
    tokens: int
    n_bytes: int

    @property
    def perplexity(self) -> float:
        # A diverged model's loss overflows exp; an infinite perplexity says it as well.
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        return self.loss * self.tokens / math.log(2) / self.n_bytes


@torch.no_grad()
def score_text(
    model: Transformer,
    text: ScoredText,
    *,
    precision: Precision = PRECISIONS["fp32"],
    advance: Callable[[], None] = lambda: None,
) -> TextScore:
    """Score every target of `text` once. Uses no random numbers and leaves the model in the mode it was in.

    advance: called after each batch, for a progress bar.
    """
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64)
    try:
        for batch in text:
            here = batch.to(device)
            with precision.autocast(device):
                within = text.packing == "within-document"
                context = DocumentContext(here.document_ids) if within else CausalContext()
                hidden = model(here.tokens, here.positions, context)
                loss = vocabulary_loss(hidden, model.head_weight(), here.targets, here.loss_weights)
            total += loss.nll.cpu()
            advance()
    finally:
        model.train(training)
    return TextScore(float(total) / text.n_targets, text.n_targets, text.n_bytes)


@torch.no_grad()
def score_split(model: SplitModel, text: ScoredText, config: RunConfig, *, precision: Precision) -> TextScore:
    """The same score by all ranks of a layout, on every rank; all must call it.

    Data-parallel ranks share the batches. Where these do not divide, some score batches whose tokens count nothing:
    ranks that exchange experts or stages must run alike.
    """
    if model.mesh.layout.world_size == 1:
        return score_text(model.parts[0], text, precision=precision)
    ranks, place = model.mesh.size("dp"), model.mesh.place("dp")
    batches = [_padded(batch, text.rows) for batch in text]
    rounds = -(-len(batches) // ranks)
    own = [batches[index] if index < len(batches) else _uncounted(batches[0]) for index in _turns(rounds, ranks, place)]
    total = 0.0
    model.train(False)
    try:
        for start in range(0, rounds, _TOGETHER):
            parts = own[start : start + _TOGETHER]
            micro = MicroBatches(model, parts, config, precision)
            executor = model.executor(len(parts), training=False)
            executor.run(len(parts), micro.forward, training=False, edge_shapes=micro.edge_shapes)
            total += global_loss(model, micro, 1.0)
    finally:
        model.train(True)
    return TextScore(total / text.n_targets, text.n_targets, text.n_bytes)


def _turns(rounds: int, ranks: int, place: int) -> range:
    return range(place, rounds * ranks, ranks)


def _padded(batch: Batch, rows: int) -> Batch:
    """Of `rows` rows, those that are missing repeating the first and counting nothing: stages exchange one shape."""
    missing = rows - batch.n_rows
    if not missing:
        return batch
    filler = _uncounted(batch.rows(slice(0, 1)))
    return batch.joined([filler] * missing)


def _uncounted(batch: Batch) -> Batch:
    return replace(batch, loss_weights=torch.zeros_like(batch.loss_weights))
