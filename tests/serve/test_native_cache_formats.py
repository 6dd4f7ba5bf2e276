"""Compiled steps over a cache of codes: the codes and scales of torch's cache bit for bit, and logits as torch's."""

from __future__ import annotations

import platform
import shutil
from typing import Any

import pytest
import torch
from native_steps import SHAPES, Served, chunks_of, error, expected, make, open_executor, tokens_of
from torch import Tensor

from modelworks.models import Transformer
from modelworks.serve import Engine, EngineOptions, SamplingParams, native_executor
from modelworks.serve.kv_cache import kv_bytes_per_block
from modelworks.serve.native_executor import NativeExecutor
from modelworks.serve.native_weights import LANES
from modelworks.serve.sizing import size_cache
from modelworks.serve.torch_executor import TorchExecutor

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
BLOCK = 8
LARGEST = {"int8": 127.0, "fp8": 448.0}
other = [pytest.mark.slow, pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of one kind")]


@pytest.fixture(params=["this one", *(pytest.param(f"x86-64-v{n}", marks=other) for n in (2, 3, 4))])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for it; the others have none of this one's instructions for codes."""
    if request.param != "this one":
        monkeypatch.setattr(native_executor, "_FLAGS", (*native_executor._FLAGS, f"-march={request.param}"))


def of_biases(keys: Tensor, values: Tensor, dtype: torch.dtype) -> Transformer:
    """A layer in which every token has these keys and values, float32 (heads, head_dim), rounded to `dtype` alone."""
    n_heads, head_dim = keys.shape
    shape: dict[str, Any] = {"n_layers": 1, "n_heads": n_heads, "n_kv_heads": n_heads, "head_dim": head_dim}
    model = make(**shape, attention_bias=True, positions="none")
    attention: Any = model.blocks["0"].attention
    with torch.no_grad():
        for projection, bias in ((attention.k, keys), (attention.v, values)):
            projection.weight.zero_()
            projection.bias.copy_(bias.flatten())
    return model.to(dtype)


def vectors_of(kv_dtype: str, head_dim: int) -> Tensor:
    """Float32 (32, head_dim): all sizes, zeros, numbers below the normal ones, and between two codes in the middle."""
    generator = torch.Generator().manual_seed(head_dim)
    vectors = torch.randn(32, head_dim, generator=generator) ** 5
    vectors[:16] *= 10.0 ** torch.linspace(-30, 30, 16)[:, None]
    vectors[16] = 0.0
    vectors[17] = torch.linspace(-1e-40, 1e-40, head_dim)
    codes = torch.arange(-127.0, 128) if kv_dtype == "int8" else of_fp8(torch.arange(127)).repeat(2)
    middle = (codes[1:] + codes[:-1]) / 2
    for row in range(18, 26):
        vectors[row] = middle[torch.randint(len(middle), (head_dim,), generator=generator)]
        vectors[row, row % head_dim] = LARGEST[kv_dtype]  # so the scale is one
    return vectors


def of_fp8(codes: Tensor) -> Tensor:
    return codes.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)


def unpacked(executor: NativeExecutor, depth: int) -> tuple[Tensor, Tensor]:
    """Codes, uint8 (block, key, 2, heads, head_dim), and scales, float32 (block, key, 2, heads), of one layer: key and
    value side by side as in torch's cache. depth: see kernels/cache.h."""
    config = executor.config
    padded, tiles = config.head_dim + -config.head_dim % LANES, -(-executor.block_size // LANES)
    memory = executor._cache.view(2, executor.n_blocks, config.n_kv_heads, tiles, LANES * (padded + 4))
    codes = memory[..., : LANES * padded]
    where = codes.shape[1:-1]
    keys = codes[0].reshape(*where, -1, LANES, depth).transpose(-2, -3).flatten(-2)
    values = codes[1].reshape(*where, -1, padded, depth).transpose(-1, -2).flatten(-3, -2)
    scales = memory[..., LANES * padded :].contiguous().view(torch.float32)
    both = torch.stack((keys, values)).flatten(3, 4)[:, :, :, : executor.block_size, : config.head_dim]
    return both.permute(1, 3, 0, 2, 4), scales.flatten(3)[..., : executor.block_size].permute(1, 3, 0, 2)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 16), (torch.float32, 10), (torch.bfloat16, 32)])
