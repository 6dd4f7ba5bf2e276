"""The engine's loop on a cache of token ids: what comes out is what the tokens alone decide, and every block comes
back, whatever is asked, in whatever order."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from dataclasses import replace
from typing import Any, cast

import pytest
from token_cache import VOCAB_SIZE, TokenCache, greedy, logits_after
from torch import Tensor

from modelworks.config import UserError
from modelworks.serve import Collected, Delta, EngineOptions, Overloaded, Request, SamplingParams
from modelworks.serve.batch import RaggedBatch
from modelworks.serve.core import EngineCore
from modelworks.serve.scheduler import MOST_SCORED

EOS = 3
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def core(n_blocks: int = 64, block_size: int = 4, max_model_len: int = 60, **options: Any) -> EngineCore:
    settings = EngineOptions(**{"block_size": block_size, "token_budget": 24, "max_running": 8, **options})
    executor = TokenCache(n_blocks, block_size)
    return EngineCore(executor, settings, max_model_len=max_model_len, eos_ids=[EOS], clock=Clock())


def finish(engine: EngineCore, *requests: Request) -> dict[str, Collected]:
    """Submits all and steps until the last has ended; checks that each completion ends once, and the last says so."""
    collected = {request.id: Collected(request) for request in requests}
    for request in requests:
        engine.submit(request)
    gather(engine, collected)
    assert engine.problems() == []
    return collected


def gather(engine: EngineCore, collected: dict[str, Collected], most: int = 10_000) -> None:
    ended: Counter[tuple[str, int]] = Counter()
    for _ in range(most):
        if not engine.has_work:
            break
        for delta in engine.step():
            take(collected, ended, delta)
    assert not engine.has_work, "no progress"
    assert all(each.finished for each in collected.values())


def take(collected: dict[str, Collected], ended: Counter[tuple[str, int]], delta: Delta) -> None:
    request, name = collected[delta.request_id], (delta.request_id, delta.index)
    assert not request.finished
    assert not ended[name]
    ended[name] += delta.finish_reason is not None
    request.add(delta)
    if request.finished:
        assert all(completion.finish_reason is not None for completion in request.output.completions)


def tokens_of(engine: EngineCore, prompt: list[int], params: SamplingParams = GREEDY, **asked: Any) -> list[list[int]]:
    (output,) = finish(engine, Request("one", prompt, params, **asked)).values()
    return [completion.token_ids for completion in output.output.completions]


def test_mixed_requests_have_the_tokens_that_each_has_alone() -> None:
    draw = random.Random(1)
    requests = [
        Request(str(n), [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 40))], replace(GREEDY, max_tokens=m))
        for n, m in enumerate([1, 2, 5, 9, 20, 20, 20, 3, 7, 11, 13, 20])
    ]
    outputs = finish(core(), *requests)
    for request in requests:
        (completion,) = outputs[request.id].output.completions
        expected = greedy(request.prompt, request.params.max_tokens or 0, [EOS])
        assert completion.token_ids == expected
        assert completion.finish_reason == ("stop" if expected[-1] == EOS else "length")


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 11, 12, 13])
def test_cold_and_hot_are_the_same_at_every_length(length: int) -> None:
    engine, prompt = core(), list(range(4, 4 + length))
    expected = greedy(prompt, 8, [EOS])
    for n_cached in (0, (length - 1) // 4 * 4):
        (output,) = finish(engine, Request("one", prompt, GREEDY)).values()
        assert output.output.completions[0].token_ids == expected
        assert output.output.n_cached == n_cached
    for other in (Request("salted", prompt, GREEDY, salt="x"), Request("none", prompt, GREEDY, reuses_prefix=False)):
        (output,) = finish(engine, other).values()
        assert output.output.n_cached == 0
    assert engine.stats().n_prefix_hits == (length - 1) // 4 * 4


def test_a_long_prompt_makes_steps_at_most_twice_as_long() -> None:
    """On an executor that takes 20 ms a step and 1 ms a token."""

    class Timed(TokenCache):
        def run(self, batch: Any) -> Any:
            clock.now += 0.02 + 0.001 * batch.n_tokens
            return super().run(batch)

    clock = Clock()
    longest = {}
    for stall in (2.0, None):
        options = EngineOptions(block_size=4, token_budget=256, max_running=8, stall=stall)
        engine = EngineCore(Timed(400), options, max_model_len=1000, clock=clock)
        for n in range(4):
            engine.submit(Request(str(n), [5 + n] * 20, replace(GREEDY, max_tokens=200)))
        for _ in range(20):
            engine.step()
        decoding = engine.stats().step_seconds
        engine.submit(Request("long", [7] * 600, replace(GREEDY, max_tokens=1)))
        engine.submit(Request("short", [9] * 100, replace(GREEDY, max_tokens=1)))
        times, ended = [], {}
        while "long" not in ended:
            ended |= {delta.request_id: len(times) for delta in engine.step() if delta.last}
            times.append(engine.stats().step_seconds / decoding)
        if stall is not None:
            assert ended["short"] == 0, "a short one does not wait"
        longest[stall] = max(times[1:])
    assert longest[2.0] <= 2.2
    assert longest[None] > 5


def test_completions_of_a_request_share_its_prompt_and_differ() -> None:
    engine, prompt = core(), list(range(4, 14))
    params = SamplingParams(n=4, seed=5, max_tokens=6, ignore_eos=True)
    engine.submit(Request("n", prompt, params))
    engine.step()
    assert engine.stats().n_blocks - engine.stats().n_free_blocks == 3  # of ten tokens, for all four
    engine.step()
    assert engine.stats().n_blocks - engine.stats().n_free_blocks == 6  # the last one is each's own now
    engine.abort("n")
    first, again = tokens_of(core(), prompt, params), tokens_of(core(n_blocks=9), prompt, params)
    assert first == again
    assert len(set(map(tuple, first))) == 4
    assert first[0] == tokens_of(core(), prompt, replace(params, n=1))[0]


def test_the_best_of_several_has_the_highest_log_probability_a_token() -> None:
    prompt, params = [5, 6, 7], SamplingParams(n=5, seed=2, max_tokens=5, logprobs=0)
    (every,) = finish(core(), Request("all", prompt, params)).values()
    scores = sorted(
        (-sum(each.logprob for each in completion.logprobs or []) / len(completion.token_ids), completion.token_ids)
        for completion in every.output.completions
    )
    (best,) = finish(core(), Request("best", prompt, replace(params, n=2, best_of=5, logprobs=None))).values()
    assert [completion.token_ids for completion in best.output.completions] == [tokens for _, tokens in scores[:2]]
    assert best.output.completions[0].logprobs is None


@pytest.mark.parametrize("penalty", [0.0, 1.0, 1.5])
def test_a_search_as_wide_as_the_tree_finds_the_best_of_all(penalty: float) -> None:
    """Four tokens are allowed, one of which ends: all completions of up to three tokens are looked at."""
    allowed, prompt = [EOS, 5, 6, 7], [8, 9]
    every: list[tuple[float, list[int]]] = []

    def walk(tokens: list[int], total: float) -> None:
        row = logits_after([*prompt, *tokens])
        for token in allowed:
            grown, score = [*tokens, token], total + float(row[allowed].log_softmax(-1)[allowed.index(token)])
            if token == EOS or len(grown) == 3:
                every.append((score / len(grown) ** penalty, grown))
            else:
                walk(grown, score)

    walk([], 0.0)
    params = SamplingParams(
        beams=40, n=40, max_tokens=3, length_penalty=penalty, allowed_token_ids=tuple(allowed), logprobs=1
    )
    engine = core(n_blocks=200, max_model_len=20, max_running=64, token_budget=128)
    (output,) = finish(engine, Request("one", prompt, params)).values()
    assert len(every) == 40
    assert [completion.token_ids for completion in output.output.completions] == [
        tokens for _, tokens in sorted(every, key=lambda each: -each[0])
    ]


def test_a_prompt_that_is_scored_wants_few_logits_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = core(n_blocks=300, max_model_len=400, token_budget=256, stall=None)
    run, wanted = engine.executor.run, []

    def counted(batch: RaggedBatch) -> Tensor:
        wanted.append(len(batch.wanted))
        return run(batch)

    monkeypatch.setattr(engine.executor, "run", counted)
    long = [5 + n % 17 for n in range(300)]
    requests = [
        Request("scored", long, replace(GREEDY, max_tokens=1, prompt_logprobs=3)),
        Request("scored too", long[1:], replace(GREEDY, max_tokens=1, prompt_logprobs=0)),
        Request("other", [6] * 180, replace(GREEDY, max_tokens=1)),
    ]
    outputs = finish(engine, *requests)
    assert max(wanted) <= MOST_SCORED + 3
    assert len(wanted) <= 2 * 300 // MOST_SCORED + 3
    scores = outputs["scored"].output.prompt_logprobs
    assert scores is not None
    assert len(scores) == 300
    for place in (1, 63, 64, 65, 299, -1):
        expected = logits_after(long[: place % 300]).log_softmax(-1)
        assert (entry := scores[place]) is not None
        assert entry.logprob == pytest.approx(float(expected[long[place]]), abs=1e-5)
        assert [token for token, _ in entry.top] == expected.topk(3).indices.tolist()
    assert pickle.loads(pickle.dumps(scores))[1:3] == scores[1:3]
    assert next(iter(scores)) is None
    assert outputs["other"].output.completions[0].token_ids == greedy([6] * 180, 1)


def test_log_probabilities_of_tokens_and_prompt() -> None:
    prompt = [5, 6, 7, 8, 9, 10, 11]
    params = replace(GREEDY, max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    for engine in (core(), core(token_budget=3, max_running=1)):
        for _ in range(2):  # the second time its prefix would be known
            (output,) = finish(engine, Request("one", prompt, params)).values()
            (completion,) = output.output.completions
            everything = [*prompt, *completion.token_ids]
            told = [*(output.output.prompt_logprobs or []), *(completion.logprobs or [])]
            assert told[0] is None
            assert [each.token for each in told[1:] if each] == everything[1:]
            for place, each in enumerate(told[1:], start=1):
                expected = logits_after(everything[:place]).log_softmax(-1)
                assert each is not None
                assert each.logprob == pytest.approx(float(expected[everything[place]]), abs=1e-5)
                assert each.top[0][0] == int(expected.argmax())
                assert len(each.top) == (1 if place < len(prompt) else 2)


def test_a_context_that_is_full_ends_with_length() -> None:
    (output,) = finish(core(), Request("one", [5] * 57, replace(GREEDY, max_tokens=50, ignore_eos=True))).values()
    (completion,) = output.output.completions
    assert (len(completion.token_ids), completion.finish_reason) == (3, "length")


def test_tokens_that_stop() -> None:
    (free,) = tokens_of(core(), [5, 6], replace(GREEDY, ignore_eos=True, max_tokens=20))
    stop = free[4]
    (output,) = finish(core(), Request("one", [5, 6], replace(GREEDY, stop_token_ids=(stop,)))).values()
    (completion,) = output.output.completions
    assert completion.token_ids == free[: free.index(stop) + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_a_sequence_whose_numbers_are_not_finite_ends_alone() -> None:
    engine = core()
    engine.executor.spoiled = lambda tokens: tokens[:2] == [9, 9] and len(tokens) > 4  # type: ignore[attr-defined]
    outputs = finish(
        engine,
        Request("good", [5, 6], GREEDY),
        Request("bad", [9, 9, 4], replace(GREEDY, ignore_eos=True)),
        Request("wide", [9, 9, 4], SamplingParams(n=2, seed=0, ignore_eos=True)),
        Request("beams", [9, 9, 5], SamplingParams(beams=3, ignore_eos=True)),
    )
    assert outputs["good"].output.completions[0].token_ids == greedy([5, 6], 8, [EOS])
    bad = outputs["bad"].output.completions[0]
    assert len(bad.token_ids) == 2
    for name in ("bad", "wide", "beams"):
        for completion in outputs[name].output.completions:
            assert completion.finish_reason == "error"
            assert "not finite" in (completion.error or "")


def test_a_step_that_fails_ends_all_clearly_and_the_engine_goes_on() -> None:
    engine = core(max_running=1)
    engine.submit(Request("runs", [5, 6], GREEDY))
    engine.submit(Request("waits", [5, 6, 7], SamplingParams(n=1)))
    engine.executor.fails = True  # type: ignore[attr-defined]
    deltas = engine.step()
    assert [(each.request_id, each.finish_reason) for each in deltas] == [("runs", "error"), ("waits", "error")]
    assert {each.error for each in deltas} == {"the engine failed to compute a step: RuntimeError: out of memory"}
    assert engine.problems() == []
    assert engine.stats().n_failed_steps == 1
    engine.executor.fails = False  # type: ignore[attr-defined]
    assert tokens_of(engine, [5, 6]) == [greedy([5, 6], 8, [EOS])]


def test_deltas_say_how_long_their_request_waited() -> None:
    engine = core()
    engine.submit(Request("a", [1, 2, 3], SamplingParams(max_tokens=2)))
    engine._clock.now = 3.0  # type: ignore[attr-defined]
    first = engine.step()
    engine._clock.now = 8.0  # type: ignore[attr-defined]
    assert [delta.queued_s for delta in [*first, *engine.step()]] == [3.0, 3.0]


def test_a_deadline_ends_a_request_that_runs_and_one_that_waits() -> None:
    engine = core(max_running=1)
    collected = {}
    for name, n in (("runs", 1), ("waits", 1)):
        request = Request(name, [5, 6], SamplingParams(n=n, ignore_eos=True, max_tokens=40), deadline=5.0)
        engine.submit(request)
        collected[name] = Collected(request)
    for _ in range(3):
        for delta in engine.step():
            collected[delta.request_id].add(delta)
    engine._clock.now = 5.0  # type: ignore[attr-defined]
    gather(engine, collected)
    reasons = {name: each.output.completions[0].finish_reason for name, each in collected.items()}
    assert reasons == {"runs": "deadline", "waits": "deadline"}
    assert len(collected["runs"].output.completions[0].token_ids) == 3
    assert engine.problems() == []


def test_an_abort_is_an_abort_in_every_state() -> None:
    engine = core(max_running=4, token_budget=5)
    engine.abort("unknown")
    shapes = {
        "waiting": GREEDY, "chunk": GREEDY, "running": GREEDY, "wide": SamplingParams(n=3),
        "best": SamplingParams(n=2, best_of=3), "beams": SamplingParams(n=2, beams=3),
        "early": SamplingParams(n=2, beams=3),
    }  # fmt: skip
    for steps, (name, params) in zip([0, 1, 3, 3, 4, 5, 1], shapes.items(), strict=True):
        params = replace(params, ignore_eos=True)
        request = Request(name, list(range(4, 14)), params)
        engine.submit(request)
        collected = Collected(request)
        for _ in range(steps):
            for delta in engine.step():
                collected.add(delta)
        engine.abort(name)
        engine.abort(name)
        assert engine.stats().n_free_blocks == engine.stats().n_blocks
        gather(engine, {name: collected})
        reasons = {completion.finish_reason for completion in collected.output.completions}
        assert reasons == {"abort"}
        engine.abort(name)
        assert not engine.has_work


WRONG = [
    (Request("one", [], GREEDY), "prompt: it holds no tokens"),
    (Request("one", [VOCAB_SIZE], GREEDY), "prompt: token id 24 is not in the vocabulary, expected 0 to 23"),
    (Request("one", [-1], GREEDY), "prompt: token id -1"),
    (Request("one", [True], GREEDY), "prompt: got true"),
    (Request("one", [5] * 60, GREEDY), "prompt: it has 60 tokens, .* 60 at most; shorten it to 59"),
    (Request("one", [5], SamplingParams(n=9)), "n: got 9, but at most 8"),
    (Request("one", [5], GREEDY, deadline=0.0), "deadline: got 0.0"),
    (Request("one", [5], SamplingParams(stop=("a",))), "no tokeniser"),
    (Request("one", [5], GREEDY, salt="\ud800"), "salt: got .* Unicode"),
    (Request("one", [5], GREEDY, salt=cast(str, 5)), "salt: got 5"),
    (Request("one", [5], cast(SamplingParams, {"n": 2})), "params: got"),
    (Request("", [5], GREEDY), "id: got ''"),
    (Request("one", [5], SamplingParams(beams=8, max_tokens=59)), "beams: 8 x 60 tokens may be needed"),
]


@pytest.mark.parametrize(("request_", "message"), WRONG)
def test_what_can_never_run_is_refused_with_a_reason(request_: Request, message: str) -> None:
    engine = core()
    with pytest.raises(UserError, match=message):
        engine.submit(request_)
    assert not engine.has_work


def test_a_full_queue_refuses_and_forgets() -> None:
    engine = core(max_waiting=1)
    engine.submit(Request("a", [5], GREEDY))
    with pytest.raises(UserError, match="id: 'a' is that of a request in progress"):
        engine.submit(Request("a", [5], GREEDY))
    with pytest.raises(Overloaded):
        engine.submit(Request("b", [5], GREEDY))
    engine.step()
    engine.submit(Request("b", [5], GREEDY))


@pytest.mark.parametrize("seed", range(6))
def test_any_traffic_has_right_tokens_and_gives_every_block_back(seed: int) -> None:
    """Arrivals, shared prefixes, aborts, deadlines, forks and beams in a pool that is too small for them."""
    draw = random.Random(seed)
    block_size = draw.choice([1, 2, 4])
    n_blocks = draw.randint(42, 56) // block_size
    engine = core(
        n_blocks, block_size, max_model_len=20, max_running=draw.randint(6, 8), token_budget=draw.randint(9, 24),
        prefix_cache=draw.random() < 0.7, reserve=0.0, seed=seed,
    )  # fmt: skip
    collected: dict[str, Collected] = {}
    ended: Counter[tuple[str, int]] = Counter()
    asked: dict[str, Request] = {}
    made = 0
    for turn in range(100_000):
        if made == 100 and not engine.has_work:
            break
        engine._clock.now += 1.0  # type: ignore[attr-defined]
        while made < 100 and draw.random() < 0.4:
            made += 1
            prompt = [draw.randrange(4, 6) for _ in range(draw.randint(1, 12))]
            shape = draw.choice(["plain", "plain", "n", "best", "beams", "scores"])
            most = draw.randint(1, 10)
            params = {
                "plain": SamplingParams(temperature=0.0, max_tokens=most),
                "n": SamplingParams(n=draw.randint(2, 4), max_tokens=most, seed=made),
                "best": SamplingParams(n=2, best_of=draw.randint(3, 4), max_tokens=most, seed=made),
                "beams": SamplingParams(n=2, beams=2, max_tokens=most),
                "scores": SamplingParams(temperature=0.0, max_tokens=most, prompt_logprobs=0, logprobs=0),
            }[shape]
            deadline = draw.choice([5.0, None, None, None])
            request = Request(str(made), prompt, params, priority=draw.randrange(3), deadline=deadline)
            engine.submit(request)
            collected[request.id] = Collected(request)
            asked[request.id] = request
        if draw.random() < 0.1:
            engine.abort(str(draw.randint(1, made + 1)))
        for delta in engine.step():
            take(collected, ended, delta)
        if turn % 10 == 0:
            assert engine.problems() == []
    assert all(each.finished for each in collected.values())
    assert engine.problems() == []
    assert engine.stats().n_free_blocks == n_blocks
    assert engine.stats().n_preempted > 0
    calm = core(n_blocks=200, max_model_len=20)
    for name, request in asked.items():
        completions = collected[name].output.completions
        given = [completion.token_ids for completion in completions]
        if request.params.greedy:
            longest = min(request.params.max_tokens or 0, 20 - len(request.prompt))
            expected = [greedy(request.prompt, longest, [EOS])]
            assert given[0] == expected[0][: len(given[0])]
        else:
            expected = tokens_of(calm, list(request.prompt), request.params)
        assert given == expected or any(each.finish_reason in ("abort", "deadline") for each in completions)
        if (scores := collected[name].output.prompt_logprobs) is not None:
            for place, each in enumerate(scores[1:], start=1):
                assert each is not None
                expected_row = logits_after(request.prompt[:place]).log_softmax(-1)
                assert each.logprob == pytest.approx(float(expected_row[request.prompt[place]]), abs=1e-5)
