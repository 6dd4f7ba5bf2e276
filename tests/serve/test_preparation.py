"""Structures are compiled beside the steps: others get their tokens meanwhile, and who waits can still end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from multiprocessing import Pipe

import pytest

from modelworks.checkpoint import LoadedModel
from modelworks.config import ModelConfig, TokenizerTraining, UserError
from modelworks.data.tokenizers.training import train_tokenizer
from modelworks.models import Transformer, initialize
from modelworks.serve import AsyncEngine, Collected, Delta, Engine, EngineOptions, Request, SamplingParams, Structure
from modelworks.serve.engine_loop import run_engine
from modelworks.serve.messages import Abort, News, Stop, Submit
from modelworks.serve.served_model import ServedModel
from modelworks.serve.structured import Compiler

PLAIN = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
FORMED = SamplingParams(temperature=0.0, structure=Structure.regex("ab{3}"), max_tokens=9)
TWO_WRONG = SamplingParams(structure=Structure.json_schema({"type": "strin"}), n=2)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    tokenizer = train_tokenizer(["The quick brown fox\n"] * 20, TokenizerTraining(vocab_size=270))
    config = ModelConfig(n_layers=1, d_model=16, n_heads=2, vocab_size=272, max_seq_len=64, init_std=0.3)
    model = Transformer(config)
    initialize(model, seed=0)
    return LoadedModel(model.eval(), tokenizer, config, "a tiny model")


@pytest.fixture
def engine(loaded: LoadedModel) -> Iterator[Engine]:
    with Engine(loaded, EngineOptions(kv_cache_bytes=1 << 18, block_size=4, native="off", max_waiting=2)) as built:
        yield built
        assert built.problems() == []


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is compiled before it is opened."""
    opened, compile_ = threading.Event(), Compiler._compile

    def when_opened(self: Compiler, structure: Structure) -> object:
        assert opened.wait(20), "nobody opened the gate: a step waited for it"
        return compile_(self, structure)

    monkeypatch.setattr(Compiler, "_compile", when_opened)
    yield opened
    opened.set()


def finished(engine: Engine, *requests: Request) -> list[Collected]:
    collected = {request.id: Collected(request) for request in requests}
    for _ in range(10_000):
        if all(each.finished for each in collected.values()):
            break
        for delta in engine.step():
            collected[delta.request_id].add(delta)
    return list(collected.values())


def test_others_get_their_tokens_while_a_structure_is_compiled(engine: Engine, gate: threading.Event) -> None:
    formed, plain = Request("formed", [5], FORMED, priority=-1), Request("plain", [5, 6], PLAIN)
    engine.submit(formed)
    engine.submit(plain)
    (others,) = finished(engine, plain)
    assert len(others.output.completions[0].token_ids) == 6
    assert list(engine.preparing) == ["formed"]
    assert engine.has_work
    assert engine.step() == []
    gate.set()
    (own,) = finished(engine, formed)
    assert own.output.completions[0].text == "abbb"
    assert not engine.preparing
    again = Request("again", [5], FORMED)  # known now: it need not wait
    engine.submit(again)
    assert not engine.preparing
    assert finished(engine, again)[0].output.completions[0].text == "abbb"


def test_a_request_that_is_prepared_can_be_aborted_can_expire_and_counts(engine: Engine, gate: threading.Event) -> None:
    aborted, late = Request("aborted", [5], FORMED), Request("late", [5], TWO_WRONG, deadline=1e-6)
    engine.submit(aborted)
    engine.submit(late)
    with pytest.raises(Exception, match="2 requests are waiting"):
        engine.submit(Request("third", [5], PLAIN))
    engine.abort("aborted")
    first, second = finished(engine, aborted, late)
    assert [each.finish_reason for each in first.output.completions] == ["abort"]
    assert [each.finish_reason for each in second.output.completions] == ["deadline"] * 2
    assert not engine.preparing
    assert not engine.has_work


def test_after_warming_up_the_vocabulary_is_not_read_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.warm_up()
    monkeypatch.delattr(Compiler, "__init__")  # nothing can make another
    formed = Request("formed", [5], FORMED)
    engine.submit(formed)
    assert finished(engine, formed)[0].output.completions[0].text == "abbb"


def test_a_wrong_structure_is_refused_alone_with_what_is_wrong(engine: Engine) -> None:
    plain, wrong = Request("plain", [5], PLAIN), Request("wrong", [5], TWO_WRONG)
    engine.submit(wrong)
    engine.submit(plain)
    good, bad = finished(engine, plain, wrong)
    assert good.output.completions[0].finish_reason == "length"
    for completion in bad.output.completions:
        assert completion.finish_reason == "error"
        assert "structure: the json_schema cannot be used: Invalid type" in (completion.error or "")
    with pytest.raises(UserError, match="Invalid type"):  # by now it is known
        engine.submit(wrong)
    with pytest.raises(UserError, match="unclosed group"):
        engine.generate([[5]], SamplingParams(structure=Structure.regex("(a")))


def test_a_stream_raises_what_is_wrong_with_its_structure(loaded: LoadedModel) -> None:
    async def gathered(params: SamplingParams) -> list[Delta]:
        return [delta async for delta in served.stream(Request("one", [5], params))]

    served = AsyncEngine(Engine(loaded, EngineOptions(kv_cache_bytes=1 << 18, block_size=4, native="off")))
    with pytest.raises(UserError, match=r"^structure: the json_schema cannot be used: Invalid type"):
        asyncio.run(gathered(TWO_WRONG))
    assert "".join(delta.text for delta in asyncio.run(gathered(FORMED))) == "abbb"
    served.close()


def test_over_the_pipe_a_request_is_accepted_or_refused_once_its_structure_is_known(
    engine: Engine, gate: threading.Event
) -> None:
    assert engine.tokenizer is not None
    model = ServedModel("tiny", 272, 64, engine.tokenizer)
    here, there = Pipe()
    thread = threading.Thread(target=run_engine, args=(there, lambda: (engine, model)), daemon=True)
    thread.start()
    here.recv()  # Ready
    here.send([Submit(Request("formed", [5], FORMED)), Submit(Request("gone", [5], FORMED))])
    here.send([Abort("gone")])
    told = News()

    def listen_until(request_id: str) -> None:
        while not any(delta.last and delta.request_id == request_id for delta in told.deltas) and not told.refused:
            assert here.poll(20)
            news = here.recv()
            told.accepted += news.accepted
            told.refused += news.refused
            told.deltas += news.deltas

    listen_until("gone")
    assert (told.accepted, told.refused) == (["gone"], [])
    gate.set()
    listen_until("formed")
    here.send([Submit(Request("wrong", [5], TWO_WRONG))])
    listen_until("wrong")
    assert told.accepted == ["gone", "formed"]
    assert [(each.request_id, each.retry_after) for each in told.refused] == [("wrong", None)]
    assert told.refused[0].message.startswith("structure: the json_schema cannot be used: Invalid type")
    assert {delta.request_id for delta in told.deltas} == {"gone", "formed"}
    here.send([Stop()])
    thread.join(20)
