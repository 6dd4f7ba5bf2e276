"""Export never holds more than a tensor, and does not finish with a model that computes something else."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from modelworks.checkpoint import CheckpointError, LazyTensor, convert, load_model, open_checkpoint, write_model
from modelworks.checkpoint import conversion as module
from modelworks.checkpoint.formats.safetensors_files import ShardedSafetensors
from modelworks.config import ModelConfig, parameter_shapes
from modelworks.models import CausalContext

SMALL: dict[str, Any] = {"n_layers": 3, "d_model": 16, "n_heads": 4, "vocab_size": 90, "max_seq_len": 32}
OVERHEAD = 512 << 20  # bytes beyond the largest tensor, the interpreter and torch included


def write(path: Path, config: ModelConfig, dtype: torch.dtype = torch.float32) -> Path:
    """A model of random weights, made one at a time."""

    def load(name: str, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(len(name) * 1000 + sum(map(ord, name)))
        block = torch.randn(1 << 16, generator=generator) * 0.2  # repeated: large models are made in seconds
        size = torch.Size(shape).numel()
        whole = torch.empty(size, dtype=dtype)
        for start in range(0, size, len(block)):
            whole[start : start + len(block)] = block[: size - start]
        return whole.view(shape) + (1.0 if "norm" in name else 0.0)

    tensors = {
        name: LazyTensor(dtype, shape, lambda name=name, shape=shape: load(name, shape))  # type: ignore[misc]
        for name, shape in parameter_shapes(config).items()
    }
    return write_model(path, config=config, tensors=tensors, tokenizer=None, origin="test")


@pytest.mark.parametrize("to", ["hf", "modelworks"])
@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(**SMALL, n_kv_heads=2, family="llama"),
        ModelConfig(**SMALL, family="gpt2"),
        ModelConfig(**SMALL, family="mixtral", n_experts=4, d_ff=32),
    ],
    ids=["llama", "gpt2", "mixtral"],
)
def test_one_tensor_is_alive_at_a_time(
    config: ModelConfig, to: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted at every reading of a file: from the source while it is written, and from both for the check."""
    own = write(tmp_path / "own", config)
    alive, peak, reads = 0, 0, 0

    def freed(size: int) -> None:
        nonlocal alive
        alive -= size

    def counting(read: Any) -> Any:
        def counted(self: Any, *arguments: Any) -> Tensor:
            nonlocal alive, peak, reads
            tensor: Tensor = read(self, *arguments)
            alive, reads = alive + tensor.nbytes, reads + 1
            peak = max(peak, alive)
            weakref.finalize(tensor, freed, tensor.nbytes)
            return tensor

        return counted

    checkpoint_class = type(open_checkpoint(own))
    monkeypatch.setattr(checkpoint_class, "tensor", counting(checkpoint_class.tensor))
    monkeypatch.setattr(ShardedSafetensors, "read", counting(ShardedSafetensors.read))
    convert(str(own), tmp_path / "out", to, max_shard_bytes=4000)
    shapes = parameter_shapes(config)
    largest = 4 * max(torch.Size(shape).numel() for shape in shapes.values())
    fused = 4 * 3 * config.d_model * config.d_attention  # GPT-2's files hold q, k and v as one tensor
    assert reads >= 3 * len(shapes)
    assert peak <= max(largest, fused) + 2048, "a tensor, and the norms and router of a layer"
    assert alive == 0


def test_sharded_by_size_and_readable(tmp_path: Path) -> None:
    config = ModelConfig(**SMALL, n_kv_heads=2, family="llama")
    own = write(tmp_path / "own", config)
    convert(str(own), tmp_path / "out", "hf", max_shard_bytes=4000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    largest = 4 * 90 * 16
    for file in files:
        assert (tmp_path / "out" / file).stat().st_size <= max(4000, largest) + 4000
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    loaded = load_model(str(own)).model
    tokens = torch.arange(20)[None]
    with torch.inference_mode():
        expected = loaded.logits(loaded(tokens, torch.arange(20)[None], CausalContext()))
        torch.testing.assert_close(model(tokens).logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("to", ["hf", "modelworks"])
def test_a_result_that_computes_something_else_is_refused(
    to: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One weight changes on its way: in the middle of the model, in its last layer, and in the embedding."""
    config = ModelConfig(**SMALL, n_kv_heads=2, family="llama")
    own = write(tmp_path / "own", config)
    writer = {"hf": "export_hugging_face", "modelworks": "_write_own"}[to]
    original = getattr(module, writer)
    for name in ("blocks.1.attention.k.weight", "blocks.2.feed_forward.down.weight", "embedding.weight"):

        def spoiling(source: Any, *arguments: Any, name: str = name, **more: Any) -> None:
            from dataclasses import replace

            tensor = source.tensors[name]
            changed = LazyTensor(tensor.dtype, tensor.shape, lambda: tensor.load() * 1.01)
            original(replace(source, tensors={**source.tensors, name: changed}), *arguments, **more)

        monkeypatch.setattr(module, writer, spoiling)
        with pytest.raises(CheckpointError, match="gives other logits"):
            convert(str(own), tmp_path / "out", to)
        assert not (tmp_path / "out").exists()
        assert [path.name for path in tmp_path.iterdir()] == ["own"]


PEAK = """
import sys, re
from modelworks.checkpoint import convert
convert(sys.argv[1], sys.argv[2], sys.argv[3], max_shard_bytes=1 << 30)
print(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of memory from /proc")
def test_peak_memory_of_a_large_model(tmp_path: Path) -> None:
    """0.9 GB of bfloat16 or more with a largest tensor of 134 MB: all of the process stays below that and 512 MB."""
    shape = {"n_layers": 6, "d_model": 2048, "n_heads": 16, "n_kv_heads": 4, "d_ff": 8192, "vocab_size": 32768}
    config = ModelConfig(family="llama", max_seq_len=64, **shape)
    own = write(tmp_path / "own", config, torch.bfloat16)
    total = sum(path.stat().st_size for path in own.iterdir())
    most = 2 * max(torch.Size(shape).numel() for shape in parameter_shapes(config).values()) + OVERHEAD
    assert total > 1.2 * most
    for to in ("hf", "modelworks"):
        command = [sys.executable, "-c", PEAK, str(own), str(tmp_path / to), to]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        assert int(done.stdout) * 1024 <= most, to
