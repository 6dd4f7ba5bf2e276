"""The builder's batches equal those put together token by token, whatever the scheduler does in between."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelworks.serve.batch import BatchBuilder, RaggedBatch
from modelworks.serve.blocks import BlockPool
from modelworks.serve.prefix import PrefixKeys, tag
from modelworks.serve.scheduler import Scheduler, Step
from modelworks.serve.sequence import Sequence
from modelworks.serve.waiting import WaitingQueue

ROOT = tag({"model": "test"})


def plainly(step: Step, size: int, every_token: set[Sequence]) -> dict[str, list]:
    """What a batch must hold, one token at a time. Tables up to the blocks that are seen."""
    tokens, positions, slots, starts, lengths, tables, wanted = [], [], [], [0], [], [], []
    for work in step.work:
        sequence = work.sequence
        for place in range(work.start, work.start + work.count):
            last = place == work.start + work.count - 1
            if sequence in every_token or (last and place == len(sequence.tokens) - 1):
                wanted.append(len(tokens))
            tokens.append(sequence.tokens[place])
            positions.append(place)
            slots.append(sequence.blocks[place // size] * size + place % size)
        starts.append(len(tokens))
        lengths.append(work.start + work.count)
        tables.append(sequence.blocks[: -(-lengths[-1] // size)])
    return {
        "tokens": tokens, "positions": positions, "slots": slots, "starts": starts, "lengths": lengths,
        "tables": tables, "wanted": wanted,
    }  # fmt: skip


def check(batch: RaggedBatch, expected: dict[str, list], n_blocks: int) -> None:
    for name in ("tokens", "positions", "slots", "starts", "lengths", "wanted"):
        tensor = getattr(batch, name)
        assert tensor.tolist() == expected[name], name
        assert tensor.dtype == (torch.int32 if name in ("starts", "lengths") else torch.int64)
        assert tensor.is_contiguous()
    assert batch.tables.dtype == torch.int32
    assert batch.tables.is_contiguous()
    assert batch.tables.shape[1] == max(len(table) for table in expected["tables"])
    for row, table in zip(batch.tables.tolist(), expected["tables"], strict=True):
        assert row[: len(table)] == table
        assert all(0 <= block < n_blocks for block in row)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32), st.integers(4, 14), st.integers(1, 4), st.integers(3, 24))
def test_batches_equal_plain_ones(seed: int, n_blocks: int, size: int, budget: int) -> None:
    draw = random.Random(seed)
    queue = WaitingQueue(max_sequences=100, max_tokens=10_000, age=10.0)
    scheduler = Scheduler(BlockPool(n_blocks, size), queue, token_budget=budget, max_running=max(1, budget // 2))
    builder, alive, seen = BatchBuilder(size), [], 0
    for turn in range(60):
        if draw.random() < 0.5:
            tokens = [draw.randrange(3) for _ in range(draw.randint(1, max(1, n_blocks * size // 2)))]
            most = draw.randint(len(tokens) + 1, max(n_blocks * size, len(tokens) + 1))
            if most > n_blocks * size:
                continue
            alive.append(Sequence(str(turn), tokens, len(tokens), most, PrefixKeys(ROOT, size), arrived=float(turn)))
            scheduler.submit(alive[-1])
        if alive and draw.random() < 0.1:
            scheduler.finish(alive.pop(draw.randrange(len(alive))))
        step = scheduler.schedule(float(turn))
        if not step.work:
            continue
        seen += 1
        every_token = {work.sequence for work in step.work if draw.random() < 0.2}
        check(builder.build(step, every_token=every_token), plainly(step, size, every_token), n_blocks)
        wanted = [work.sequence for work in step.work if work.samples]
        scheduler.computed(step)
        for each in wanted:
            if draw.random() < 0.15 and each.n_tokens + 1 < each.max_tokens:
                child = Sequence(f"{each.id}.{turn}", list(each.tokens), each.n_prompt, each.max_tokens, each.keys)
                scheduler.fork(each, child)
                scheduler.append(child, 1)
                alive.append(child)
            scheduler.append(each, draw.randrange(3))
            if each.n_tokens >= each.max_tokens:
                scheduler.finish(each)
    assert seen > 10


def test_many_sequences_take_and_give_back_rows() -> None:
    queue = WaitingQueue(max_sequences=1000, max_tokens=10_000, age=10.0)
    scheduler = Scheduler(BlockPool(2000, 1), queue, token_budget=400, max_running=300)
    builder = BatchBuilder(1)
    for turn in range(20):
        for n in range(100):
            scheduler.submit(Sequence(f"{turn}.{n}", [n, 1], 2, 4, PrefixKeys(ROOT, 1), reuses_prefix=False))
        step = scheduler.schedule(float(turn))
        check(builder.build(step), plainly(step, 1, set()), 2000)
        scheduler.computed(step)
        for sequence in list(scheduler.running):
            scheduler.finish(sequence)
    assert len(builder._tables) <= 512