def test_codes_and_scales_are_those_of_torch(kv_dtype: str, dtype: torch.dtype, head_dim: int) -> None:
    vectors = vectors_of(kv_dtype, head_dim)
    if dtype == torch.bfloat16:
        vectors[17] = 0.0  # torch's products of bfloat16 make zeros of numbers below the normal ones
    model = of_biases(vectors, vectors.flip(0, 1), dtype)
    native = Served(open_executor(model, n_blocks=4, block_size=BLOCK, kv_dtype=kv_dtype))
    in_torch = Served(TorchExecutor(model, n_blocks=4, block_size=BLOCK, kv_dtype=kv_dtype))
    for served in (native, in_torch):
        served.step(("a", tokens_of(11)))
        served.step(("a", tokens_of(2)))
    assert isinstance(native.executor, NativeExecutor)
    assert isinstance(in_torch.executor, TorchExecutor)
    codes, scales = unpacked(native.executor, 4 // dtype.itemsize)
    cache = in_torch.executor._cache
    assert cache._scales is not None
    assert torch.equal(scales, cache._scales[0])
    assert torch.equal(codes, cache._data[0].view(torch.uint8))
    assert len(set(codes.flatten().tolist())) > 60


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_is_read_as_it_was_written(kv_dtype: str, dtype: torch.dtype) -> None:
    """Values that codes hold exactly, in bfloat16 and under a scale of one: the same bits as of a wider cache."""
    if kv_dtype == "int8":
        codes = torch.arange(-127.0, 128)
    else:
        codes = of_fp8(torch.arange(256))
        codes = codes[~codes.isnan()]
    codes = torch.cat((codes, codes[: -len(codes) % 15])).view(-1, 15)
    vectors = torch.cat((codes, torch.full((len(codes), 1), LARGEST[kv_dtype])), dim=1)
    model = of_biases(vectors, vectors, dtype)
    found = []
    for each in (kv_dtype, "bf16"):
        served = Served(open_executor(model, block_size=BLOCK, kv_dtype=each))
        for chunk in chunks_of(tokens_of(21), [13, 1, 7]):
            served.step(("a", chunk))
        found.append(served.of("a"))
    assert torch.equal(*found)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize(
    ("shape", "block_size"),
    [("llama", 8), ("odd sizes", 7), ("wide heads", 24), ("qk norm", 16), ("window", 4), ("gpt2", 64)],
)
def test_logits_are_those_of_torch(shape: str, block_size: int, kv_dtype: str) -> None:
    """Where a key's last bits differ a code may fall elsewhere, here and there."""
    model, tokens = make(**SHAPES[shape]), tokens_of(75)
    room: dict[str, Any] = {"n_blocks": 64, "block_size": block_size, "kv_dtype": kv_dtype}
    found = []
    for executor in (open_executor(model, **room), TorchExecutor(model, **room)):
        served = Served(executor)
        for chunk in chunks_of(tokens, [37, 1, 1, 30, 1, 1, 4]):
            served.step(("a", chunk), ("b", chunk[:3]))
        found.append(served.of("a"))
    exact = expected(model, tokens)
    assert error(*found) < 5e-3
    assert relative(*found) < 2e-4
    assert relative(*found) < 0.1 * relative(found[0], exact)  # which is the format's doing


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_bfloat16_loses_no_more_than_torch_does(kv_dtype: str) -> None:
    model, tokens = make(torch.bfloat16), tokens_of(100)
    exact = expected(make(torch.bfloat16).float(), tokens)
    errors = []
    for executor in (
        open_executor(model, kv_dtype=kv_dtype),
        TorchExecutor(model, n_blocks=64, block_size=16, kv_dtype=kv_dtype),
    ):
        served = Served(executor)
        for chunk in chunks_of(tokens, [60, 1, 39]):
            served.step(("a", chunk))
        errors.append(relative(served.of("a"), exact))
    assert errors[0] < errors[1] < 0.05


def relative(found: Tensor, wanted: Tensor) -> float:
    """The root of the mean square difference, against the spread."""
    return float((found - wanted).square().mean().sqrt() / wanted.std())


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "int8", "fp8"])
@pytest.mark.parametrize("native", ["on", "off"])
def test_a_block_costs_what_sizing_says(kv_dtype: str, native: Any) -> None:
    """Also where compiled steps fill up heads of 10 channels and blocks of 7 tokens to vectors of 16."""
    for model, block_size in ((make(), 16), (make(**SHAPES["odd sizes"]), 7)):
        room: dict[str, Any] = {"block_size": block_size, "kv_dtype": kv_dtype}
        sizing = size_cache(model, EngineOptions(kv_cache_bytes=1 << 22, native=native, **room))
        executor = NativeExecutor(model, n_blocks=3, **room) if native == "on" else None
        held = executor._cache.nbytes // 3 if executor else kv_bytes_per_block(model.config, block_size, kv_dtype)
        assert sizing.bytes_per_block == held
        assert executor is None or executor.bytes_per_block == held
    assert (sizing.bytes_per_block > kv_bytes_per_block(model.config, 7, kv_dtype)) == (native == "on")


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_found_prefixes_change_no_bit_of_what_an_engine_says(kv_dtype: Any) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2)
    options = EngineOptions(kv_cache_bytes=1 << 21, block_size=BLOCK, kv_dtype=kv_dtype, native="on")
    with Engine(make(), options) as engine:
        for length in (BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1):
            prompt = tokens_of(length, seed=length)
            (cold,), (hot,) = engine.generate([prompt], params), engine.generate([prompt], params)
            assert hot.n_cached == (length - 1) // BLOCK * BLOCK
            assert cold.n_cached == 0
            assert hot.completions == cold.completions
        assert engine.problems() == []
