"""Ragged steps over a paged cache equal one sequence at a time over dense attention, for every family."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from modelworks.config import ModelConfig, UserError
from modelworks.models import CausalContext, Sampling, Transformer, generate, initialize
from modelworks.serve.batch import BatchBuilder
from modelworks.serve.blocks import BlockPool
from modelworks.serve.executor import Executor, build_executor
from modelworks.serve.prefix import PrefixKeys, tag
from modelworks.serve.scheduler import Scheduler
from modelworks.serve.sequence import Sequence
from modelworks.serve.waiting import WaitingQueue

SHAPE = {"n_layers": 2, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 61, "d_ff": 48, "init_std": 0.2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"family": "gpt2", "n_kv_heads": 4},
    "multi-query": {"n_kv_heads": 1},
    "window": {"family": "mistral", "sliding_window": 7},
    "qwen2": {"family": "qwen2", "tie_embeddings": True},
    "qwen3": {"family": "qwen3", "head_dim": 16},
    "mixtral": {"family": "mixtral", "n_experts": 4, "d_ff": None},
    "post-norm": {"norm_position": "post", "residual": False},
    "mup": {"mup_base_width": 16, "n_heads": 4},
    "yarn": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_seq_len": 32}},
}


def model_of(dtype: torch.dtype = torch.float64, **changes: Any) -> Transformer:
    torch.set_default_dtype(dtype)
    try:
        model = Transformer(ModelConfig(**{**SHAPE, "max_seq_len": 128, **changes}))
    finally:
        torch.set_default_dtype(torch.float32)
    initialize(model, 0)
    return model.eval()


@torch.inference_mode()
def dense(model: Transformer, tokens: list[int]) -> Tensor:
    """Logits of every token, (n, vocab_size)."""
    row = torch.tensor([tokens])
    return model.logits(model(row, torch.arange(len(tokens))[None], CausalContext()))[0].float()


class Traffic:
    """Sequences of known tokens, run through a scheduler and an executor; the logits of every token are kept."""

    def __init__(self, executor: Executor, *, budget: int = 24, max_running: int = 8) -> None:
        self.executor, size = executor, executor.block_size
        queue = WaitingQueue(max_sequences=1000, max_tokens=100_000, age=10.0)
        pool = BlockPool(executor.n_blocks, size)
        self.scheduler = Scheduler(pool, queue, token_budget=budget, max_running=max_running, reserve=0.0)
        self.builder = BatchBuilder(size)
        self.logits: dict[str, dict[int, Tensor]] = {}
        self.n_steps = 0

    def add(self, name: str, tokens: list[int], n_prompt: int, **options: Any) -> None:
        """The first `n_prompt` tokens are a prompt, the others come one by one as if they had been generated."""
        keys = PrefixKeys(tag({}), self.executor.block_size)
        sequence = Sequence(name, tokens[:n_prompt], n_prompt, len(tokens), keys, **options)
        self.scheduler.submit(sequence)
        self.rest = getattr(self, "rest", {}) | {name: tokens}
        self.logits[name] = {}

    def run(self) -> dict[str, dict[int, Tensor]]:
        """To the end; for each sequence the logits by position (those found in the cache were not computed)."""
        while step := self.scheduler.schedule(float(self.n_steps)):
            if not step.work:
                break
            self.n_steps += 1
            sequences = [work.sequence for work in step.work]
            self.executor.copy_blocks(step.copies)
            batch = self.builder.build(step, every_token=set(sequences))
            rows = self.executor.run(batch)
            assert rows.dtype == torch.float32
            owner = torch.repeat_interleave(torch.arange(batch.n_sequences), batch.starts.diff())[batch.wanted]
            for row, s, position in zip(rows, owner.tolist(), batch.positions[batch.wanted].tolist(), strict=True):
                self.logits[sequences[s].id][position] = row
            wanted = [work.sequence for work in step.work if work.samples]
            self.scheduler.computed(step)
            for each in wanted:
                tokens = self.rest[each.id]
                if each.n_tokens == len(tokens):
                    self.scheduler.finish(each)
                else:
                    self.scheduler.append(each, tokens[each.n_tokens])
        assert self.scheduler.pool.n_free == self.executor.n_blocks
        return self.logits


def random_traffic(traffic: Traffic, seed: int, *, n: int = 7, longest: int = 40) -> dict[str, list[int]]:
    draw = random.Random(seed)
    shared = [draw.randrange(61) for _ in range(longest)]
    sequences = {}
    for name in map(str, range(n)):
        own = [draw.randrange(61) for _ in range(draw.randint(1, longest))]
        kept = draw.choice([0, 0, 9, 17])
        sequences[name] = (shared[:kept] + own)[:longest]
        traffic.add(name, sequences[name], draw.randint(1, len(sequences[name])), arrived=float(draw.randrange(20)))
    return sequences


@pytest.mark.parametrize("name", FAMILIES)
def test_steps_equal_dense_attention(name: str) -> None:
    model = model_of(**FAMILIES[name])
    for seed, (n_blocks, size, budget) in enumerate(((16, 3, 24), (4, 16, 9))):
        executor = build_executor(model, n_blocks=n_blocks, block_size=size, native="off")
        traffic = Traffic(executor, budget=budget)
        sequences = random_traffic(traffic, seed)
        for key, rows in traffic.run().items():
            expected = dense(model, sequences[key])
            assert len(rows) > len(sequences[key]) - 20
            assert len(sequences[key]) - 1 in rows
            for position, row in rows.items():
                torch.testing.assert_close(row, expected[position], atol=1e-5, rtol=1e-5)


def test_greedy_tokens_equal_generate() -> None:
    model = model_of(torch.float32)
    executor = build_executor(model, n_blocks=20, block_size=4, native="off")
    prompt, size = [5, 9, 2, 44, 8], 4
    expected = list(generate(model, prompt, Sampling(temperature=0.0), (), 20))
    queue = WaitingQueue(max_sequences=1, max_tokens=99, age=1.0)
    scheduler = Scheduler(BlockPool(20, size), queue, token_budget=3, max_running=2)
    sequence = Sequence("one", list(prompt), 5, 25, PrefixKeys(tag({}), size))
    scheduler.submit(sequence)
    builder = BatchBuilder(size)
    while sequence.n_tokens < 25:
        step = scheduler.schedule(0.0)
        logits = executor.run(builder.build(step))
        assert logits.shape == (int(step.work[0].samples), 61)
        samples = step.work[0].samples
        scheduler.computed(step)
        if samples:
            scheduler.append(sequence, int(logits[0].argmax()))
    assert sequence.tokens[5:] == expected


def test_dynamic_rotation_does_not_depend_on_who_else_is_there() -> None:
    """Its frequencies follow the longest sequence of a forward pass."""
    model = model_of(rope_scaling={"type": "dynamic", "factor": 2.0, "original_max_seq_len": 16})
    executor = build_executor(model, n_blocks=40, block_size=4, native="off")
    traffic = Traffic(executor, budget=200)
    long, short = [n % 61 for n in range(40)], [3, 1, 4, 1, 5, 9]
    traffic.add("long", long, 40)
    traffic.add("short", short, 6)
    for name, rows in traffic.run().items():
        expected = dense(model, {"long": long, "short": short}[name])
        torch.testing.assert_close(torch.stack([rows[n] for n in sorted(rows)]), expected, atol=1e-5, rtol=1e-5)
    assert traffic.n_steps == 1


def test_numbers_that_are_not_finite_stay_with_their_sequence() -> None:
    """Neither the neighbours in a step nor the next holder of the same blocks see them."""
    model = model_of(torch.float32)
    with torch.no_grad():
        model.embedding.weight[60] = float("nan")  # type: ignore[union-attr]
    executor = build_executor(model, n_blocks=12, block_size=4, native="off")
    for _ in range(2):
        traffic = Traffic(executor)
        traffic.add("good", list(range(20)), 7)
        traffic.add("bad", [1, 2, 60, *range(17)], 4)
        rows = traffic.run()
        assert all(row.isfinite().all() for row in rows["good"].values())
        assert not any(row.isfinite().any() for position, row in rows["bad"].items() if position >= 2)


def test_a_fork_reads_the_past_it_shares() -> None:
    model = model_of()
    executor = build_executor(model, n_blocks=20, block_size=4, native="off")
    queue = WaitingQueue(max_sequences=1, max_tokens=99, age=1.0)
    scheduler = Scheduler(BlockPool(20, 4), queue, token_budget=30, max_running=4)
    prompt = [7, 8, 9, 10, 11, 12]
    keys, builder, n_copies = PrefixKeys(tag({}), 4), BatchBuilder(4), 0
    parent = Sequence("parent", list(prompt), 6, 12, keys)
    scheduler.submit(parent)
    step = scheduler.schedule(0.0)
    executor.run(builder.build(step))
    scheduler.computed(step)
    child = Sequence("child", list(prompt), 6, 12, keys)
    scheduler.fork(parent, child)
    for n in range(6):
        scheduler.append(parent, n)
        scheduler.append(child, 40 + n)
        step = scheduler.schedule(0.0)
        n_copies += len(step.copies)
        executor.copy_blocks(step.copies)
        for row, work in zip(executor.run(builder.build(step)), step.work, strict=True):
            torch.testing.assert_close(row, dense(model, work.sequence.tokens)[-1], atol=1e-5, rtol=1e-5)
        scheduler.computed(step)
    assert n_copies == 1


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "fp8"])
def test_smaller_caches_give_nearly_the_same_logits(kv_dtype: str) -> None:
    """And the same ones however a prompt is cut: what a chunk reads of its own keys is what later ones will read."""
    model, rows = model_of(torch.float32), []
    for budget in (100, 11):
        traffic = Traffic(
            build_executor(model, n_blocks=40, block_size=4, kv_dtype=kv_dtype, native="off"), budget=budget
        )
        sequences = random_traffic(traffic, 0, n=3)
        rows.append(traffic.run())
    for key, tokens in sequences.items():
        expected = dense(model, tokens)
        for position, row in rows[0][key].items():
            if position in rows[1][key]:
                torch.testing.assert_close(row, rows[1][key][position], atol=2e-2, rtol=2e-2)
            error = (row - expected[position]).norm() / expected[position].norm()
            assert error < {"bf16": 0.02, "int8": 0.04, "fp8": 0.2}[kv_dtype]


INVARIANT = [("llama", torch.float32), ("llama", torch.bfloat16), ("gpt2", torch.float32), ("window", torch.float32),
             ("qwen2", torch.bfloat16), ("mixtral", torch.float32)]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), INVARIANT)
def test_batch_invariant_bits_do_not_depend_on_the_mix(name: str, dtype: torch.dtype) -> None:
    """The same sequences alone, in company, and in chunks of another size, give the same logits bit by bit."""
    model = model_of(dtype, **{**FAMILIES[name], "d_model": 64, "d_ff": 96})
    results: dict[str, dict[int, Tensor]] = {}
    for n_blocks, budget, n in ((80, 300, 7), (20, 17, 5), (64, 40, 6)):
        executor = build_executor(model, n_blocks=n_blocks, block_size=8, native="off", batch_invariant=True)
        traffic = Traffic(executor, budget=budget)
        sequences = random_traffic(traffic, 0, n=n)
        for key, rows in traffic.run().items():
            for position, row in rows.items():
                before = results.setdefault(key, {}).setdefault(position, row)
                assert torch.equal(row, before), f"sequence {key} at {position} in steps of {budget}"
    alone = Traffic(build_executor(model, n_blocks=20, block_size=8, native="off", batch_invariant=True), budget=99)
    alone.add("3", sequences["3"], len(sequences["3"]))
    for position, row in alone.run()["3"].items():
        assert torch.equal(row, results["3"][position])
        torch.testing.assert_close(row, dense(model, sequences["3"])[position], atol=2e-1, rtol=5e-2)


def test_batch_invariant_across_tiles_of_keys() -> None:
    model = model_of(torch.float32, max_seq_len=1200, n_layers=1)
    draw, rows = random.Random(0), []
    tokens = [draw.randrange(61) for _ in range(1100)]
    for budget, n_prompt in ((2000, 1090), (333, 1060)):
        executor = build_executor(model, n_blocks=160, block_size=16, native="off", batch_invariant=True)
        traffic = Traffic(executor, budget=budget)
        traffic.add("long", tokens, n_prompt)
        traffic.add("other", tokens[500:560], 3)
        run = traffic.run()["long"]
        rows.append(torch.stack([run[position] for position in range(1100)]))
    assert torch.equal(rows[0], rows[1])
    torch.testing.assert_close(rows[0], dense(model, tokens), atol=1e-3, rtol=1e-3)


def test_batch_invariance_is_refused_where_it_is_not_kept() -> None:
    with pytest.raises(UserError, match="divisor of 512"):
        build_executor(model_of(), n_blocks=2, block_size=3, native="off", batch_invariant=True)


@pytest.mark.parametrize("family", ["qwen2", "mixtral"])
def test_packed_weights_take_the_place_of_the_models_own(family):
    """In float32, whose matrices are packed on a CPU; the model may then be dropped."""
    exact, model = model_of(**FAMILIES[family]), model_of(torch.float32, **FAMILIES[family])
    executor = build_executor(model, n_blocks=40, block_size=4, native="off")
    weight = weakref.ref(model.blocks["0"].attention.q.weight)
    del model
    gc.collect()
    assert weight() is None
    traffic = Traffic(executor)
    sequences = random_traffic(traffic, 5)
    for name, rows in traffic.run().items():
        expected = dense(exact, sequences[name])
        for position, row in rows.items():
            torch.testing.assert_close(row, expected[position], rtol=2e-3, atol=2e-3)
