"""A model of µP in formats without it: weights take the multipliers, with transformers as the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from modelworks.checkpoint import CheckpointError, convert, load_model, open_checkpoint, write_model
from modelworks.config import ModelConfig
from modelworks.models import CausalContext, Transformer, initialize

SHAPE: dict[str, Any] = {"n_layers": 2, "vocab_size": 48, "n_heads": 4, "max_seq_len": 32, "init_std": 0.3}
TOKENS = torch.randint(0, 48, (2, 20), generator=torch.Generator().manual_seed(0))


def saved(path: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Tensor:
    """A checkpoint at `path`; its logits."""
    config = ModelConfig.model_validate({**SHAPE, **changes})
    model = Transformer(config)
    initialize(model, seed=5)
    tensors = {name: value.detach().to(dtype) for name, value in model.named_parameters()}
    write_model(path, config=config, tensors=tensors, tokenizer=None, origin="a test")
    return logits_of(model)


def logits_of(model: Transformer) -> Tensor:
    with torch.no_grad():
        return model.eval().logits(model(TOKENS, torch.arange(20).expand(2, 20), CausalContext()))


@pytest.mark.parametrize(("family", "tied"), [("gpt2", True), ("qwen2", False), ("qwen3", True), ("mixtral", False)])
def test_transformers_computes_the_same(family: str, tied: bool, tmp_path: Path) -> None:
    few = {"n_experts": 4, "d_ff": 64} if family == "mixtral" else {}
    base = {"d_model": 64, "mup_base_width": 16, "mup_base_head_dim": 4}
    expected = saved(tmp_path / "own", family=family, tie_embeddings=tied, **base, **few)
    own = load_model(str(tmp_path / "own"))
    assert own.config.mup_base_width == 16
    assert torch.equal(logits_of(own.model), expected)
    convert(str(tmp_path / "own"), tmp_path / "theirs", "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, expected, rtol=1e-4, atol=1e-5)
    convert(str(tmp_path / "theirs"), tmp_path / "back", "modelworks")
    again = open_checkpoint(tmp_path / "back").model_config
    assert again.mup_base_width is None
    assert again.init_std == 0.3


def test_a_factor_that_narrow_weights_cannot_take(tmp_path: Path) -> None:
    saved(tmp_path / "own", torch.bfloat16, d_model=96, n_heads=6, mup_base_width=32)
    with pytest.raises(CheckpointError, match=r"factor 0.333333, which torch.bfloat16 would round; .*--dtype fp32"):
        convert(str(tmp_path / "own"), tmp_path / "theirs", "hf")
    assert not (tmp_path / "theirs").exists()
    convert(str(tmp_path / "own"), tmp_path / "theirs", "hf", dtype=torch.float32)
