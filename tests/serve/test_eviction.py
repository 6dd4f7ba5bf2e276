"""Forgetting keys: what policies name, that blocks are conserved, and that steps compute attention without them."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_torch_executor import FAMILIES, model_of
from torch import Tensor

from modelworks.config import UserError
from modelworks.models import Transformer, additive, grouped_attention
from modelworks.serve.batch import BatchBuilder
from modelworks.serve.blocks import BlockPool
from modelworks.serve.engine import Engine
from modelworks.serve.eviction import Evictor, HeavyHitters, Policy, SinksAndWindow, SnapKV, Table, parse_policy
from modelworks.serve.executor import build_executor
from modelworks.serve.options import EngineOptions
from modelworks.serve.params import SamplingParams
from modelworks.serve.prefix import PrefixKeys, tag
from modelworks.serve.scheduler import Scheduler
from modelworks.serve.sequence import Sequence, Status
from modelworks.serve.waiting import WaitingQueue

ROOT = tag({"model": "test"})


class Visible:
    """A context whose every token sees what a matrix says; it keeps the weights of attention."""

    dropout = routing = None

    def __init__(self, visible: Tensor) -> None:
        self.visible, self.weights = visible, 0.0

    def prepare(self, *arguments: object) -> None: ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        mask = additive(self.visible, q.dtype)
        grown = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        weights = (q @ grown.transpose(2, 3) / q.shape[-1] ** 0.5 + mask).softmax(-1)
        self.weights = self.weights + weights[0].mean(0)
        return grouped_attention(q, k, v, mask).transpose(1, 2)


@torch.inference_mode()
def reference(model: Transformer, tokens: list[int], visible: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (n, vocab_size), and attention averaged over heads and layers (n, n)."""
    context = Visible(visible)
    hidden = model(torch.tensor([tokens]), torch.arange(len(tokens))[None], context)
    return model.logits(hidden)[0].float(), context.weights / model.config.n_layers


