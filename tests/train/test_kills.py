"""Whole runs, killed at points of a save: what was complete stays, and `--resume` goes on bit for bit.

Many more such kills are in tests/checkpoint/test_crash.py (writers alone) and benchmarks/checkpoint_crashes.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kill_jobs
import pytest
import split_jobs
from kill_jobs import Kill, complete_steps, kill, leftovers
from pool import run_warm
from run_files import assert_same_weights, series

from modelworks.config import dump_yaml
from modelworks.layout import Layout
from modelworks.train import train

pytestmark = pytest.mark.slow
SETTINGS = ["checkpoint.every=2 steps", "checkpoint.keep_last=2", "evaluate.every=100 steps", "train.micro_batch=1",
            "train.duration=8 steps", "evaluate.max_tokens=500"]  # fmt: skip
SPLIT = ["parallel.dp_shard=2", "parallel.zero=2"]
# Saves are of steps 2, 4, 6 and 8, so the third is killed when steps 2 and 4 are there; then step 2 is removed.
ALONE = [
    Kill("before the storage is opened", 3),
    Kill("between two tensors", 150),
    Kill("shard file durable", 3),
    Kill("before the manifest", 3),
    Kill("manifest durable", 3),
    Kill("renamed", 3),
    Kill("old one hidden", 1),
    Kill("latest moved", 4),
]
OF_TWO = [Kill("part file written", 3, 1), Kill("parts read", 3)]


@pytest.fixture(scope="module")
def unbroken(tiny_config: Any, workers: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run directories of runs that nobody killed, in one process and on two ranks."""
    place, layout = tmp_path_factory.mktemp("unbroken"), Layout(dp_shard=2)
    train(tiny_config(*SETTINGS), place / "alone", machine=split_jobs.MACHINE)
    workers.run(split_jobs.run, layout, dump_yaml(tiny_config(*SETTINGS, *SPLIT)), str(place / "split"), n_kv_heads=2)
    return place


def warm(arguments: dict[str, Any]) -> tuple[int, str]:
    """A whole run in a process of its own, which has imported torch before it starts."""
    ended = run_warm(kill_jobs.run, *arguments.values(), where=Path.cwd())
    return ended.code, ended.output


@pytest.mark.parametrize("how", [*ALONE, *OF_TWO], ids=lambda how: f"{how.point} {how.count} of rank {how.rank}")
def test_killed_and_resumed(how: Kill, unbroken: Path, tiny_config: Any, workers: Any, tmp_path: Path) -> None:
    split = SPLIT if how in OF_TWO else []
    text = dump_yaml(tiny_config(*SETTINGS, *split))
    (tmp_path / "config.yaml").write_text(text)
    assert kill(tmp_path / "config.yaml", tmp_path / "runs", how, start=warm)
    run_dir = tmp_path / "runs" / "tiny"
    before = complete_steps(run_dir / "checkpoints")
    assert set(before) >= ({4} if how.count >= 3 else set())
    if split:
        workers.run(split_jobs.run, Layout(dp_shard=2), text, str(run_dir), n_kv_heads=2, resume=True)
    else:
        train(tiny_config(*SETTINGS), run_dir, machine=split_jobs.MACHINE, resume=True)
    reference = unbroken / ("split" if split else "alone")
    assert series(run_dir, "train/loss") == series(reference, "train/loss")
    assert_same_weights(run_dir, reference)
    assert leftovers(run_dir / "checkpoints") == []
    kept = complete_steps(run_dir / "checkpoints")
    assert kept[-2:] == [6, 8]
    assert len(kept) <= 3  # the last two, and the one that the run was resumed from
