"""Loss, perplexity and bits per byte of a model on text.

Perplexity is exp(mean loss per token) and depends on the tokeniser; bits per byte divide the total loss by the bytes
of the text itself, so models with different tokenisers, and general compressors, can be compared by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from modelworks.data import ScoredText
from modelworks.models import Transformer
from modelworks.train.loss import vocabulary_loss
from modelworks.train.precision import PRECISIONS, Precision
from modelworks.train.step import attention_context


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
                hidden = model(here.tokens, here.positions, attention_context(here, text.packing))
                loss = vocabulary_loss(hidden, model.head_weight(), here.targets, here.loss_weights)
            total += loss.nll.cpu()
            advance()
    finally:
        model.train(training)
    return TextScore(float(total) / text.n_targets, text.n_targets, text.n_bytes)
