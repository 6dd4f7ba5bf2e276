"""Under `torchrun --max-restarts` a run that loses processes goes on by itself, also with fewer of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
from run_files import series

from modelworks.config import dump_yaml, load_run_config
from modelworks.layout import Layout
from modelworks.records import read_records
from modelworks.train import train

pytestmark = pytest.mark.slow
STEPS = 40
SETTINGS = [f"train.duration={STEPS} steps", "train.global_batch=8", "train.log_every=5", "checkpoint.every=5 steps",
            "evaluate.every=1000 steps", "evaluate.max_tokens=500", "train.micro_batch=1"]  # fmt: skip


@pytest.fixture(scope="module")
def place(tiny_config: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a configuration."""
    directory = tmp_path_factory.mktemp("elastic")
    (directory / "tiny.yaml").write_text(dump_yaml(tiny_config(*SETTINGS)))
    return directory


@pytest.fixture(scope="module")
def unbroken(tiny_config: Any, tiny_machine: Any, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    """Losses in one process that nobody disturbed."""
    run_dir = tmp_path_factory.mktemp("unbroken") / "run"
    train(tiny_config(*SETTINGS), run_dir, machine=tiny_machine)
    return series(run_dir, "train/loss")


@contextmanager
def agents(
    place: Path, count: int, *words: str, ranks_each: int = 2
) -> Iterator[tuple[list[subprocess.Popen[str]], IO[str]]]:
    """torchrun so many times, and what all of its processes print; none is left behind."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    reader, writer = os.pipe()
    processes: list[subprocess.Popen[str]] = []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        for number in range(count):
            quick = f"is_host={number == 0},last_call_timeout=10,keep_alive_interval=2,keep_alive_max_attempt=3"
            command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes=1:{count}"]
            command += [
                f"--nproc-per-node={ranks_each}",
                "--max-restarts=2",
                "--rdzv-backend=c10d",
                "--rdzv-id=test",
                f"--rdzv-conf={quick}",
            ]
            command += [f"--rdzv-endpoint=127.0.0.1:{port}", "-m", "modelworks", "train", "tiny.yaml", "--resume"]
            with (place / f"agent-{number}.txt").open("w") as errors:
                process = subprocess.Popen(
                    [*command, *words], cwd=place, env=environment, stdout=writer, stderr=errors, text=True
                )
            processes.append(process)
        os.close(writer)
        with os.fdopen(reader) as output:
            yield processes, output
    finally:
        for process in processes:
            kill(process)


def kill(agent: subprocess.Popen[str]) -> None:
    """And its ranks."""
    for process in [*ranks_of(agent), agent]:
        process.kill()
    agent.wait()


def ranks_of(agent: subprocess.Popen[str]) -> list[psutil.Process]:
    try:
        return [child for child in psutil.Process(agent.pid).children(recursive=True) if "train" in child.cmdline()]
    except psutil.NoSuchProcess:
        return []


def until_step(output: IO[str], number: int) -> None:
    for line in output:
        if line.startswith(f"step {number}/"):
            return
    raise AssertionError("the run ended before that step")


def events(run_dir: Path, name: str) -> list[str]:
    return [str(record.value) for record in read_records(run_dir / "records.jsonl") if record.name == name]


def assert_close(ours: list[tuple[int, float]], theirs: list[tuple[int, float]]) -> None:
    assert [step for step, _ in ours] == [step for step, _ in theirs]
    assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in theirs], rel=1e-4)


def test_a_killed_rank_is_started_again_and_the_run_goes_on(place: Path, unbroken: list[tuple[int, float]]) -> None:
    with agents(place, 1, "parallel.dp_replicate=2", "name=restarted") as ([agent], output):
        until_step(output, 15)
        ranks = ranks_of(agent)
        assert len(ranks) == 2
        ranks[1].kill()
        said = output.read()
        assert agent.wait(60) == 0, (place / "agent-0.txt").read_text()
    assert "resuming from runs/restarted/checkpoints/step-000000" in said
    assert_close(series(place / "runs" / "restarted", "train/loss"), unbroken)


def test_with_half_of_its_processes_the_same_run_goes_on(place: Path, unbroken: list[tuple[int, float]]) -> None:
    """Four ranks on two machines, as far as torchrun can tell; one machine dies in the middle."""
    layout = ["parallel.dp_shard=4", "parallel.zero=2", "parallel.elastic=true"]
    with agents(place, 2, *layout, "name=shrunk") as (both, output):
        until_step(output, 15)
        kill(both[1])
        said = output.read()
        assert both[0].wait(60) == 0, (place / "agent-0.txt").read_text()
    run_dir = place / "runs" / "shrunk"
    assert "elastic: dp_shard=4 zero=2 needs 4 processes and there are 2: going on with dp_shard=2 zero=2; the " in said
    assert_close(series(run_dir, "train/loss"), unbroken)
    assert Layout.of(load_run_config(run_dir / "config.yaml").parallel).world_size == 2
    assert any(text.startswith("changed on resume: parallel.dp_shard: 4 -> 2") for text in events(run_dir, "remark"))


def test_a_process_that_no_layout_can_use_leaves(place: Path, unbroken: list[tuple[int, float]]) -> None:
    """Three processes for eight rows: two of them share the rows."""
    more = ["parallel.dp_replicate=4", "parallel.elastic=true", "name=three"]
    with agents(place, 1, *more, "train.duration=4 steps", ranks_each=3) as ([agent], output):
        said = output.read()
        assert agent.wait(60) == 0, (place / "agent-0.txt").read_text()
    assert "there are 3: going on with dp_replicate=2 (1 of them idle); the global batch stays 8" in said
    assert [step for step, _ in series(place / "runs" / "three", "train/loss")] == [1, 2, 3, 4]
