"""The engine's process: its end is noticed, told and healed; told to end, the server finishes what it has begun."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import fake_engine
import httpx2
import pytest
from serving import Serving, serving

from modelworks.config import UserError
from modelworks.serve.api import ServerOptions, Service, bind, serve
from modelworks.serve.engine_client import EngineClient, EngineGone
from modelworks.serve.engine_loop import engine_process
from modelworks.serve.messages import Failed
from modelworks.serve.params import SamplingParams
from modelworks.serve.request import Delta, Request
from modelworks.serve.served_model import ServedModel
from modelworks.serve.supervisor import RESTARTS, Supervisor
from modelworks.serve.waiting import Overloaded


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(fake_engine.build_fake, process=True) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Serving) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=30) as client:
        yield client


def running_again(server: Serving, n_restarts: int) -> None:
    def condition() -> bool:
        health = server.service.engine.health()
        return health.state == "running" and health.n_restarts == n_restarts

    server.wait_for(condition, 60)


def test_a_killed_engine_is_noticed_and_replaced(
    server: Serving, http: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the front answers while it waits for the process to be gone."""
    process, answered, waits = server.service.engine._process, threading.Event(), list[bool]()
    assert process is not None
    join = process.join

    def watched_join(timeout: float | None = None) -> None:
        waits.append(answered.wait(5))
        join(timeout)

    monkeypatch.setattr(process, "join", watched_join)
    before = server.service.engine.health()
    assert before.pid is not None
    assert before.pid != os.getpid()
    with http.stream("POST", "/v1/completions", json={"prompt": "!slow", "max_tokens": 250, "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        os.kill(before.pid, signal.SIGKILL)
        told = [line for line in lines if line]
    assert '"engine_unavailable"' in told[-2], "who was served is told"
    assert told[-1] == "data: [DONE]"
    assert http.get("/health").json()["error"].startswith("the engine's process ended")
    answered.set()
    server.wait_for(lambda: "(signal SIGKILL)" in (server.service.engine.health().error or ""))
    running_again(server, before.n_restarts + 1)
    assert waits == [True]
    assert server.service.engine.health().pid != before.pid
    assert http.get("/health").status_code == 200
    assert http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 2}).json()["choices"][0]["text"] == "ab"


def test_a_defect_of_the_engine_ends_its_process_and_no_more(server: Serving, http: httpx2.Client) -> None:
    n_restarts = server.service.engine.health().n_restarts
    answer = http.post("/v1/completions", json={"prompt": "!raise"})
    assert answer.status_code == 503
    assert "RuntimeError: a defect" in answer.json()["error"]["message"]
    assert int(answer.headers["Retry-After"]) >= 1
    running_again(server, n_restarts + 1)
    counted = [line for line in http.get("/metrics").text.splitlines() if line.startswith("vllm:generation_tokens_t")]
    assert float(counted[0].split()[-1]) > 0, "counters go on over a restart"


def test_a_defect_that_a_request_meets_as_it_is_submitted_ends_it_alone(server: Serving, http: httpx2.Client) -> None:
    before = server.service.engine.health()
    answer = http.post("/v1/completions", json={"prompt": ["!submit", "ab"]})
    assert answer.status_code == 500
    assert "RuntimeError: a defect in submit" in answer.json()["error"]["message"]
    assert http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 2}).status_code == 200
    assert server.service.engine.health().pid == before.pid


def test_one_request_of_several_that_is_refused_after_others_have_begun() -> None:
    """The answer is the refusal, not what there is of the others and a broken end."""

    async def work() -> None:
        ours, theirs = multiprocessing.Pipe()
        stream = EngineClient(ours).open([Request(name, [1], SamplingParams()) for name in ("one", "two")])
        stream.accept("one")
        stream.put(Delta("one", 0, [1], "a"))
        stream.fail(Overloaded("full", 1.0), "two")
        with pytest.raises(Overloaded):
            await stream.accepted()
        theirs.close()

    asyncio.run(work())


def test_of_two_servers_on_one_port_the_second_to_listen_says_so() -> None:
    """Both could bind it, as long as neither listened."""

    async def work() -> None:
        first = bind("127.0.0.1", 0)
        second = bind("127.0.0.1", first.getsockname()[1])
        first.listen()
        engine = Supervisor(fake_engine.build_fake, process=False)
        service = Service(await engine.start(), engine, ServerOptions())
        with first, second, pytest.raises(UserError, match=r"--port: \d+ is in use on 127.0.0.1"):
            await serve(service, second)

    asyncio.run(work())


def test_requests_in_between_are_told_to_come_back() -> None:
    with (
        serving(fake_engine.build_fake, process=True, first_pause=30.0) as server,
        httpx2.Client(base_url=server.url, timeout=30) as http,
    ):
        assert http.post("/v1/completions", json={"prompt": "!die"}).status_code == 503
        assert http.get("/health").status_code == 503
        assert http.get("/health").json()["engine"] == "restarting"
        assert http.get("/ready").status_code == 503
        answer = http.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 503
        assert "Retry-After" in answer.headers


