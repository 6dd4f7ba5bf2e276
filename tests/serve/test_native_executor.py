"""Compiled steps against the modules that they stand for, and against themselves: bit for bit, however work is cut."""

from __future__ import annotations

import platform
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from modelworks.config import ModelConfig
from modelworks.models import CausalContext, Transformer, initialize
from modelworks.native import Unavailable
from modelworks.serve import native_executor
from modelworks.serve.batch import RaggedBatch
from modelworks.serve.native_executor import NativeExecutor

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")

SMALL: dict[str, Any] = {
    "n_layers": 2,
    "d_model": 96,
    "n_heads": 6,
    "n_kv_heads": 2,
    "head_dim": 16,
    "d_ff": 80,
    "vocab_size": 201,
    "max_seq_len": 2048,
}


def make(dtype: torch.dtype = torch.float32, **settings: Any) -> Transformer:
    """A small model whose every parameter is random: zero biases would hide that they are forgotten."""
    model = Transformer(ModelConfig(**{**SMALL, **settings}))
    initialize(model, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + 0.3 * noise if parameter.ndim == 1 else parameter * 3)
    return model.to(dtype).eval()


class Served:
    """Sequences in an executor's cache, each in blocks at random places. Keeps all logits by (sequence, position)."""

    def __init__(self, executor: NativeExecutor, seed: int = 0) -> None:
        self.executor, self.size = executor, executor.block_size
        self.free = list(range(executor.n_blocks))
        random.Random(seed).shuffle(self.free)
        self.blocks: dict[str, list[int]] = {}
        self.done: dict[str, int] = {}
        self.logits: dict[tuple[str, int], Tensor] = {}
        self.last: RaggedBatch | None = None

    def step(self, *work: tuple[str, list[int]]) -> None:
        """The next tokens of some sequences, in one batch; logits of all of them."""
        tokens: list[int] = []
        positions: list[int] = []
        slots, starts, lengths, owners = [], [0], [], []
        for name, new in work:
            start = self.done.get(name, 0)
            blocks = self.blocks.setdefault(name, [])
            while len(blocks) * self.size < start + len(new):
                blocks.append(self.free.pop())
            for position in range(start, start + len(new)):
                slots.append(blocks[position // self.size] * self.size + position % self.size)
                owners.append((name, position))
            tokens += new
            positions += range(start, start + len(new))
            starts.append(len(tokens))
            self.done[name] = start + len(new)
            lengths.append(self.done[name])
        widest = max(len(self.blocks[name]) for name, _ in work)
        tables = [self.blocks[name] + [0] * (widest - len(self.blocks[name])) for name, _ in work]
        long, short = torch.int64, torch.int32
        self.last = RaggedBatch(
            tokens=torch.tensor(tokens, dtype=long),
            positions=torch.tensor(positions, dtype=long),
            slots=torch.tensor(slots, dtype=long),
            starts=torch.tensor(starts, dtype=short),
            lengths=torch.tensor(lengths, dtype=short),
            tables=torch.tensor(tables, dtype=short),
            wanted=torch.arange(len(tokens)),
        )
        logits = self.executor.run(self.last)
        self.logits |= dict(zip(owners, logits, strict=True))

    def of(self, name: str) -> Tensor:
        return torch.stack([self.logits[name, position] for position in range(self.done[name])])


def open_executor(model: Transformer, **settings: Any) -> NativeExecutor:
    return NativeExecutor(model, **{"n_blocks": 64, "block_size": 16, "n_threads": 2, **settings})


def tokens_of(length: int, seed: int = 0, vocab_size: int = 201) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


@torch.no_grad()
def expected(model: Transformer, tokens: list[int]) -> Tensor:
    row = torch.tensor([tokens])
    hidden = model(row, torch.arange(len(tokens))[None], CausalContext())
    return model.logits(hidden)[0].to(torch.float32)


def chunks_of(tokens: list[int], sizes: list[int]) -> Iterator[list[int]]:
    for size in sizes:
        yield tokens[:size]
        tokens = tokens[size:]
    assert not tokens


def error(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, against the spread of the logits."""
    return float((found - wanted).abs().max() / wanted.std())


SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "one head each": {"n_kv_heads": 6},
    "odd sizes": {"d_model": 70, "head_dim": 10, "d_ff": 77, "vocab_size": 203, "n_kv_heads": 3},
    "wide heads": {"n_heads": 2, "n_kv_heads": 1, "head_dim": 80},
    "biases": {"attention_bias": True, "attention_output_bias": True, "feed_forward_bias": True},
    "qk norm": {"qk_norm": True, "family": "qwen3"},
    "gpt2": {"family": "gpt2", "n_kv_heads": 6},
    "geglu": {"feed_forward": "geglu"},
    "gelu": {"feed_forward": "gelu", "feed_forward_bias": True},
    "relu": {"feed_forward": "relu"},
    "no positions": {"positions": "none"},
    "tied": {"tie_embeddings": True},
    "no residual": {"residual": False, "n_layers": 1},
    "window": {"sliding_window": 20},
    "mup": {"mup_base_width": 48, "mup_base_head_dim": 8},
    "llama3 scaling": {"rope_scaling": {"type": "llama3", "factor": 8.0, "original_max_seq_len": 32}},
    "yarn": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_seq_len": 32}},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_of_a_prompt_in_chunks_and_token_by_token(shape: str) -> None:
    model = make(**SHAPES[shape])
    tokens = tokens_of(75)
    served = Served(open_executor(model, block_size=8))
    for chunk in chunks_of(tokens, [37, 1, 1, 30, 1, 1, 4]):
        served.step(("a", chunk))
    assert error(served.of("a"), expected(model, tokens)) < 2e-5


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp32"])
def test_bfloat16_is_nearer_to_float32_than_torch_is(kv_dtype: str) -> None:
    model = make(torch.bfloat16, sliding_window=48)
    tokens = tokens_of(70)
    served = Served(open_executor(model, kv_dtype=kv_dtype))
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


def alone(model: Transformer, tokens: list[int], **settings: Any) -> Tensor:
    served = Served(open_executor(model, **settings))
    served.step(("a", tokens))
    return served.of("a")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 530])
def test_no_bit_depends_on_batch_chunks_blocks_or_threads(dtype: torch.dtype, window: int | None) -> None:
    """Sequences of up to 1100 tokens, so that softmaxes are merged: keys in parts of 512."""
    model = make(dtype, n_layers=1, sliding_window=window)
    prompts = {"long": tokens_of(1100, 1), "middle": tokens_of(300, 2), "short": tokens_of(33, 3), "one": [5]}
    wanted = {name: alone(model, tokens, n_blocks=128) for name, tokens in prompts.items()}
    for n_threads, seed in ((1, 3), (2, 4), (3, 5)):
        served = Served(open_executor(model, n_blocks=128, n_threads=n_threads), seed)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_others_left_in_a_block_does_no_harm(dtype: torch.dtype) -> None:
    """A block is taken over with NaN in it, and only as far as the new owner has written does it count."""
    model = make(dtype)
    tokens = tokens_of(37)
    executor = open_executor(model)
    wanted = alone(model, tokens)
    executor._cache.view(dtype).fill_(float("nan"))
    for chunks in ([37], [1] * 37, [12, 13, 12]):
        served = Served(executor)
        for chunk in chunks_of(tokens, chunks):
            served.step(("a", chunk))
        assert torch.equal(served.of("a"), wanted)


def test_a_sequence_of_nan_spoils_its_own_rows_only() -> None:
    model = make()
    with torch.no_grad():
        model.embedding.weight[7] = float("nan")  # type: ignore[union-attr]
    tokens = tokens_of(20)
    tokens = [token if token != 7 else 8 for token in tokens]
    wanted = alone(model, tokens)
    served = Served(open_executor(model))
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


def test_copied_blocks_go_on_as_their_origin_would() -> None:
    model = make(sliding_window=20)
    tokens, other = tokens_of(40), tokens_of(40, 9)
    executor = open_executor(model)
    served = Served(executor)
    served.step(("a", tokens[:25]))
    taken = [served.free.pop() for _ in range(2)]
    last = served.free.pop()
    executor.copy_blocks([(served.blocks["a"][0], last), (last, taken[0]), (served.blocks["a"][1], taken[1])])
    served.blocks["b"], served.done["b"] = taken, 25
    served.step(("a", tokens[25:]), ("b", other[25:]))
    assert torch.equal(served.of("a"), alone(model, tokens))
    both = alone(model, tokens[:25] + other[25:])
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
    ("settings", "kv_dtype", "reason"),
    [
        ({"n_experts": 2}, "auto", "experts"),
        ({"norm_position": "post"}, "auto", "norms come after"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "auto", "dynamic rope"),
        ({}, "fp8", "the cache is fp8"),
    ],
)
def test_what_it_does_not_know_is_refused_with_a_reason(settings: dict[str, Any], kv_dtype: str, reason: str) -> None:
    with pytest.raises(Unavailable, match=reason):
        open_executor(make(**settings), kv_dtype=kv_dtype)


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
    tokens = tokens_of(70)
    here = alone(model, tokens)
    monkeypatch.setattr(native_executor, "_FLAGS", (*native_executor._FLAGS, f"-march={processor}"))
    served = Served(open_executor(model))
    for chunk in chunks_of(tokens, [30, 1, 39]):
        served.step(("a", chunk))
    assert torch.equal(served.of("a"), alone(model, tokens))
    assert error(served.of("a"), here) < (2e-5 if dtype == torch.float32 else 0.05)
