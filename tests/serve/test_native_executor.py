"""Compiled steps against the modules that they stand for, and against themselves: bit for bit, however work is cut."""

from __future__ import annotations

import platform
import random
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from native_steps import SHAPES, Served, alone, chunks_of, error, expected, make, open_executor, tokens_of

from modelworks.config import UserError
from modelworks.native import Unavailable
from modelworks.serve import native_executor
from modelworks.serve.batch import RaggedBatch
from modelworks.serve.executor import build_executor

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_of_a_prompt_in_chunks_and_token_by_token(shape: str) -> None:
    model = make(**SHAPES[shape])
    tokens = tokens_of(75)
    served = Served(open_executor(model, block_size=8))
    for chunk in chunks_of(tokens, [37, 1, 1, 30, 1, 1, 4]):
        served.step(("a", chunk))
    assert error(served.of("a"), expected(model, tokens)) < 2e-5


def test_bfloat16_is_nearer_to_float32_than_torch_is() -> None:
    model = make(torch.bfloat16, sliding_window=48)
    tokens = tokens_of(70)
    served = Served(open_executor(model))
    for chunk in chunks_of(tokens, [50, 1, 19]):
        served.step(("a", chunk))
    exact = expected(make(torch.bfloat16, sliding_window=48).float(), tokens)
    found, torchs = served.of("a") - exact, expected(model, tokens) - exact
    assert found.square().mean() < 0.7 * torchs.square().mean()


def test_a_cache_of_half_the_width_costs_little() -> None:
    model = make()
    tokens = tokens_of(60)
    served = Served(open_executor(model, kv_dtype="bf16"))
    served.step(("a", tokens))
    # A key, a query, a weight and a value are rounded to 8 bits each: some 2^-9 of a sum.
    assert error(served.of("a"), expected(model, tokens)) < 0.05


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "window"),
    [
        *((dtype, "auto", window) for dtype in (torch.float32, torch.bfloat16) for window in (None, 530)),
        (torch.float32, "int8", 530),
        (torch.bfloat16, "fp8", None),
    ],
)
def test_no_bit_depends_on_batch_chunks_blocks_or_threads(
    dtype: torch.dtype, kv_dtype: str, window: int | None
) -> None:
    """Sequences of up to 1100 tokens, so that softmaxes are merged: keys in parts of 512."""
    model = make(dtype, n_layers=1, sliding_window=window)
    prompts = {"long": tokens_of(1100, 1), "middle": tokens_of(300, 2), "short": tokens_of(33, 3), "one": [5]}
    wanted = {name: alone(model, tokens, n_blocks=128, kv_dtype=kv_dtype) for name, tokens in prompts.items()}
    for n_threads, seed in ((1, 3), (2, 4), (3, 5)):
        served = Served(open_executor(model, n_blocks=128, n_threads=n_threads, kv_dtype=kv_dtype), seed)
        draw = random.Random(seed)
        left = dict(prompts)
        while left:
            work = []
            for name in draw.sample(sorted(left), draw.randint(1, len(left))):
                size = draw.choice([1, 1, 2, 5, 17, 64, 250, 601])
                work.append((name, left[name][:size]))
                left[name] = left[name][size:]
            served.step(*work)
            left = {name: tokens for name, tokens in left.items() if tokens}
        for name, logits in wanted.items():
            assert torch.equal(served.of(name), logits), (name, n_threads)


def test_many_rows_and_few_are_the_same_bits() -> None:
    model = make(torch.bfloat16)
    tokens = tokens_of(150)
    whole = alone(model, tokens)
    served = Served(open_executor(model))
    for token in tokens:
        served.step(("a", [token]))
    assert torch.equal(served.of("a"), whole)


@pytest.mark.parametrize("block_size", [4, 7, 24, 64])
def test_blocks_of_any_size(block_size: int) -> None:
    model = make(sliding_window=50)
    tokens = tokens_of(90)
    served = Served(open_executor(model, block_size=block_size))
    for chunk in chunks_of(tokens, [40, 1, 1, 1, 47]):
        served.step(("a", chunk))
    assert error(served.of("a"), expected(model, tokens)) < 2e-5


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_others_left_in_a_block_does_no_harm(dtype: torch.dtype, kv_dtype: str) -> None:
    """A block is taken over with NaN in it, and only as far as the new owner has written does it count."""
    model = make(dtype)
    tokens = tokens_of(37)
    executor = open_executor(model, kv_dtype=kv_dtype)
    wanted = alone(model, tokens, kv_dtype=kv_dtype)
    executor._cache.fill_(255)  # NaN in every format that has one, and of scales
    for chunks in ([37], [1] * 37, [12, 13, 12]):
        served = Served(executor)
        for chunk in chunks_of(tokens, chunks):
            served.step(("a", chunk))
        assert torch.equal(served.of("a"), wanted)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_a_sequence_of_nan_spoils_its_own_rows_only(kv_dtype: str) -> None:
    model = make()
    with torch.no_grad():
        model.embedding.weight[7] = float("nan")  # type: ignore[union-attr]
    tokens = tokens_of(20)
    tokens = [token if token != 7 else 8 for token in tokens]
    wanted = alone(model, tokens, kv_dtype=kv_dtype)
    served = Served(open_executor(model, kv_dtype=kv_dtype))
    served.step(("bad", [1, 7, 3]), ("a", tokens), ("worse", [7]))
    assert torch.equal(served.of("a"), wanted)
    assert served.of("bad")[1:].isnan().all()
    assert served.of("worse").isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_leaves_nothing_behind_for_those_who_come_later(dtype: torch.dtype) -> None:
    """Sizes that fill no whole vectors: what stands behind a row is not written by everyone who uses it."""
    odd = {"d_model": 71, "head_dim": 10, "d_ff": 77, "vocab_size": 203, "n_kv_heads": 3}
    for settings in ({"norm": "layernorm"}, {"qk_norm": True, "family": "qwen3"}):
        model = make(dtype, **odd, **settings)
        with torch.no_grad():
            model.embedding.weight[7] = float("nan")  # type: ignore[union-attr]
        tokens = [8] * 20
        wanted = alone(model, tokens)
        served = Served(open_executor(model))
        served.step(("bad", [7] * 20))
        served.step(("a", tokens))
        assert torch.equal(served.of("a"), wanted)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_copied_blocks_go_on_as_their_origin_would(kv_dtype: str) -> None:
    model = make(sliding_window=20)
    tokens, other = tokens_of(40), tokens_of(40, 9)
    executor = open_executor(model, kv_dtype=kv_dtype)
    served = Served(executor)
    served.step(("a", tokens[:25]))
    taken = [served.free.pop() for _ in range(2)]
    last = served.free.pop()
    executor.copy_blocks([(served.blocks["a"][0], last), (last, taken[0]), (served.blocks["a"][1], taken[1])])
    served.blocks["b"], served.done["b"] = taken, 25
    served.step(("a", tokens[25:]), ("b", other[25:]))
    assert torch.equal(served.of("a"), alone(model, tokens, kv_dtype=kv_dtype))
    both = alone(model, tokens[:25] + other[25:], kv_dtype=kv_dtype)
    assert torch.equal(torch.stack([served.logits["b", i] for i in range(25, 40)]), both[25:])