def scheduler_of(n_blocks: int, size: int, budget: int = 64, running: int = 8) -> Scheduler:
    queue = WaitingQueue(max_sequences=100, max_tokens=10_000, age=10.0)
    return Scheduler(BlockPool(n_blocks, size), queue, token_budget=budget, max_running=running)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize(
    "policy", [SinksAndWindow(sinks=3, window=9), HeavyHitters(budget=16, recent=6), SnapKV(budget=12, observed=5)],
    ids=["window", "h2o", "snapkv"],
)  # fmt: skip
def test_steps_after_eviction_equal_attention_without_the_evicted(policy: Policy, family: str) -> None:
    """Two sequences through small chunks; the reference forgets the same blocks, chosen by attention of its own."""
    size, model = 4, model_of(**FAMILIES[family])
    executor = build_executor(model, n_blocks=40, block_size=size, native="off")
    scheduler, builder = scheduler_of(40, size, budget=7, running=3), BatchBuilder(size)
    evictor = Evictor(policy, scheduler, executor)
    draw = random.Random(0)
    texts = {name: [draw.randrange(61) for _ in range(45)] for name in ("a", "b")}
    visible = {name: torch.ones(45, 45, dtype=torch.bool).tril() for name in texts}
    kept = {name: list(range(12)) for name in texts}  # places of blocks that are not forgotten
    decided: set[str] = set()
    for name, n_prompt in (("a", 23), ("b", 6)):
        scheduler.submit(Sequence(name, texts[name][:n_prompt], n_prompt, 45, PrefixKeys(ROOT, size)))
    while scheduler.running or len(scheduler.waiting):
        step = scheduler.schedule(0.0)
        logits = evictor.run(step, builder.build(step))
        scheduler.computed(step)
        rows = iter(logits)
        for work in step.work:
            name, end = work.sequence.id, work.start + work.count
            expected, weights = reference(model, texts[name], visible[name])
            if work.samples:
                torch.testing.assert_close(next(rows), expected[end - 1], atol=1e-5, rtol=1e-5)
            if end < work.sequence.n_prompt:
                continue
            held = kept[name][: -(-end // size) - (12 - len(kept[name]))]
            watched = slice(max(0, work.sequence.n_prompt - 5), end) if isinstance(policy, SnapKV) else slice(0, end)
            mass = [float(weights[watched, place * size : (place + 1) * size].sum()) for place in held]
            n_keys = end - (12 - len(kept[name])) * size
            for place in [held[i] for i in policy.to_free(Table(n_keys, size, mass, name not in decided))]:
                visible[name][end:, place * size : (place + 1) * size] = False
                kept[name].remove(place)
            decided.add(name)
        evictor.evict(step)
        for work in step.work:
            if work.samples:
                sequence = work.sequence
                assert sequence.n_evicted == 12 - len(kept[sequence.id])
                scheduler.append(sequence, texts[sequence.id][sequence.n_tokens])
                if sequence.n_tokens == 45:
                    scheduler.finish(sequence)
    assert len(kept["a"]) < 12
    assert scheduler.pool.n_free == 40


def test_what_the_policies_free() -> None:
    assert SinksAndWindow(sinks=4, window=8).to_free(Table(26, 4, (), True)) == [1, 2, 3]
    assert SinksAndWindow(sinks=5, window=8).to_free(Table(26, 4, (), False)) == [2, 3]
    assert SinksAndWindow(sinks=0, window=100).to_free(Table(26, 4, (), False)) == []
    mass = [9.0, 1.0, 5.0, 0.5, 0.1, 0.2, 0.0]
    assert HeavyHitters(budget=16, recent=8).to_free(Table(26, 4, mass, False)) == [1, 2, 3]
    assert HeavyHitters(budget=16, recent=1).to_free(Table(26, 4, mass, False)) == [3, 4, 5]
    assert HeavyHitters(budget=26, recent=8).to_free(Table(26, 4, mass, False)) == []
    assert SnapKV(budget=16, observed=8).to_free(Table(26, 4, mass, True)) == [1, 2, 3]
    assert SnapKV(budget=16, observed=8).to_free(Table(26, 4, mass, False)) == []
    snap = SnapKV(budget=16, observed=8)
    parts = [snap.n_watched(start, stop - start, 30) for start, stop in pairwise((0, 10, 25, 30, 31))]
    assert parts == [0, 3, 5, 0]


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.integers(6, 14), st.integers(1, 4))
def test_blocks_are_conserved_and_what_came_after_is_not_found(seed: int, n_blocks: int, size: int) -> None:
    draw = random.Random(seed)
    scheduler, builder, alive, n_evicted = scheduler_of(n_blocks, size, budget=24, running=6), BatchBuilder(size), [], 0
    true_prefixes: set[bytes] = set()
    for turn in range(60):
        if draw.random() < 0.5:
            tokens = [draw.randrange(2) for _ in range(draw.randint(1, n_blocks * size // 2))]
            most = draw.randint(len(tokens) + 1, n_blocks * size)
            alive.append(Sequence(str(turn), tokens, len(tokens), most, PrefixKeys(ROOT, size), arrived=float(turn)))
            scheduler.submit(alive[-1])
        step = scheduler.schedule(float(turn))
        if not step.work:
            continue
        batch = builder.build(step)
        assert len(set(batch.slots.tolist())) == batch.n_tokens, "two tokens in one slot"
        for s, work in enumerate(step.work):
            sequence, end = work.sequence, work.start + work.count
            n_kept = end - sequence.n_evicted * size
            assert batch.lengths[s] == n_kept
            last = sequence.blocks[(n_kept - 1) // size] * size + (n_kept - 1) % size
            assert batch.slots[batch.starts[s + 1] - 1] == last
            assert scheduler.pool.references(last // size) == 1
        scheduler.computed(step)
        for sequence in [work.sequence for work in step.work]:
            if not sequence.n_evicted:
                keys = PrefixKeys(ROOT, size)
                true_prefixes.update(keys.upto(sequence.tokens, sequence.n_computed // size))
        for sequence in [work.sequence for work in step.work if work.samples]:
            n_full = sequence.n_computed // size - sequence.n_evicted
            if n_full and draw.random() < 0.3:
                places = draw.sample(range(n_full), draw.randint(1, n_full))
                n_evicted += len(places)
                scheduler.evict(sequence, places)
            if draw.random() < 0.2 and sequence.n_tokens + 1 < sequence.max_tokens:
                name, keys = f"{sequence.id}.{turn}", PrefixKeys(ROOT, size)
                child = Sequence(name, list(sequence.tokens), 1, sequence.max_tokens, keys)
                scheduler.fork(sequence, child)
                scheduler.append(child, 1)
                alive.append(child)
            scheduler.append(sequence, draw.randrange(2))
            if sequence.n_tokens >= sequence.max_tokens:
                scheduler.finish(sequence)
        assert scheduler.pool.problems() == []
    assert n_evicted > 0
    assert set(scheduler.pool._by_key) <= true_prefixes
    for each in alive:
        scheduler.finish(each)
    assert scheduler.pool.n_free == n_blocks


def test_what_cannot_be_evicted_is_refused() -> None:
    scheduler = scheduler_of(8, 4)
    sequence = Sequence("one", list(range(6)), 6, 20, PrefixKeys(ROOT, 4))
    scheduler.submit(sequence)
    scheduler.computed(scheduler.schedule(0.0))
    with pytest.raises(ValueError, match="1 blocks are full"):
        scheduler.evict(sequence, [1])
    scheduler.finish(sequence)
    scheduler.evict(sequence, [0])  # it ended meanwhile
    assert sequence.status is Status.FINISHED
    executor = build_executor(model_of(**FAMILIES["window"]), n_blocks=8, block_size=4, native="off")
    with pytest.raises(UserError, match="sliding window"):
        Evictor(SinksAndWindow(), scheduler, executor)
    for wrong in (
        lambda: SnapKV(budget=8, observed=8),
        lambda: SinksAndWindow(window=0),
        lambda: HeavyHitters(budget=-1),
    ):
        with pytest.raises(UserError, match="expected"):
            wrong()


def test_an_engine_forgets_and_gives_every_block_back() -> None:
    """What is never reached is never forgotten; what is, frees blocks while the sequence runs."""
    model, completions = model_of(torch.float32), []
    prompt = [n % 61 for n in range(40)]
    for eviction in (
        None,
        SinksAndWindow(window=999),
        HeavyHitters(budget=24, recent=8),
        SnapKV(budget=16, observed=8),
    ):
        options = EngineOptions(
            kv_cache_bytes=100_000,
            block_size=4,
            token_budget=32,
            max_running=4,
            eviction=eviction,
            native="auto" if isinstance(eviction, SnapKV) else "off",
        )
        with Engine(model, options) as engine:
            params = SamplingParams(temperature=0.0, max_tokens=20)
            completions.append(engine.generate([prompt, prompt[:5]], params))
            assert engine.problems() == []
    texts = [[output.completions[0].token_ids for output in each] for each in completions]
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[2][0]
    assert all(len(each[0]) == 20 for each in texts)
    with pytest.raises(UserError, match="expected a policy"):
        EngineOptions(eviction="window")  # type: ignore[arg-type]


def test_policies_in_words() -> None:
    assert parse_policy("window") == SinksAndWindow()
    assert parse_policy("window:5,8") == SinksAndWindow(sinks=5, window=8)
    assert parse_policy("h2o:64,16") == HeavyHitters(budget=64, recent=16)
    assert parse_policy("snapkv:64") == SnapKV(budget=64)
    with pytest.raises(UserError, match="did you mean `snapkv`"):
        parse_policy("snapvk")
    for wrong in ("window:1,2,3", "window:a", "h2o:-1", "h2o:16,64", ""):
        with pytest.raises(UserError):
            parse_policy(wrong)
