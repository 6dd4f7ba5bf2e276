"""Who is named when nobody goes on, and what labels survive: without processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelworks.parallel.child import _killed
from modelworks.parallel.failures import (
    _oom_kills,
    explain_out_of_memory,
    is_lost_connection,
    is_out_of_memory,
    kernel_kills,
)
from modelworks.parallel.hangs import State, explain_hang, state_of
from modelworks.parallel.labels import Labels, Operation, create_slots, read_slot

WORLD = (0, 1, 2, 3)


class Rank:
    """A rank that does things and then waits or does not."""

    def __init__(self, number: int, step: int = 12) -> None:
        self.labels = Labels(number)
        self.labels.step(step)
        self.number = number
        self.ended: str | None = None

    def passed(self, name: str, ranks: tuple[int, ...] = WORLD) -> Rank:
        with self.labels.waiting(self.labels.begin(name, ranks)):
            pass
        return self

    def does(self, text: str) -> Rank:
        self.labels.doing(text)
        return self

    def waits(self, name: str, ranks: tuple[int, ...] = WORLD, awaits: tuple[int, ...] = ()) -> Rank:
        self.wait = self.labels.waiting(self.labels.begin(name, ranks, awaits))
        self.wait.__enter__()
        return self


def explain(asking: int, *ranks: Rank, silent: tuple[int, ...] = ()) -> str | None:
    """From what the ranks say, as it goes through the store."""
    states = [State.from_json(state_of(rank.labels, rank.number, 1, rank.ended).to_json()) for rank in ranks]
    return explain_hang(asking, {state.rank: state for state in states}, silent)


def test_those_that_never_came_are_named_with_what_they_do() -> None:
    ranks = [Rank(0).waits("all_reduce dp"), Rank(1).does("data"), Rank(2).waits("all_reduce dp"), Rank(3).does("data")]
    assert explain(0, *ranks) == "ranks 1, 3 never entered all_reduce dp #1 of step 12; last in data (step 12)"
    ranks[3].does("evaluate")
    assert explain(2, *ranks) == (
        "ranks 1, 3 never entered all_reduce dp #1 of step 12; "
        "rank 1: last in data (step 12); rank 3: last in evaluate (step 12)"
    )


def test_a_rank_that_waits_for_nobody_accuses_nobody() -> None:
    ranks = [Rank(number).passed("all_reduce dp").does("evaluate") for number in WORLD]
    assert all(explain(number, *ranks) is None for number in WORLD)


def test_the_search_goes_through_those_that_wait_themselves() -> None:
    """Rank 0 waits for 1, which waits in its own pair for 2, which is busy."""
    ranks = [
        Rank(0).waits("all_reduce tp", (0, 1)),
        Rank(1).waits("receive pp from rank 2", (1, 2), awaits=(2,)),
        Rank(2).passed("all_gather dp", (2, 3)).does("save"),
    ]
    words = "rank 2 never answered receive pp from rank 2 of step 12 of rank 1; last in save (step 12)"
    assert explain(0, *ranks) == explain(1, *ranks) == words


def test_different_operations_at_one_place_are_told() -> None:
    ranks = [Rank(number).passed("barrier world") for number in WORLD]
    for rank in ranks:
        rank.waits("all_gather shard" if rank.number == 2 else "all_reduce dp")
    assert explain(0, *ranks) == (
        "ranks do different things at operation #2 of ranks 0, 1, 2, 3: "
        "ranks 0, 1, 3 in all_reduce dp; rank 2 in all_gather shard"
    )


def test_ranks_that_wait_for_each_other() -> None:
    """Each has entered the operation that the other has yet to enter."""
    ranks = [Rank(0).waits("send pp to rank 1", (0, 1), awaits=(1,)), Rank(1).waits("all_reduce tp", (0, 1))]
    assert explain(0, *ranks) == (
        "ranks wait for each other: rank 0 in send pp to rank 1 of step 12 for rank 1, "
        "rank 1 in all_reduce tp #1 of step 12 for rank 0"
    )


def test_gone_silent_and_absent_ranks_are_told_apart() -> None:
    waiting, ended, silent = Rank(0).waits("all_reduce dp"), Rank(1).does("data"), Rank(2).does("data")
    ended.ended = "ValueError: on purpose"
    told = explain(0, waiting, ended, silent, silent=(2,))
    assert told == (
        "ranks 1, 2, 3 never entered all_reduce dp #1 of step 12; "
        "rank 1: ended (ValueError: on purpose), last in data (step 12); "
        "rank 2: reports no more, last in data (step 12); rank 3: never reported"
    )


def test_all_came_and_it_does_not_end() -> None:
    told = explain(0, *(Rank(number).waits("all_reduce dp") for number in WORLD))
    assert told is not None
    assert told.startswith("all ranks entered all_reduce dp #1 of step 12 and it does not end")


@given(absent=st.sets(st.sampled_from(range(1, 6))), earlier=st.integers(0, 3))
def test_exactly_the_absent_are_named(absent: set[int], earlier: int) -> None:
    everyone = tuple(range(6))
    ranks = [Rank(number) for number in everyone]
    for rank in ranks:
        for _ in range(earlier):
            rank.passed("all_reduce dp", everyone)
        (rank.does if rank.number in absent else lambda text, rank=rank: rank.waits("all_reduce dp", everyone))("data")
    told = explain(0, *ranks)
    assert told is not None
    if absent:
        named = told.partition(" never entered")[0].removeprefix("ranks").removeprefix("rank")
        assert {int(word) for word in named.split(",")} == absent
        assert f"#{earlier + 1} of step" in told
    else:
        assert told.startswith("all ranks entered")


def test_an_operation_on_a_device_is_awaited_until_the_device_has_done_it() -> None:
    labels, done = Labels(), [False]
    operation = labels.begin("all_reduce dp", WORLD)
    with labels.waiting(operation):
        assert labels.waited() is not None
    assert labels.waited() is None
    labels.unfinished(operation, lambda: done[0])
    waited = labels.waited()
    assert waited is not None
    assert waited[0] == Operation("all_reduce dp", WORLD, 1)
    done[0] = True
    assert labels.waited() is None


def _label_and_die(file: Path) -> None:
    labels = Labels(1, file)
    labels.step(12)
    labels.begin("all_reduce dp", WORLD)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_label_survives_sigkill(tmp_path: Path) -> None:
    file = tmp_path / "labels"
    create_slots(file, 3)
    process = multiprocessing.get_context("fork").Process(target=_label_and_die, args=(file,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert [read_slot(file, rank) for rank in range(3)] == ["", "step 12: all_reduce dp #1", ""]


@given(texts=st.lists(st.text(max_size=400), min_size=1, max_size=4))
def test_the_last_label_is_read_whole_or_cut(texts: list[str]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "labels"
        create_slots(file, 2)
        first, second = Labels(0, file), Labels(1, file)
        for text in texts:
            first.doing(text)
        assert read_slot(file, 0) == texts[-1].encode()[:254].decode("utf-8", "replace")
        assert read_slot(file, 1) == "start" == str(second)


def _failure(function: object, *arguments: object) -> Exception:
    try:
        function(*arguments)  # type: ignore[operator]
    except Exception as error:
        return error
    raise AssertionError("did not fail")


def test_out_of_memory_is_recognised_and_explained() -> None:
    """The allocator's own words: no machine has room for 2^60 bytes."""
    real = _failure(
        torch.empty,
        2**60,
    )
    assert isinstance(real, RuntimeError)
    for error in (real, MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")):
        assert is_out_of_memory(error)
        assert not is_lost_connection(error)
    assert not is_out_of_memory(ValueError("out of memory"))
    wrapped = _failure(_wrap, real)
    assert is_out_of_memory(wrapped)
    text = explain_out_of_memory(
        wrapped, 3, {"parameters": 2**30, "activations": 5 * 2**30}, ["dp_shard=4, zero=3", "tp=2"]
    )
    lines = text.splitlines()
    assert lines[0].startswith("rank 3 ran out of memory: ")
    assert "DefaultCPUAllocator" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == [
        "activations",
        "parameters",
        "total",
        "what",
        "dp_shard=4,",
        "tp=2",
    ]


def test_a_kill_for_want_of_memory_is_guessed(tmp_path: Path) -> None:
    new, old = tmp_path / "memory.events", tmp_path / "memory.oom_control"
    new.write_text("low 0\nmax 7\noom 3\noom_kill 2\noom_group_kill 0\n")
    old.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    assert [_oom_kills(file) for file in (new, old, tmp_path / "none")] == [2, 4, 0]
    assert kernel_kills() >= 0
    assert "perhaps out of memory" in _killed(signal.SIGKILL, memory_ran_out=True)
    assert "memory" not in _killed(signal.SIGKILL, memory_ran_out=False)
    assert "memory" not in _killed(signal.SIGSEGV, memory_ran_out=True)


def _wrap(error: Exception) -> None:
    raise ValueError("training failed") from error


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:9"), True),
        (torch.distributed.DistBackendError("anything"), True),
        (ConnectionResetError("Connection reset by peer"), True),
        (ValueError("Connection closed by peer"), False),
        (RuntimeError("shape '[2]' is invalid"), False),
    ],
)
def test_the_loss_of_another_rank_is_told_from_an_own_failure(error: Exception, lost: bool) -> None:
    assert is_lost_connection(error) == is_lost_connection(_failure(_wrap, error)) == lost
