"""Predicted activation bytes against those that really stay allocated."""

import pytest
import torch

from modelworks.config import ModelConfig, TrainConfig
from modelworks.models import (
    CausalContext,
    DropoutKey,
    Routing,
    Transformer,
    activation_bytes,
    default_dtype,
    initialize,
)
from modelworks.train import memory
from modelworks.train.precision import PRECISIONS

SHAPE = {"n_layers": 3, "d_model": 32, "n_heads": 4, "vocab_size": 64, "max_seq_len": 64}


EXPERTS = {"n_experts": 4, "d_expert": 24, "d_ff": 40, "dense_layers": [1], "expert_capacity": 1.0}


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-autocast"])
@pytest.mark.parametrize(
    ("recompute", "dropout", "tolerance"),
    [("none", 0.0, 0.01), ("none", 0.1, 0.01), ("selective", 0.0, 0.1), ("selective", 0.1, 0.1), ("full", 0.0, 0.35)],
)
def test_prediction_equals_what_stays_allocated(
    family: str, precision: str, recompute: str, dropout: float, tolerance: float
) -> None:
    shape = {**SHAPE, **EXPERTS} if family == "mixtral" else SHAPE
    config = ModelConfig(family=family, dropout=dropout, attention_dropout=dropout, **shape)
    kind = PRECISIONS[precision]
    with default_dtype(kind.parameter_dtype):
        model = Transformer(config)
    initialize(model, 0)
    model.set_recompute(recompute)
    rows, length = 2, 64
    tokens = torch.zeros(rows, length, dtype=torch.long)
    positions = torch.arange(length).repeat(rows, 1)
    key = DropoutKey(0, 0, length)

    def forward() -> torch.Tensor:
        with kind.autocast(torch.device("cpu")):
            return model(tokens, positions, CausalContext(dropout=key, routing=Routing(1.0, length)))

    measured = activation_bytes(forward, [*model.parameters(), tokens, positions])
    predicted = memory.activation_bytes(
        config, TrainConfig(recompute=recompute), precision=precision, micro_batch=rows, seq_len=length
    )
    assert predicted == pytest.approx(measured, rel=tolerance)
