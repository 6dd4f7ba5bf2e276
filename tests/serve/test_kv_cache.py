"""Formats of the cache: what comes back is within the stated bound of what went in, and a block costs what is said."""

from __future__ import annotations

import pytest
import torch

from modelworks.config import ModelConfig, UserError
from modelworks.serve.kv_cache import KVCache, kv_bytes_per_block, resolve_kv_dtype

CONFIG = ModelConfig(n_layers=2, d_model=32, n_heads=4, n_kv_heads=2, vocab_size=61)
G, K, SIZE = 2, 8, 4


def cache_of(kv_dtype: str, dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache(CONFIG, n_blocks=6, block_size=SIZE, kv_dtype=kv_dtype, dtype=dtype, device=torch.device("cpu"))


@pytest.mark.parametrize("spread", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "int8", "fp8"])
def test_what_is_read_is_what_was_written_within_the_bound(kv_dtype: str, spread: float) -> None:
    cache, generator = cache_of(kv_dtype), torch.Generator().manual_seed(0)
    # Elements of very different sizes, and whole vectors of zeros.
    k, v = (torch.randn(9, G, K, generator=generator) ** 5 * spread for _ in range(2))
    k[2], v[4, 1] = 0.0, 0.0
    slots = torch.tensor([0, 1, 2, 3, 20, 21, 22, 8, 9])
    cache.write(1, slots, k, v)
    blocks = torch.tensor([[0, 5], [2, 2]])
    for written, read in zip((k, v), cache.read(1, blocks), strict=True):
        assert read.shape == (2, 2 * SIZE, G, K)
        back = torch.cat((read[0, :7], read[1, :2]))
        largest = written.abs().amax(-1, keepdim=True)
        bound = {
            "fp32": torch.zeros_like(written),
            "bf16": written.abs() / 256,
            "int8": (largest / 254).expand_as(written),
            "fp8": torch.maximum(written.abs() / 16, largest / 2**18),
        }[kv_dtype]
        assert ((back - written).abs() <= bound * 1.0001).all()
        assert torch.equal(read[1, :2], read[1, SIZE : SIZE + 2])  # the same block, twice
        assert (read[1, 2:4] == 0).all()
    assert all((part == 0).all() for part in cache.read(0, blocks))  # the other layer


@pytest.mark.parametrize("kv_dtype", ["fp32", "int8"])
def test_blocks_are_copied_and_cleared_in_all_layers(kv_dtype: str) -> None:
    cache, generator = cache_of(kv_dtype), torch.Generator().manual_seed(0)
    for layer in range(2):
        cache.write(layer, torch.arange(12), *torch.randn(2, 12, G, K, generator=generator).unbind())
    before = [cache.read(layer, torch.tensor([[1, 2]]))[1] for layer in range(2)]
    cache.copy_blocks([(1, 4), (2, 1)])  # block 1 was given up by its holder, and is taken by another
    after = [cache.read(layer, torch.tensor([[4, 1]]))[1] for layer in range(2)]
    assert all(map(torch.equal, before, after))
    cache.clear(torch.tensor([4]))
    assert all((cache.read(layer, torch.tensor([[4]]))[0] == 0).all() for layer in range(2))
    assert all(torch.equal(cache.read(layer, torch.tensor([[1]]))[1], before[layer][:, SIZE:]) for layer in range(2))


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "int8", "fp8"])
def test_a_block_costs_what_is_said(kv_dtype: str) -> None:
    cache = cache_of(kv_dtype)
    held = cache._data.nbytes + (0 if cache._scales is None else cache._scales.nbytes)
    assert held == 6 * kv_bytes_per_block(CONFIG, SIZE, kv_dtype)


def test_formats_that_make_no_sense_are_refused() -> None:
    assert resolve_kv_dtype("auto", torch.bfloat16) == "bf16"
    assert resolve_kv_dtype("auto", torch.float16) == "fp16"
    assert resolve_kv_dtype("bf16", torch.float32) == "bf16"
    assert resolve_kv_dtype("int8", torch.bfloat16) == "int8"
    for kv_dtype, dtype, message in (
        ("fp32", torch.bfloat16, "hold no more"),
        ("bf16", torch.float16, "hold no more"),
        ("int4", torch.float32, "expected auto"),
        ("fp", torch.float32, "did you mean `fp"),
        ("auto", torch.int8, "cannot be served"),
    ):
        with pytest.raises(UserError, match=message):
            resolve_kv_dtype(kv_dtype, dtype)
