"""Starting ranks, and every way in which they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import launch_jobs
import pytest

from modelworks.config import UserError
from modelworks.parallel import RankFailed, launch

pytestmark = pytest.mark.slow


def test_results_of_two_runs_side_by_side(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with ThreadPoolExecutor() as threads:
        runs = [
            threads.submit(launch, "launch_jobs:learn", 2, {"scale": scale}, directory=tmp_path / f"{scale}", threads=5)
            for scale in (1.0, 10.0)
        ]
    for scale, run in zip((1.0, 10.0), runs, strict=True):
        results = run.result()
        assert [result["rank"] for result in results] == [0, 1]
        for result in results:
            assert (result["size"], result["sum"], result["agreed"], result["refused"]) == (2, 3 * scale, True, False)
        assert [result["threads"] for result in results] == [2, 2]  # 5 divided by 2
        assert sorted(result["first"] for result in results) == [False, True]
        assert "said by every rank" in (tmp_path / f"{scale}" / "rank-1.log").read_text()
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("UserWarning: said by every rank") == 2  # rank 0 of each run


def test_a_mistake_of_the_user_is_told_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="multiple of tp 2"):
        launch("launch_jobs:refuse", 2, {}, directory=tmp_path)
    assert capfd.readouterr() == ("", "")


def test_a_failure_names_its_rank_and_not_those_that_lost_it(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        launch("launch_jobs:raise_on_rank_1", 2, {}, directory=tmp_path)
    assert caught.value.rank == 1
    assert caught.value.error == ("ValueError", "on purpose")
    assert "launch_jobs.py" in (caught.value.trace or "")
    assert str(caught.value).startswith("rank 1 failed: ValueError: on purpose (at launch_jobs.py:")
    assert "last doing: step 12: data" in str(caught.value)


def test_a_killed_rank_ends_the_others_and_is_named_with_its_label(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        launch("launch_jobs:die_on_rank_1", 2, {}, directory=tmp_path)
    assert caught.value.rank == 1
    assert str(caught.value).startswith("rank 1 was killed (SIGKILL); it was last doing: step 12: data")


def test_a_hang_names_the_rank_that_never_came(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        launch("launch_jobs:never_come_on_rank_1", 2, {}, directory=tmp_path)
    assert caught.value.rank is None
    assert str(caught.value).startswith("rank 1 never entered all_reduce tp #2 of step 12; ")
    assert "last in data (step 12)" in str(caught.value)
    assert "parallel.timeout is 2 s" in str(caught.value)


def test_sigterm_reaches_the_ranks_which_end_together(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with _launching("save_on_signal", tmp_path, fifo) as parent:
        assert fifo.read_text() == "ready\n"
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(60) == 75


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)]
)
def test_no_rank_outlives_its_parent(tmp_path: Path, number: int, code: int) -> None:
    """Ranks that save nothing: killed with a parent that is killed, ended by what it passes on else."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with _launching("hold", tmp_path, fifo) as parent, fifo.open() as stream:
        ranks = {int(stream.readline()), int(stream.readline())}
        assert len(ranks) == 2
        parent.send_signal(number)
        assert stream.read() == ""  # the end of the FIFO: nobody has it open any more
        assert parent.wait(60) == code


def _launching(job: str, directory: Path, fifo: Path) -> subprocess.Popen[bytes]:
    """A process of its own that launches a job on two ranks."""
    command = [sys.executable, launch_jobs.__file__, job, str(directory), json.dumps({"fifo": str(fifo)})]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)  # Python's words on Ctrl-C
