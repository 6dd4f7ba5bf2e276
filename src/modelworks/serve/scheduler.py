"""What the model computes next: one rule, five steps, no tensors.

Every running sequence catches up from `n_computed` to `n_tokens` (`serve.sequence`). A step has a budget of tokens:

    1. expire   what is past its deadline ends
    2. decode   every running sequence that lacks one token gets it; where no block is free for it, the least urgent
                running sequence gives its blocks back and will be computed again (recomputation: Kwon et al. 2023)
    3. chunks   what is left of the budget goes to running sequences that lack more, the most urgent first
    4. admit    and then to waiting ones, as long as all their blocks fit and a reserve stays free; those that are held
                back (`WaitingQueue.hold`) are passed over
    5. unblock  where that leaves nothing to compute, the least urgent running sequence gives way

Decoding first bounds how long a long prompt delays others: by one chunk (Agrawal et al. 2024, 2403.02310). Where even
that is long, beside what decoding takes, `long_budget` makes the chunks of long prompts smaller in steps that decode;
short ones are still computed at once, for many small chunks would cost more than they spare anybody. Prompts that are
scored come in small chunks too (`MOST_SCORED`), since every one of their tokens wants logits. A sequence has
blocks for all its tokens from its admission, so only decoding ever runs short of them.

Progress: the most urgent running sequence is always served. Whoever is admitted fits the pool alone (`submit` refuses
others), it may take the blocks of all others, and its urgency grows while it waits. No thrash: nothing is admitted in a
step that threw something out, and the reserve is for those who run. Sequences may be idle: caught up, and without a
next token until others (of the same beam search) are as far, all at once. Those must fit the pool together; that idle
ones of several searches do not keep each other's out is the purpose of step 5.

The caller runs the model on a `Step`, tells what was `computed`, and gives each sequence that `samples` its next token
with `append`; or `fork`s it before that, or `finish`es it. Those that were aborted meanwhile are passed over.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field
from itertools import islice

from modelworks.serve.blocks import BlockPool
from modelworks.serve.sequence import Sequence, Status
from modelworks.serve.waiting import WaitingQueue

SHORT_PROMPT = 128  # tokens
MOST_SCORED = 64  # tokens of a step of whose logits log-probabilities are made: a vocabulary of work for each


@dataclass(frozen=True)
class Work:
    """Tokens `start` to `start + count` of a sequence. samples: the last of them gives the next token."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        return self.start + self.count == self.sequence.n_tokens


@dataclass
class Step:
    """copies: (from, to) blocks that must be copied before anything is written. expired: sequences that ended at their
    deadline. preempted: those that gave their blocks back and wait again."""

    work: list[Work] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    expired: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        return sum(work.count for work in self.work)


