"""The watching threads of several ranks, all in this process, with a real store between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from modelworks.config import UserError
from modelworks.parallel import Labels, World, joined
from modelworks.parallel.labels import VERDICT_FILE
from modelworks.parallel.watch import Watcher
from modelworks.parallel.world import interface_towards

Ranks = list[tuple[Labels, Watcher]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ranks]]:
    """start(n, timeout, files): labels and running watchers of n ranks. A rank's end is the end of its thread."""

    def end_thread(code: int) -> None:
        raise RuntimeError(code)  # which a watcher takes for the loss of its store

    monkeypatch.setattr(os, "_exit", end_thread)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started: Ranks = []

    def start(n: int, timeout: float, files: Path | None = None) -> Ranks:
        for rank in range(n):
            labels = Labels(rank)
            world = World(rank, n, rank, "127.0.0.1", store.port, attempt=0, hosts=False, files=files)
            started.append((labels, Watcher(world, labels, timeout)))
            started[-1][1].start()
        return started

    yield start
    for _, watcher in started:
        watcher.stop("done")


@pytest.mark.parametrize("shared", [True, False])
def test_one_verdict_ends_every_rank(
    start: Callable[..., Ranks], shared: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = start(3, 0.2, tmp_path if shared else None)
    waits = []  # kept, or they would end
    for rank, (labels, _) in enumerate(ranks):
        labels.step(7)
        labels.doing("evaluate")
        if rank != 1:
            waits.append(labels.waiting(labels.begin("all_reduce dp", (0, 1, 2))))
            waits[-1].__enter__()
    for _, watcher in ranks:
        watcher.join(60)
        assert not watcher.is_alive()
    said = (tmp_path / VERDICT_FILE).read_text() if shared else capsys.readouterr().err
    assert said.count("rank 1 never entered all_reduce dp #1 of step 7; last in evaluate (step 7)") == 1


@pytest.mark.slow
def test_the_rank_that_failed_or_fell_silent_is_named(start: Callable[..., Ranks]) -> None:
    (_, survivor), (labels, failing), (silent_labels, silent) = start(3, 60.0)
    silent_labels.step(3)
    silent_labels.doing("save")
    before = silent._beat
    while silent._beat < before + 2:  # until it has said so
        silent.join(0.1)
    silent._ended.set()  # as SIGKILL would: it says nothing more
    silent.join()
    assert survivor.who_is_lost() == "rank 2 was lost (killed, or its machine is); it last reported: step 3: save"
    labels.step(4)
    failing.stop("ValueError: on purpose")
    assert survivor.who_is_lost() == "rank 1 failed: ValueError: on purpose; it was last doing: step 4: start"


def test_a_process_joins_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "MODELWORKS_RANK_FILES"):
        monkeypatch.delenv(name, raising=False)
    assert joined() is None
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(UserError, match="has RANK but not WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"):
        joined()
    for name, value in {"WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert joined() == World(3, 4, 1, "host", 29500, attempt=2, hosts=False, files=None)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match="RANK=3 with WORLD_SIZE=3"):
        joined()
    monkeypatch.setenv("WORLD_SIZE", "three")
    with pytest.raises(UserError, match="WORLD_SIZE=three, expected a whole number"):
        joined()


def test_the_loopback_reaches_itself_and_nowhere_is_told() -> None:
    assert interface_towards("127.0.0.1") in ("lo", "lo0")
    assert interface_towards("no-such-host.invalid") is None
