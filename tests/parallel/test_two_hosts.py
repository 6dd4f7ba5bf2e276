"""A run over two machines, as far as the network can tell: two network namespaces joined by a cable, each with an
address of its own, and torchrun in both."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import two_hosts_job

from modelworks.config import dump_yaml
from modelworks.records import read_records

pytestmark = pytest.mark.slow
ADDRESSES = ("10.231.77.1", "10.231.77.2")
PORT = 29400  # in a namespace of its own, where nothing else listens


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[str, str]]:
    """Names of two network namespaces that reach each other."""
    if shutil.which("ip") is None:
        pytest.skip("needs the program `ip` (iproute2)")
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    names = (f"mw{os.getpid()}a", f"mw{os.getpid()}b")
    try:
        made = [_ip("netns", "add", name) for name in names]
        if any(made):
            pytest.skip(f"network namespaces cannot be made here: {next(filter(None, made))}")
        cable = ("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1])
        refused = _ip(*cable, "netns", names[1])
        if refused:
            pytest.skip(f"a veth pair cannot be made here: {refused}")
        for name, address in zip(names, ADDRESSES, strict=True):
            for words in (f"address add {address}/24 dev {name}", f"link set {name} up", "link set lo up"):
                assert not _ip("-n", name, *words.split())
        yield names
    finally:
        for name in names:
            _ip("netns", "delete", name)


def test_ranks_of_two_hosts_join(hosts: tuple[str, str], tmp_path: Path) -> None:
    codes, told = _run(hosts, tmp_path, ranks_each=2)
    assert codes == [0, 0]
    assert [told[rank]["size"] for rank in range(4)] == [4] * 4
    assert all(told[rank]["agreed"] for rank in range(4))
    assert sum(told[rank]["first"] for rank in range(4)) == 1
    # dp_shard is the slow axis: ranks {0, 1} and {2, 3} are tensor parallel, {0, 2} and {1, 3} hold shards
    assert [told[rank]["sums"] for rank in range(4)] == [
        {"world": 10.0, "tp": tensor, "dp_shard": shard} for tensor in (3.0, 7.0) for shard in (4.0, 6.0)
    ]
    assert {told[rank]["interface"] for rank in range(4)} == set(hosts)


def test_a_rank_that_dies_on_one_host_is_named_on_the_other(hosts: tuple[str, str], tmp_path: Path) -> None:
    codes, told = _run(hosts, tmp_path, "die", ranks_each=1)
    assert all(codes)
    [(_, words)] = told.items()
    assert "was lost (killed, or its machine is); it last reported: step 12: all_reduce world" in words


def test_modelworks_train_over_two_hosts(
    hosts: tuple[str, str], tiny_config: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Both see the same files. Rank 0 writes and speaks; the denominator of MFU counts each machine."""
    layout = ["parallel.dp_replicate=2", "parallel.tp=2", "train.duration=3 steps"]
    (tmp_path / "tiny.yaml").write_text(dump_yaml(tiny_config(*layout)))
    program = ["-m", "modelworks", "train", str(tmp_path / "tiny.yaml"), "--runs-dir", str(tmp_path), "--json"]
    assert _torchrun(hosts, program, ranks_each=2) == [0, 0]
    assert capfd.readouterr().out.count('"train_loss"') == 1
    steps = [record.step for record in read_records(tmp_path / "tiny" / "records.jsonl") if record.name == "train/loss"]
    assert steps == [1, 2, 3]
    assert (tmp_path / "tiny" / "summary.json").exists()


def _ip(*words: str) -> str:
    """Runs `ip`; what it complained about, empty where it did as told."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    return done.stderr.strip() or "refused" if done.returncode else ""


def _run(hosts: tuple[str, str], directory: Path, *words: str, ranks_each: int) -> tuple[list[int], dict[int, Any]]:
    """The job under torchrun on both hosts: their exit codes, and what the ranks wrote."""
    codes = _torchrun(hosts, [two_hosts_job.__file__, str(directory), *words], ranks_each)
    return codes, {int(file.stem): json.loads(file.read_text()) for file in directory.glob("*.json")}


def _torchrun(hosts: tuple[str, str], program: list[str], ranks_each: int) -> list[int]:
    """What torchrun on each host ended with."""
    processes: list[subprocess.Popen[bytes]] = []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with _ended(processes):
        for host, address in zip(hosts, ADDRESSES, strict=True):
            command = ["ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
            command += [
                f"--nproc-per-node={ranks_each}",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={ADDRESSES[0]}:{PORT}",
            ]
            command += ["--rdzv-id=test", f"--local-addr={address}"]
            # which of the two holds the meeting: by their names torchrun could not tell, as they share one
            command += [f"--rdzv-conf=is_host={str(address == ADDRESSES[0]).lower()}"]
            command += program
            processes.append(subprocess.Popen(command, env=environment, start_new_session=True))
        return [process.wait(120) for process in processes]


@contextmanager
def _ended(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """No process of these is left, nor any that they started."""
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