class Scheduler:
    """token_budget: tokens of a step. max_running: sequences that are admitted to run at once. reserve: part of all
    blocks that admission leaves free."""

    def __init__(
        self,
        pool: BlockPool,
        waiting: WaitingQueue,
        *,
        token_budget: int = 512,
        max_running: int = 64,
        reserve: float = 0.02,
    ) -> None:
        if not 1 <= max_running < token_budget:
            raise ValueError(
                f"a step of {token_budget} tokens leaves no room for prompts beside {max_running} sequences"
            )
        self.pool, self.waiting = pool, waiting
        self.token_budget, self.max_running = token_budget, max_running
        self.reserve = int(reserve * pool.n_blocks)
        self.long_budget = token_budget  # of chunks of long prompts together, in a step that decodes
        self.running: list[Sequence] = []
        self.n_preempted = 0  # so far
        self.n_tokens_lost = 0  # computed, given up, and computed again

    def submit(self, sequence: Sequence, *, retry_after: float = 1.0) -> None:
        """Into the queue. Raises ValueError for one that can never run, Overloaded where the queue is full, with a
        guess when it will not be."""
        if not 0 < sequence.n_tokens <= sequence.max_tokens:
            raise ValueError(f"{sequence.n_tokens} tokens given, of at most {sequence.max_tokens}")
        if self._blocks_for(sequence.max_tokens) > self.pool.n_blocks:
            room = self.pool.n_blocks * self.pool.block_size
            raise ValueError(f"{sequence.max_tokens} tokens may be needed, the cache has room for {room}")
        if sequence.width > self.max_running:
            raise ValueError(f"{sequence.width} sequences at once, at most {self.max_running} can run")
        self.waiting.add(sequence, retry_after=retry_after)

    def schedule(self, now: float) -> Step:
        """What to compute next. Empty where nothing can be: all is done, or all that waits must go on waiting."""
        step = Step()
        self._expire(step, now)
        self.running.sort(key=lambda sequence: self.waiting.urgency(sequence, now))
        self._decode(step)
        budget = _Budget(self.token_budget - step.n_tokens, self.long_budget if step.work else self.token_budget)
        self._chunks(step, budget)
        if not step.preempted:
            self._admit(step, budget, now)
            self._unblock(step)
        return step

    @property
    def n_decoding(self) -> int:
        """Sequences that lack one token."""
        return sum(sequence.n_pending == 1 for sequence in self.running)

    @property
    def n_long_prompts(self) -> int:
        """Long prompts that are not computed: of those that run, and of as many of the queue as may join them."""
        running = sum(sequence.n_pending > 1 and _is_long(sequence) for sequence in self.running)
        room = max(0, self.max_running - len(self.running))
        return running + sum(_is_long(sequence) for sequence in islice(self.waiting, room))

    def computed(self, step: Step) -> None:
        """The step has run: what it computed is in the cache. Full blocks can be found by others from now on."""
        for work in step.work:
            sequence = work.sequence
            if sequence.status is Status.RUNNING and sequence.n_computed == work.start:
                sequence.n_computed += work.count
                self._remember(sequence)

    def append(self, sequence: Sequence, token: int) -> None:
        """The next token of a sequence that has caught up."""
        if sequence.status is Status.RUNNING:
            sequence.tokens.append(token)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` goes on where `parent` is: it shares all its blocks, of which the last is copied by whoever writes to
        it first. The caller has made it with the parent's tokens."""
        if parent.status is not Status.RUNNING or child.tokens != parent.tokens:
            raise ValueError(f"{parent.id} cannot be forked into {child.id}: it does not run, or their tokens differ")
        self.pool.share(parent.blocks)
        child.blocks, child.n_computed = list(parent.blocks), parent.n_computed
        child.n_evicted = parent.n_evicted
        child.n_remembered, child.order, child.arrived = parent.n_remembered, parent.order, parent.arrived
        parent.width, child.width = max(parent.width - 1, 1), 1
        child.status = Status.RUNNING
        self.running.append(child)

    def evict(self, sequence: Sequence, places: Collection[int]) -> None:
        """A running sequence gives back full blocks, by their places in its table, and sees their keys no more.

        What it computes from now on depends on that, so it leaves the index: none of it will be found by others. Where
        it is thrown out later, all of it is computed again.
        """
        if sequence.status is not Status.RUNNING or not places:
            return
        n_full = sequence.n_computed // self.pool.block_size - sequence.n_evicted
        if not all(0 <= place < n_full for place in places):
            raise ValueError(f"places {sorted(places)} of {sequence.id} cannot be evicted: {n_full} blocks are full")
        gone = set(places)
        self.pool.release([sequence.blocks[place] for place in sorted(gone)])
        sequence.blocks = [block for place, block in enumerate(sequence.blocks) if place not in gone]
        sequence.n_evicted += len(gone)

    def finish(self, sequence: Sequence) -> None:
        """It ends, in whatever state it is; ending twice is ending once."""
        if sequence.status is Status.WAITING and sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._give_back(sequence)
        sequence.status = Status.FINISHED

    def _expire(self, step: Step, now: float) -> None:
        step.expired = self.waiting.expired(now) + [each for each in self.running if each.deadline <= now]
        for sequence in step.expired:
            self.finish(sequence)

    def _decode(self, step: Step) -> None:
        for sequence in list(self.running):
            if len(step.work) == self.token_budget:  # only forks can make so many
                return
            if sequence.status is Status.RUNNING and sequence.n_pending == 1 and self._has_room(sequence, step):
                step.work.append(Work(sequence, sequence.n_computed, 1))

    def _chunks(self, step: Step, budget: _Budget) -> None:
        for sequence in self.running:
            if sequence.n_pending > 1 and (count := budget.take(sequence)):
                step.work.append(Work(sequence, sequence.n_computed, count))

    def _admit(self, step: Step, budget: _Budget, now: float) -> None:
        if budget.left <= 0 or not self.waiting.n_ready:
            return
        width = sum(sequence.width for sequence in self.running)  # those that will be forked, as what they will be
        for sequence in self.waiting.by_urgency(now):
            if budget.left <= 0 or width + sequence.width > self.max_running:
                return
            found = self._found(sequence)
            needed = self._blocks_for(sequence.n_tokens) - len(found)
            free = self.pool.n_free - self.pool.n_free_of(found)
            if free < needed + (self.reserve if self.running else 0):
                return  # those behind it wait too, or a large one would wait for ever
            self.waiting.remove(sequence)
            self.pool.share(found)
            sequence.blocks = found + self.pool.take(needed)
            sequence.n_computed = sequence.n_from_cache = len(found) * self.pool.block_size
            sequence.n_remembered = len(found)
            sequence.status = Status.RUNNING
            self.running.append(sequence)
            width += sequence.width
            if count := budget.take(sequence):  # else its turn comes after other long ones
                step.work.append(Work(sequence, sequence.n_computed, count))

    def _unblock(self, step: Step) -> None:
        """All that run are idle: what each of them needs waits, and what waits first is no less urgent than any."""
        if not step.work and self.running and self.waiting.n_ready:
            self._preempt(self.running[-1], step)

    def _has_room(self, sequence: Sequence, step: Step) -> bool:
        """Whether the sequence can write its last token: into a block of its own. Others give theirs up for it, itself
        at last."""
        place = (sequence.n_tokens - 1) // self.pool.block_size - sequence.n_evicted
        if place < len(sequence.blocks) and self.pool.references(sequence.blocks[place]) == 1:
            return True
        while not self.pool.n_free:
            victim = self.running[-1]  # the least urgent; the more urgent have their work already
            self._preempt(victim, step)
            if victim is sequence:
                return False
        (block,) = self.pool.take(1)
        if place == len(sequence.blocks):
            sequence.blocks.append(block)
        elif self.pool.references(shared := sequence.blocks[place]) == 1:
            self.pool.release([block])  # who shared it was the victim
        else:
            step.copies.append((shared, block))
            self.pool.release([shared])
            sequence.blocks[place] = block
        return True

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        self.running.remove(sequence)
        self.n_preempted += 1
        self.n_tokens_lost += sequence.n_computed
        sequence.n_preempted += 1
        self._give_back(sequence)
        sequence.status = Status.WAITING
        self.waiting.put_back(sequence)
        step.preempted.append(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        """The one way in which a sequence's blocks are released."""
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.n_computed = sequence.n_remembered = sequence.n_evicted = 0

    def _found(self, sequence: Sequence) -> list[int]:
        """Blocks of its prefix that are known, never all of its tokens: the last one's logits are wanted."""
        if not sequence.reuses_prefix:
            return []
        return self.pool.find(sequence.keys.upto(sequence.tokens, (sequence.n_tokens - 1) // self.pool.block_size))

    def _remember(self, sequence: Sequence) -> None:
        full = sequence.n_computed // self.pool.block_size
        if sequence.reuses_prefix and not sequence.n_evicted and full > sequence.n_remembered:
            keys: Sequence_[bytes] = sequence.keys.upto(sequence.tokens, full)
            for place in range(sequence.n_remembered, full):
                self.pool.remember(sequence.blocks[place], keys[place])
            sequence.n_remembered = full

    def _blocks_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.pool.block_size)


@dataclass
class _Budget:
    """Tokens of a step that are left for chunks, `long` of them for long prompts, `scored` for such as are scored."""

    left: int
    long: int
    scored: int = MOST_SCORED

    def take(self, sequence: Sequence) -> int:
        """The size of the sequence's chunk."""
        is_long = _is_long(sequence)
        count = max(min(sequence.n_pending, self.left, self.long if is_long else self.left), 0)
        if sequence.is_scored:
            count = min(count, self.scored)
            self.scored -= count
        self.left -= count
        self.long -= count if is_long else 0
        return count


def _is_long(sequence: Sequence) -> bool:
    return sequence.n_tokens - sequence.n_from_cache > SHORT_PROMPT
