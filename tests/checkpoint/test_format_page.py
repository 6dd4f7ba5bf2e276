"""docs/checkpoint-format.md is a specification: the reader printed there reads what we write."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_parts import CONFIG, SMALL_BLOCKS, dealt_out, shards_of, write_parts

from modelworks.checkpoint import open_storage, write_checkpoint
from modelworks.checkpoint.manifest import MANIFEST, FileEntry, Manifest, read_manifest
from modelworks.checkpoint.tensor_entries import TensorEntry

PAGE = Path(__file__).parents[2] / "docs" / "checkpoint-format.md"


@pytest.fixture(scope="module")
def printed() -> Any:
    """The function `read_tensor` of the page."""
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(code, names)
    assert len(code[code.index("def ") :].splitlines()) <= 30
    return names["read_tensor"]


def test_it_reads_what_one_process_wrote(printed: Any, tmp_path: Path) -> None:
    weight = torch.randn(6, 4)
    model = {"embedding.weight": weight, "head.weight": weight, "b": torch.randn(5).bfloat16(), "s": torch.tensor(2)}
    model["empty"] = torch.empty(0, 3)
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
    for name, value in model.items():
        np.testing.assert_array_equal(printed(path, "model", name), value.to(torch.float64).numpy())
    np.testing.assert_array_equal(printed(path, "optimizer", "b/exp_avg"), np.ones(5, np.float32))


def test_it_reads_what_many_ranks_wrote(printed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelworks.checkpoint.formats.safetensors_files.XXH3", SMALL_BLOCKS)
    monkeypatch.setattr("modelworks.checkpoint.commit.XXH3", SMALL_BLOCKS)
    value = torch.randn(30, 7, 100)
    shards = shards_of("w", value, [[0, 1, 13, 30], [0, 4, 7], [0, 100]])
    folder = write_parts(open_storage(tmp_path), dealt_out(shards, 4))
    np.testing.assert_array_equal(printed(folder.local(), "model", "w"), value.numpy())
    file = next(tmp_path.glob("step-*/rank-*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(AssertionError):
        printed(folder.local(), "model", "w")


def test_every_key_of_the_manifest_is_described(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    weight = torch.randn(2, 2)
    sections = {"model": {"a": weight, "b": weight}}
    path = write_checkpoint(tmp_path, step=1, config=CONFIG, sections=sections, state={}, tokenizer=None)
    written = json.loads((Path(path) / MANIFEST).read_text())
    for key in [*written, *written["files"][0], *written["tensors"][0], *written["tensors"][1]]:
        assert f"`{key}`" in page, key
    assert set(written["files"][0]) == set(FileEntry.model_fields)
    assert set(written["tensors"][1]) == set(TensorEntry.__dataclass_fields__)
    assert isinstance(read_manifest(Path(path)), Manifest)
