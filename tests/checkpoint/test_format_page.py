"""docs/checkpoint-format.md is a specification: the reader printed there reads what we write."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from modelworks.checkpoint import open_checkpoint, write_checkpoint
from modelworks.checkpoint.manifest import Manifest
from modelworks.config import ModelConfig, RunConfig

PAGE = Path(__file__).parents[2] / "docs" / "checkpoint-format.md"
CONFIG = RunConfig(model=ModelConfig(n_layers=1, d_model=8, n_heads=2, vocab_size=8192))


def test_the_printed_reader_reads_a_checkpoint(tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
    printed: dict[str, Any] = {}
    exec(code, printed)
    weight = torch.randn(6, 4)
    model = {"embedding.weight": weight, "head.weight": weight, "b": torch.randn(5).bfloat16(), "s": torch.tensor(2)}
    (tmp_path / "tokenizer.json").write_text("{}")
    path = write_checkpoint(
        tmp_path / "checkpoints",
        step=3,
        config=CONFIG,
        sections={"model": model, "optimizer": {"b/exp_avg": torch.ones(5)}},
        state={"loader": 3},
        tokenizer=tmp_path / "tokenizer.json",
        max_shard_bytes=64,
    )
    found = printed["read_section"](path, "model")
    assert found.keys() == model.keys()
    assert all(torch.equal(found[name], model[name]) and found[name].dtype == model[name].dtype for name in model)
    assert torch.equal(printed["read_section"](path, "optimizer")["b/exp_avg"], torch.ones(5))
    assert open_checkpoint(path).step == 3


def test_every_key_of_the_manifest_is_described(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for key in Manifest.model_fields:
        assert f"`{key}`" in page, key
    path = write_checkpoint(tmp_path, step=1, config=CONFIG, sections={}, state={}, tokenizer=None)
    assert set(json.loads((path / "manifest.json").read_text())) == set(Manifest.model_fields)
