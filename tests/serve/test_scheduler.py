"""The scheduler on a cache that remembers what was written where: every sequence reads its own, no block is lost."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelworks.serve.blocks import BlockPool
from modelworks.serve.prefix import PrefixKeys, tag
from modelworks.serve.scheduler import Scheduler, Step
from modelworks.serve.sequence import Sequence, Status
from modelworks.serve.waiting import Overloaded, WaitingQueue

ROOT = tag({"model": "test"})


@dataclass
class Machine:
    """Runs steps. A slot of the cache holds the tokens that its keys and values depend on: all up to its own."""

    scheduler: Scheduler
    cache: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    def run(self, step: Step) -> list[Sequence]:
        """Checks that each sequence finds its own past, and returns those that want a token."""
        size = self.scheduler.pool.block_size
        for source, target in step.copies:
            for place in range(size):
                self.cache[target, place] = self.cache.get((source, place), ())
        for work in step.work:
            tokens, blocks = work.sequence.tokens, work.sequence.blocks
            assert work.start == work.sequence.n_computed
            assert work.count > 0
            for place in range(work.start + work.count):
                slot = blocks[place // size], place % size
                if place >= work.start:
                    assert self.scheduler.pool.references(slot[0]) == 1, "written where others read"
                    self.cache[slot] = tuple(tokens[: place + 1])
                assert self.cache[slot] == tuple(tokens[: place + 1]), f"{work.sequence.id} reads what is not its own"
        wanted = [work.sequence for work in step.work if work.samples]
        self.scheduler.computed(step)
        assert self.scheduler.pool.problems() == []
        return wanted


def machine(n_blocks: int = 16, block_size: int = 4, **options: float) -> Machine:
    queue = WaitingQueue(max_sequences=100, max_tokens=10_000, age=10.0)
    return Machine(Scheduler(BlockPool(n_blocks, block_size), queue, **options))  # type: ignore[arg-type]


def sequence(id: str, tokens: list[int], most: int = 8, block_size: int = 4, **options: object) -> Sequence:
    keys = PrefixKeys(ROOT, block_size)
    return Sequence(id, list(tokens), len(tokens), len(tokens) + most, keys, **options)  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(4, 14), st.integers(1, 4), st.integers(3, 24))
def test_any_traffic_ends_with_every_block_free(seed: int, n_blocks: int, block_size: int, budget: int) -> None:
    """Arrivals, shared prefixes, forks, aborts, deadlines and a pool that is too small, at random."""
    draw = random.Random(seed)
    runs = machine(n_blocks, block_size, token_budget=budget, max_running=max(1, budget // 2))
    scheduler, alive, now, made = runs.scheduler, [], 0.0, 0
    while made < 25 or alive:
        now += 1.0
        if made < 25 and draw.random() < 0.6:
            made += 1
            tokens = [draw.randrange(2) for _ in range(draw.randint(1, max(1, n_blocks * block_size // 2)))]
            most = draw.randint(1, n_blocks * block_size - len(tokens))
            deadline = now + draw.choice([8.0, 1e9])
            new = sequence(
                str(made), tokens, most, block_size, priority=draw.randrange(3), arrived=now, deadline=deadline,
                reuses_prefix=draw.random() < 0.8,
            )  # fmt: skip
            scheduler.submit(new)
            alive.append(new)
        if alive and draw.random() < 0.1:
            scheduler.finish(draw.choice(alive))  # an abort, in whatever state
        step = scheduler.schedule(now)
        assert step.n_tokens <= budget
        assert step.work or not any(each.status is Status.RUNNING for each in alive)
        if alive and draw.random() < 0.05:
            scheduler.finish(draw.choice(alive))  # while the step runs
            step.work = [work for work in step.work if work.sequence.status is Status.RUNNING]
        for each in runs.run(step):
            if len(alive) < 30 and draw.random() < 0.1 and each.n_tokens + 1 < each.max_tokens:
                child = sequence(f"{each.id}.{now}", each.tokens, each.max_tokens - each.n_tokens, block_size)
                scheduler.fork(each, child)
                scheduler.append(child, draw.randrange(2))
                alive.append(child)
            scheduler.append(each, draw.randrange(2))
            if each.n_tokens >= each.max_tokens:
                scheduler.finish(each)
        alive = [each for each in alive if each.status is not Status.FINISHED]
        assert now < 20_000, "no progress"
    assert scheduler.pool.n_free == n_blocks
    assert scheduler.running == []
    assert len(scheduler.waiting) == 0
    assert scheduler.waiting.n_tokens == 0


@pytest.mark.parametrize("length", range(1, 14))
def test_a_known_prefix_is_not_computed_again_but_its_last_token_is(length: int) -> None:
    runs = machine()
    tokens = list(range(length))
    for attempt, expected in (("cold", 0), ("hot", (length - 1) // 4 * 4)):
        one = sequence(attempt, tokens)
        runs.scheduler.submit(one)
        (work,) = runs.scheduler.schedule(0.0).work
        assert (work.start, one.n_from_cache) == (expected, expected)
        runs.run(Step([work]))
        runs.scheduler.finish(one)
        assert runs.scheduler.pool.n_free == 16


def test_decoding_goes_on_beside_a_long_prompt() -> None:
    runs = machine(64, token_budget=8, max_running=4)
    short = sequence("short", [1, 2])
    runs.scheduler.submit(short)
    runs.run(runs.scheduler.schedule(0.0))
    runs.scheduler.append(short, 3)
    long = sequence("long", list(range(100)))
    runs.scheduler.submit(long)
    for turn in range(5):
        step = runs.scheduler.schedule(float(turn))
        assert [(work.sequence.id, work.count) for work in step.work] == [("short", 1), ("long", 7)]
        runs.run(step)
        runs.scheduler.append(short, 3)


def test_the_least_urgent_gives_way_and_comes_back() -> None:
    runs = machine(4, token_budget=32, max_running=4, reserve=0.0)
    first, second = (sequence(name, [n] * 8, most=8) for n, name in enumerate(("first", "second")))
    for each in (first, second):
        runs.scheduler.submit(each)
    for wanted in runs.run(runs.scheduler.schedule(0.0)):
        runs.scheduler.append(wanted, 7)
    step = runs.scheduler.schedule(1.0)
    assert [each.id for each in step.preempted] == ["second"]
    assert second.status is Status.WAITING
    assert [work.sequence.id for work in step.work] == ["first"]
    runs.run(step)
    runs.scheduler.finish(first)
    (work,) = runs.scheduler.schedule(2.0).work
    assert work.sequence is second
    assert work.start > 0, "what it computed was still there"
    assert runs.scheduler.n_preempted == 1
    assert runs.scheduler.n_tokens_lost == 8


def test_idle_ones_give_way_to_what_they_wait_for() -> None:
    runs = machine(4, token_budget=32, max_running=4, reserve=0.0)
    idle, other = sequence("idle", [1] * 12, most=4, priority=1), sequence("other", [2] * 8, most=4)
    runs.scheduler.submit(idle)
    runs.run(runs.scheduler.schedule(0.0))  # and its next token does not come
    runs.scheduler.submit(other)
    step = runs.scheduler.schedule(1.0)
    assert (step.work, step.preempted) == ([], [idle])
    assert [work.sequence.id for work in runs.scheduler.schedule(2.0).work] == ["other"]


def test_sequences_that_will_be_forked_count_as_what_they_will_be() -> None:
    runs = machine(64, token_budget=32, max_running=4)
    for name, width in (("wide", 3), ("two", 2), ("one", 1)):
        runs.scheduler.submit(sequence(name, [1, 2], width=width))
    step = runs.scheduler.schedule(0.0)
    assert [work.sequence.id for work in step.work] == ["wide"]
    (wide,) = runs.run(step)
    for n in range(2):
        runs.scheduler.fork(wide, child := sequence(f"child {n}", wide.tokens))
        runs.scheduler.append(child, n)
    runs.scheduler.append(wide, 5)
    assert [work.count for work in runs.scheduler.schedule(1.0).work] == [1, 1, 1]  # no room for two more
    runs.scheduler.finish(wide)
    assert len(runs.scheduler.schedule(2.0).work) == 3  # the two children's own tokens lie in the cache by now
    assert {each.id for each in runs.scheduler.running} == {"child 0", "child 1", "two"}


def test_urgent_ones_first_but_nobody_waits_for_ever() -> None:
    runs = machine(64, token_budget=3, max_running=1)
    patient = sequence("patient", [1], priority=5, arrived=0.0)
    runs.scheduler.submit(patient)
    served = []
    for turn in range(100):
        runs.scheduler.submit(sequence(str(turn), [1], priority=0, arrived=float(turn)))
        (work,) = runs.scheduler.schedule(float(turn)).work
        served.append(work.sequence.id)
        runs.scheduler.finish(work.sequence)
    assert 40 <= served.index("patient") <= 70


def test_what_can_never_run_or_finds_the_queue_full_is_refused_at_once() -> None:
    queue = WaitingQueue(max_sequences=2, max_tokens=10, age=10.0)
    scheduler = Scheduler(BlockPool(4, 4), queue)
    with pytest.raises(ValueError, match="17 tokens may be needed, the cache has room for 16"):
        scheduler.submit(sequence("large", [1] * 9))
    scheduler.submit(sequence("a", [1] * 8))
    with pytest.raises(Overloaded, match="8 tokens are waiting"):
        scheduler.submit(sequence("b", [1] * 3))
    scheduler.submit(sequence("c", [1]))
    with pytest.raises(Overloaded, match="2 requests are waiting"):
        scheduler.submit(sequence("d", [1]))


def test_keys_tell_extras_and_their_order_apart() -> None:
    assert tag({"adapter": "x", "salt": "y"}) == tag({"salt": "y", "adapter": "x"})
    different = [{}, {"adapter": "x"}, {"salt": "x"}, {"adapter": "", "salt": "x"}, {"adapter": "x", "salt": ""}]
    assert len({tag(each) for each in different}) == len(different)
    assert PrefixKeys(ROOT, 2).upto([1, 2, 3, 4], 2)[1] != PrefixKeys(ROOT, 2).upto([9, 2, 3, 4], 2)[1]
