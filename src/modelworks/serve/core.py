"""The engine's loop, one step at a time: schedule, compute, choose tokens, tell.

    submit -> (preparing ->) waiting -> [ scheduler.schedule -> executor.run -> sampler.sample -> group.take ] -> deltas

A request that goes wrong ends alone, with an error: numbers that are not finite in its own row, a grammar that cannot
go on. Where a step as a whole cannot be computed, whose fault it is cannot be told, and all requests end with that
error; what the cache knew before stays right, since blocks are only found by others once they are full and computed,
so that the engine goes on with what is submitted then.

Everything here happens in one thread, between two steps: there is no state in which an abort is not allowed. Only
structures are compiled elsewhere (`serve.preparation`), so that no schema delays others' tokens: who asked for one
keeps its place in the queue, and is passed over until it is there.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from modelworks.config import UserError
from modelworks.data import StreamDecoder
from modelworks.serve.admission import check_request
from modelworks.serve.batch import BatchBuilder
from modelworks.serve.blocks import BlockPool
from modelworks.serve.eviction import Evictor
from modelworks.serve.executor import Executor, ExecutorBroken
from modelworks.serve.group import Branch, Group
from modelworks.serve.options import EngineOptions
from modelworks.serve.pace import Pace
from modelworks.serve.prefix import PrefixKeys, tag
from modelworks.serve.progress import Progress
from modelworks.serve.request import Delta, Request
from modelworks.serve.sampler import NOT_FINITE, Sampled, Sampler
from modelworks.serve.scheduler import Scheduler, Step
from modelworks.serve.sequence import Sequence
from modelworks.serve.stats import EngineStats
from modelworks.serve.text import Decoder
from modelworks.serve.waiting import Overloaded, WaitingQueue

if TYPE_CHECKING:
    from modelworks.data import Tokenizer
    from modelworks.serve.structured import Constraint

_PATIENCE = 0.005  # seconds of a step that has nothing to do but to wait for a structure


class EngineCore:
    """executor: computes steps. tokenizer: None gives token ids without text. eos_ids: every token that ends a text.
    identity: of the model; prefixes are shared only under the same. clock: seconds, growing."""

    def __init__(
        self,
        executor: Executor,
        options: EngineOptions,
        *,
        max_model_len: int,
        tokenizer: Tokenizer | None = None,
        eos_ids: Collection[int] = (),
        identity: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.executor, self.options, self.max_model_len, self.tokenizer = executor, options, max_model_len, tokenizer
        self.vocab_size = executor.config.vocab_size
        self.eos_ids = frozenset(eos_ids)
        self._identity, self._clock = {"model": identity, "kv_dtype": executor.kv_dtype}, clock
        self._pool = BlockPool(executor.n_blocks, executor.block_size)
        self._waiting = WaitingQueue(
            max_sequences=options.max_waiting, max_tokens=options.max_waiting_tokens, age=options.ageing_s
        )
        self._scheduler = Scheduler(
            self._pool,
            self._waiting,
            token_budget=options.token_budget,
            max_running=options.max_running,
            reserve=options.reserve,
        )
        self._evictor = None if options.eviction is None else Evictor(options.eviction, self._scheduler, executor)
        self._builder = BatchBuilder(executor.block_size)
        self._sampler = Sampler(self.vocab_size, tokenizer, self.eos_ids)
        self._seeds = random.Random(options.seed)
        self._progress = Progress(self._scheduler)
        self._preparing: dict[str, tuple[Group, Future[Constraint]]] = {}  # by the request's id
        self._pace = Pace(options.stall, options.token_budget)
        self._n_prompt = self._n_queries = self._n_hits = self._n_generated = 0
        self._n_steps = self._n_failed_steps = self._step_tokens = 0
        self._step_seconds = self._started = 0.0
        self._broken: ExecutorBroken | None = None
        self._closed = False

    # ------------------------------------------------------------------ what is asked

    @property
    def has_work(self) -> bool:
        """Whether a step would compute or tell anything."""
        return bool(self._progress) or self._broken is not None

    @property
    def preparing(self) -> Collection[str]:
        """Requests whose structure is being compiled. They wait, and may still turn out wrong (`Delta.refused`)."""
        return {name for name, (group, _) in self._preparing.items() if not group.is_over}

    def warm_up(self) -> None:
        """Spend a second on what structured outputs need, which the first of them would do beside others' steps."""
        self._sampler.warm_up()

    def submit(self, request: Request) -> None:
        """Into the queue. What does not fit the context is not refused: it ends with "length" when the context is full.

        Raises UserError for a request that can never run, saying why, and Overloaded where the queue is full. Whether a
        structure that is not known yet can be followed is found out later: see `preparing`.
        """
        self.check(request)
        if request.id in self._progress.groups:
            raise UserError(f"id: {request.id!r} is that of a request in progress")
        params, longest, now = request.params, self._longest(request), self._clock()
        within = self.options.deadline_s if request.deadline is None else request.deadline
        # Scores of a prompt are of every token of it, and what was found in the cache has none.
        reuses = self.options.prefix_cache and request.reuses_prefix and params.prompt_logprobs is None
        ends: frozenset[int] = frozenset() if params.ignore_eos else self.eos_ids
        group = Group(request, ends=ends, decoder=self._decoder, longest=longest, vocab_size=self.vocab_size)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        ranked = params.best_of is not None and params.best_of > params.n and params.logprobs is None
        sampled = replace(params, logprobs=0) if ranked else params
        state, structure = self._sampler.begin(sampled, request.prompt, seed)
        sequence = partial(
            Sequence,
            tokens=list(request.prompt),
            n_prompt=group.n_prompt,
            max_tokens=group.n_prompt + longest,
            keys=PrefixKeys(tag({**self._identity, "salt": request.salt}), self._pool.block_size),
            priority=request.priority,
            arrived=now,
            deadline=math.inf if within is None else now + within,
            width=params.n_sequences,
            reuses_prefix=reuses,
            is_scored=group.is_scoring,
        )
        try:
            self._progress.begin(group, state, sequence, retry_after=self._time_to_compute(self._waiting.n_tokens))
        except Overloaded:
            if structure is not None:
                structure.cancel()
            raise
        if structure is not None:
            self._preparing[request.id] = group, structure
            self._progress.hold(group)

    def check(self, request: Request) -> None:
        """Raise UserError for a request that this engine can never run, saying why."""
        if self._closed:
            raise UserError("the engine is closed")
        check_request(request, self.options, vocab_size=self.vocab_size, max_model_len=self.max_model_len)
        params = request.params
        if self.tokenizer is None and (params.stop or params.bad_words or params.structure):
            raise UserError("stop, bad_words and structure are of text, but the model has no tokeniser")
        # A sequence must fit the cache alone; the beams of a search together, for they wait for each other.
        width, most = params.beams or 1, self._pool.n_blocks - (self._scheduler.reserve if params.beams else 0)
        needed = len(request.prompt) + self._longest(request)
        if width * -(-needed // self._pool.block_size) > most:
            raise UserError(
                f"{'beams' if params.beams else 'max_tokens'}: {width} x {needed} tokens may be needed, and the cache "
                f"has room for {width} x {most // width * self._pool.block_size}"
            )

    def abort(self, request_id: str, *, told: bool = True) -> None:
        """The request ends with "abort", in whatever state it is; one that is not known, or has ended, is left alone.
        Its blocks are free at once. The next step tells of its end, unless nobody listens any more (told=False)."""
        if (group := self._progress.groups.get(request_id)) is not None:
            self._progress.end(group, "abort")
            if not told:
                self._progress.hush(request_id)

    def close(self) -> None:
        """Abort everything and let the cache go."""
        for request_id in list(self._progress.groups):
            self.abort(request_id)
        if not self._closed:
            self._closed = True
            self._sampler.close()
            self.executor.close()

    # ------------------------------------------------------------------ one step

    def step(self) -> list[Delta]:
        """Compute one step and tell what came of it. Without work: nothing.

        Raises ExecutorBroken, after a step that told every request of its end, where no further step is possible.
        """
        if self._broken is not None:
            raise self._broken
        self._settle()
        self._started = started = self._clock()
        scheduler = self._scheduler
        scheduler.long_budget = self._pace.long_budget(scheduler.n_long_prompts, scheduler.n_decoding)
        step = scheduler.schedule(started)
        for sequence in step.expired:
            if (branch := self._progress.branches.get(sequence)) is not None:
                self._progress.end(branch.group, "deadline")
        for sequence in step.preempted:  # what followed it will be worked out again, as its keys and values are
            if (branch := self._progress.branches.get(sequence)) is not None:
                branch.candidates = None
        if step.work:
            self._compute(step)
            self._n_steps += 1
            self._step_tokens, self._step_seconds = step.n_tokens, self._clock() - started
            self._pace.measured(step, self._step_seconds)
        news = self._progress.told()
        if self._preparing and not step.work and not news:
            wait([structure for _, structure in self._preparing.values()], _PATIENCE, FIRST_COMPLETED)
        return news

    def stats(self) -> EngineStats:
        """As of now."""
        return EngineStats(
            n_running=len(self._scheduler.running),
            n_waiting=len(self._waiting),
            n_waiting_tokens=self._waiting.n_tokens,
            n_blocks=self._pool.n_blocks,
            n_free_blocks=self._pool.n_free,
            n_preempted=self._scheduler.n_preempted,
            n_tokens_lost=self._scheduler.n_tokens_lost,
            n_prompt_tokens=self._n_prompt,
            n_generated_tokens=self._n_generated,
            n_prefix_queries=self._n_queries,
            n_prefix_hits=self._n_hits,
            n_steps=self._n_steps,
            n_failed_steps=self._n_failed_steps,
            step_tokens=self._step_tokens,
            step_seconds=self._step_seconds,
        )

    def problems(self) -> list[str]:
        """What contradicts itself in the accounts of blocks, in words; empty where all is well."""
        found = self._pool.problems()
        if not self._progress.groups and self._pool.n_free != self._pool.n_blocks:
            found.append(f"nothing runs, and {self._pool.n_blocks - self._pool.n_free} blocks are held")
        return found

    def _compute(self, step: Step) -> None:
        try:
            scored = self._scored(step)
            if step.copies:
                self.executor.copy_blocks(step.copies)
            batch = self._builder.build(step, every_token=scored)
            logits = self.executor.run(batch) if self._evictor is None else self._evictor.run(step, batch)
            self._scheduler.computed(step)
            if self._evictor is not None:
                self._evictor.evict(step)
            self._advance(step, logits, scored)
        except Exception as error:
            logging.getLogger(__name__).exception("a step of %d tokens failed", step.n_tokens)
            self._n_failed_steps += 1
            if isinstance(error, ExecutorBroken):
                self._broken = error
            for group in list(self._progress.groups.values()):
                self._progress.end(group, "error", f"the engine failed to compute a step: {_one_line(error)}")

    def _advance(self, step: Step, logits: Tensor, scored: Collection[Sequence]) -> None:
        """Every sequence that has caught up gets its next token."""
        row = 0
        rows: list[int] = []
        chosen: list[Branch] = []
        searching: list[tuple[int, Branch]] = []
        for work in step.work:
            branch = self._progress.branches[work.sequence]
            group = branch.group
            if group.n_cached < 0:
                self._begun(group, work.start)
            if scored and work.sequence in scored:
                self._score_prompt(group, work.start, logits[row : row + work.count])
                row += work.count - work.samples
            if not work.samples:
                continue
            if group.search is not None:
                searching.append((row, branch))
            else:
                chosen.append(branch)
                rows.append(row)
                if work.sequence.width > 1:
                    for child in self._progress.fork_all(branch):
                        chosen.append(child)
                        rows.append(row)
            row += 1
        if chosen:
            picked = logits if rows == list(range(len(logits))) else logits[torch.tensor(rows)]
            samples = self._sampler.sample(picked, [branch.state for branch in chosen])
            for branch, sampled in zip(chosen, samples, strict=True):
                self._take(branch, sampled)
        if searching:
            self._search(searching, logits)

    def _take(self, branch: Branch, sampled: Sampled) -> None:
        if sampled.error is not None:
            self._progress.fail(branch, sampled.error)
            return
        self._scheduler.append(branch.sequence, sampled.token)
        try:
            branch.state.accept(sampled.token)
            delta = branch.group.take(branch, sampled)
        except Exception as error:  # of this request's own state: the others have nothing to do with it
            logging.getLogger(__name__).exception("request %s failed", branch.group.request.id)
            self._progress.fail(branch, _one_line(error))
            return
        self._n_generated += 1
        self._progress.tell(delta)
        if branch.ending is not None:
            self._progress.leave(branch)

    # ------------------------------------------------------------------ structures, prompts and forks

    def _settle(self) -> None:
        """Requests whose structures are compiled may be admitted, or are refused; those that have ended meanwhile are
        forgotten, and theirs not begun with."""
        for request_id, (group, structure) in list(self._preparing.items()):
            if group.is_over:
                structure.cancel()
            elif not structure.done():
                continue
            elif (error := structure.exception()) is None:
                group.branches[0].state.constraint = structure.result()
                self._progress.let_go(group)
            elif isinstance(error, UserError):
                self._progress.end(group, "error", str(error), refused=True)
            else:  # a defect of the library that this structure met
                logging.getLogger(__name__).error("request %s failed", request_id, exc_info=error)
                self._progress.end(group, "error", _one_line(error))
            del self._preparing[request_id]

    def _scored(self, step: Step) -> Collection[Sequence]:
        """Those of a step for all of whose tokens logits are wanted."""
        if not self._progress.n_scoring:
            return ()
        return {work.sequence for work in step.work if self._progress.branches[work.sequence].group.is_scoring}

    def _begun(self, group: Group, n_cached: int) -> None:
        """The first tokens of a request were computed."""
        group.n_cached, group.queued_s = n_cached, self._started - group.branches[0].sequence.arrived
        self._n_prompt += group.n_prompt
        if group.branches[0].sequence.reuses_prefix:
            self._n_queries += group.n_prompt
            self._n_hits += n_cached

    def _score_prompt(self, group: Group, start: int, logits: Tensor) -> None:
        """Log-probabilities of a prompt's tokens from `start` + 1 on. logits: (tokens, vocab_size), from `start` on."""
        scores = group.prompt_logprobs
        assert scores is not None
        first = scores.n_known - 1 - start  # what was scored before a preemption is not scored again
        wanted = group.request.prompt[scores.n_known : start + len(logits) + 1]
        if wanted and first >= 0:
            found = self._sampler.prompt_logprobs(logits[first : first + len(wanted)], wanted, scores.n_top)
            scores.write(*found)
        if not group.is_scoring:
            group.branches[0].sequence.is_scored = False

    # ------------------------------------------------------------------ beams

    def _search(self, searching: list[tuple[int, Branch]], logits: Tensor) -> None:
        """Beams that have caught up get their candidates, and each search of which all have goes on."""
        branches = [branch for _, branch in searching]
        scores = self._sampler.log_probs(
            logits[torch.tensor([row for row, _ in searching])], [branch.state for branch in branches]
        )
        most = max(branch.group.n_candidates for branch in branches)
        values, tokens = scores.topk(min(most, self.vocab_size))
        for branch, of_values, of_tokens in zip(branches, values.tolist(), tokens.tolist(), strict=True):
            if math.isnan(of_values[0]):  # the largest of all, for topk
                self._progress.end(branch.group, "error", branch.state.error or NOT_FINITE)
            branch.candidates = [each for each in zip(of_tokens, of_values, strict=True) if each[1] > -math.inf]
        for group in dict.fromkeys(branch.group for branch in branches):
            if not group.is_over and all(branch.candidates is not None for branch in group.branches):
                self._grow(group)

    def _grow(self, group: Group) -> None:
        """All beams of a search by one token."""
        assert group.search is not None
        parents = group.branches
        going = group.search.advance([branch.candidates or [] for branch in parents])
        self._n_generated += len(going)
        grown: list[Branch] = []
        for place, _ in going:  # forks first: they are made of what the parent is before its own token
            used = parents[place] in grown
            grown.append(self._progress.fork(parents[place], len(grown)) if used else parents[place])
        for branch in parents:
            branch.sequence.width = 1
            if branch not in grown:
                self._progress.release(branch)
        for branch, (_, token) in zip(grown, going, strict=True):
            branch.candidates = None
            self._scheduler.append(branch.sequence, token)
            branch.state.accept(token)
        group.branches = grown
        if not grown:
            self._progress.conclude(group)

    # ------------------------------------------------------------------ helpers

    def _longest(self, request: Request) -> int:
        """New tokens of a completion, at most."""
        room = self.max_model_len - len(request.prompt)
        return room if request.params.max_tokens is None else min(request.params.max_tokens, room)

    def _time_to_compute(self, n_tokens: int) -> float:
        """Seconds, from 1 to 60: a guess from the last step."""
        steps = n_tokens / self.options.token_budget
        return min(max(steps * self._step_seconds, 1.0), 60.0)

    def _decoder(self) -> Decoder | None:
        return None if self.tokenizer is None else StreamDecoder(self.tokenizer)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__
