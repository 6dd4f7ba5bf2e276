"""Packed documents do not see each other: perturb one, and the logits of the others stay the same bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from modelworks.config import DataConfig, ModelConfig
from modelworks.data import Batch, TrainLoader, build_dataset
from modelworks.models import CausalContext, DocumentContext, Transformer, initialize


def logits(model: Transformer, batch: Batch, packing: str) -> torch.Tensor:
    context = DocumentContext(batch.document_ids) if packing == "within-document" else CausalContext()
    with torch.no_grad():
        return model.logits(model(batch.tokens, batch.positions, context))


@pytest.mark.parametrize("packing", ["within-document", "across"])
def test_perturbing_a_document(data_config: Callable[..., DataConfig], packing: str) -> None:
    config = data_config(packing=packing, seq_len=64)
    dataset = build_dataset(config, progress=False)
    apart = TrainLoader(dataset, data_config(seq_len=64), 0, 8).batch(0)  # knows where documents are
    batch = TrainLoader(dataset, config, 0, 8).batch(0)
    model = Transformer(ModelConfig(n_layers=2, d_model=32, n_heads=4, n_kv_heads=2, vocab_size=dataset.vocab_size))
    initialize(model, seed=0)
    before = logits(model, batch, packing)
    first = apart.document_ids == 0
    assert (apart.document_ids.max(dim=1).values > 0).sum() >= 4  # rows of several documents
    perturbed = replace(batch, tokens=torch.where(first, (batch.tokens + 1) % dataset.vocab_size, batch.tokens))
    after = logits(model, perturbed, packing)
    assert (after[first] != before[first]).any(dim=-1).all()
    if packing == "within-document":
        assert torch.equal(after[~first], before[~first])
    else:
        assert (after[~first] != before[~first]).any(dim=-1).all()