def test_an_engine_that_cannot_start_again_is_given_up(tmp_path: Path) -> None:
    build = partial(fake_engine.build_once, str(tmp_path / "marker"))
    with serving(build, process=True) as server:
        with httpx2.Client(base_url=server.url, timeout=30) as http:
            assert http.post("/v1/completions", json={"prompt": "!die"}).status_code == 503
        server.thread.join(60)
        assert not server.thread.is_alive(), "the server ends with it"
        assert server.service.engine.health().state == "failed"
        assert server.service.engine.health().n_restarts == RESTARTS


def test_what_is_wrong_at_the_start_is_the_users() -> None:
    with pytest.raises(UserError, match="no such run"), serving(fake_engine.build_wrong, process=True):
        pass


class Hopeless(fake_engine.FakeEngine):
    @property
    def has_work(self) -> bool:
        raise RuntimeError("a defect at once")


def build_hopeless() -> tuple[Hopeless, ServedModel]:
    return Hopeless(), fake_engine.served_model()


def test_an_engine_that_ends_before_anybody_saw_it_ready_has_not_started() -> None:
    async def work() -> None:
        others = set(threading.enumerate())
        starting = asyncio.ensure_future(Supervisor(build_hopeless, process=False).start())
        await asyncio.sleep(0)
        for thread in set(threading.enumerate()) - others:  # all that it said waits to be looked at, its end too
            if thread.name in ("engine", "engine-read"):
                thread.join()
        with pytest.raises(EngineGone, match="as soon as it was ready: RuntimeError: a defect at once"):
            await starting

    asyncio.run(work())


def test_an_engine_without_a_front_ends() -> None:
    """The pipe closed, as when the front is killed: no orphan stays."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=engine_process, args=(theirs, fake_engine.build_fake))
    process.start()
    theirs.close()
    ours.recv()  # it is ready
    ours.close()
    process.join(20)
    assert process.exitcode == 0


def test_what_an_engine_says_when_its_front_has_left_is_let_go() -> None:
    ours, theirs = multiprocessing.Pipe()

    async def front() -> set[threading.Thread]:
        others = set(threading.enumerate())
        EngineClient(ours)
        return set(threading.enumerate()) - others

    threads = asyncio.run(front())
    theirs.send(Failed("too late", by_user=False))
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_an_engine_that_is_stuck_keeps_nobody_waiting() -> None:
    """The front answers where the engine does not, `stall` seconds after the deadline."""
    body = {"prompt": "!hang", "max_tokens": 2, "timeout": 0.05}
    with serving(fake_engine.build_fake, stall=0.05) as server, httpx2.Client(base_url=server.url, timeout=30) as http:
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 504
        assert answer.json()["error"]["message"] == "the engine has not ended the request 0.05 s after its deadline"
        server.wait_for(lambda: not server.service.engine.n_requests)


def test_silence_is_no_health() -> None:
    with serving(fake_engine.build_fake, stall=0.1) as server, httpx2.Client(base_url=server.url, timeout=30) as http:
        answers: list[int] = []
        asking = threading.Thread(
            target=lambda: answers.append(
                http.post("/v1/completions", json={"prompt": "!hang", "max_tokens": 3}).status_code
            )
        )
        asking.start()
        server.wait_for(lambda: server.service.engine.n_requests == 1)
        server.wait_for(lambda: not server.service.alive)
        assert http.get("/health").status_code == 503
        assert http.get("/ready").status_code == 503
        asking.join(20)
        assert answers == [200], "slow is not dead"


def test_draining_finishes_what_runs_and_takes_nothing_new() -> None:
    with (
        serving(fake_engine.build_fake, process=True) as server,
        httpx2.Client(base_url=server.url, timeout=30) as http,
    ):
        body = {"prompt": "!slow", "max_tokens": 20, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.call(server.server.drain)
            assert http.get("/ready").status_code == 503
            refused = http.post("/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert http.get("/health").status_code == 200, "it is alive"
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2], "it was finished"
        server.thread.join(20)
        assert not server.thread.is_alive()


def test_after_the_grace_requests_are_aborted() -> None:
    with (
        serving(fake_engine.build_fake, grace=0.1) as server,
        httpx2.Client(base_url=server.url, timeout=30) as http,
    ):
        body = {"prompt": "!slow", "max_tokens": 250, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.call(server.server.drain)
            rest = [line for line in lines if line]
        assert '"shutting_down"' in rest[-2]
        server.thread.join(20)
        assert not server.thread.is_alive()


def test_a_thread_has_ended_when_its_supervisor_has_stopped() -> None:
    """Also in the middle of a long step: an interpreter that ends then aborts within torch."""

    async def work() -> None:
        supervisor = Supervisor(fake_engine.build_fake, process=False)
        await supervisor.start()
        prompt = list(fake_engine.byte_tokenizer().encode("!hang"))
        stream = supervisor.open([Request("one", prompt, SamplingParams(max_tokens=50))])
        await stream.accepted()
        await supervisor.stop()

    before = set(threading.enumerate())
    asyncio.run(work())
    assert not [thread for thread in threading.enumerate() if thread.name == "engine" and thread not in before]