def test_only_wanted_rows_in_their_order() -> None:
    model = make()
    tokens = tokens_of(12)
    served = Served(open_executor(model))
    served.step(("a", tokens[:7]), ("b", tokens[7:]))
    assert served.last is not None
    for wanted in ([6, 11], [11], []):
        few = replace(served.last, wanted=torch.tensor(wanted, dtype=torch.int64))
        rows = [served.logits["a" if i < 7 else "b", i % 7] for i in wanted]
        assert torch.equal(served.executor.run(few), torch.stack(rows) if rows else torch.empty((0, 201)))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"n_experts": 2}, "experts"),
        ({"norm_position": "post"}, "norms come after"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic rope"),
    ],
)
def test_what_it_does_not_know_is_refused_with_a_reason(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unavailable, match=reason):
        open_executor(make(**settings))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "reason"),
    [(torch.float32, "int4", "expected auto, fp32, bf16, int8, fp8"), (torch.bfloat16, "fp32", "hold no more")],
)
def test_formats_that_make_no_sense_are_refused_as_in_torch(dtype: torch.dtype, kv_dtype: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        build_executor(make(dtype), n_blocks=2, block_size=16, kv_dtype=kv_dtype, native="on")


def test_a_model_of_another_dtype_is_refused() -> None:
    with pytest.raises(Unavailable, match="float64, not fp32 or bf16"):
        open_executor(make(torch.float64))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("tokens", 201, "tokens"),
        ("positions", 5000, "positions"),
        ("slots", 64 * 16, "slots"),
        ("tables", 64, "tables"),
        ("wanted", 3, "wanted"),
    ],
)
def test_a_batch_out_of_range_touches_no_memory(field: str, value: int, said: str) -> None:
    model = make(positions="learned") if field == "positions" else make()
    executor = open_executor(model)
    tensors = {
        "tokens": torch.tensor([1, 2]),
        "positions": torch.tensor([0, 1]),
        "slots": torch.tensor([0, 1]),
        "starts": torch.tensor([0, 2], dtype=torch.int32),
        "lengths": torch.tensor([2], dtype=torch.int32),
        "tables": torch.tensor([[0]], dtype=torch.int32),
        "wanted": torch.tensor([1]),
    }
    executor.run(RaggedBatch(**tensors))
    tensors[field].view(-1)[-1] = value
    with pytest.raises(ValueError, match=said):
        executor.run(RaggedBatch(**tensors))


def test_closing_twice_is_closing_once() -> None:
    executor = open_executor(make())
    executor.close()
    executor.close()
    with pytest.raises(ValueError, match="closed"):
        executor.copy_blocks([])


@pytest.mark.slow  # compiles
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of one kind")
@pytest.mark.parametrize("processor", ["x86-64-v2", "x86-64-v3", "x86-64-v4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_processors(processor: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the instructions that the machine here may have: the same results but for rounding."""
    model = make(dtype, qk_norm=True, sliding_window=40)
    tokens, formats = tokens_of(70), ("auto", "int8", "fp8")
    here = {kv_dtype: alone(model, tokens, kv_dtype=kv_dtype) for kv_dtype in formats}
    monkeypatch.setattr(native_executor, "_FLAGS", (*native_executor._FLAGS, f"-march={processor}"))
    for kv_dtype in formats:
        served = Served(open_executor(model, kv_dtype=kv_dtype))
        for chunk in chunks_of(tokens, [30, 1, 39]):
            served.step(("a", chunk))
        assert torch.equal(served.of("a"), alone(model, tokens, kv_dtype=kv_dtype))
        limit = 0.1 if dtype == torch.bfloat16 else 2e-5 if kv_dtype == "auto" else 2e-3  # a code may fall elsewhere
        assert error(served.of("a"), here[kv_dtype]) < limit
