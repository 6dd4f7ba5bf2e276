"""A whole run whose checkpoints go to object storage: saved to, resumed from, pruned, read as a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from modelworks.checkpoint import find_storage, list_checkpoints, open_checkpoint, open_model
from modelworks.records import read_records
from modelworks.train import train


def losses(run_dir: Path) -> list[float | str]:
    return [row.value for row in read_records(run_dir / "records.jsonl") if row.name == "train/loss"]


@pytest.mark.slow
def test_a_run_to_s3(s3_bucket: str, tiny_config: Any, tiny_machine: Any, tmp_path: Path) -> None:
    url = f"{s3_bucket}/{tmp_path.name}"
    there = [f"checkpoint.storage={url}", "checkpoint.keep_last=1", "schedule.name=constant"]
    run_dir, local = tmp_path / "run", tmp_path / "local"
    first = train(tiny_config(*there, "train.duration=4 steps"), run_dir, machine=tiny_machine)
    assert (first.checkpoint, first.last_save_failed) == (f"{url}/step-00000004", False)
    result = train(tiny_config(*there, "train.duration=7 steps"), run_dir, resume=True, machine=tiny_machine)
    assert result.checkpoint == f"{url}/step-00000007"
    assert not (run_dir / "checkpoints").exists()
    marks = {entry.step: entry.marks for entry in list_checkpoints(find_storage(str(run_dir)))}
    assert marks == {4: ("resumed from",), 7: ("latest", "best")}  # step 6 was not kept
    open_checkpoint(result.checkpoint).verify()

    train(tiny_config("schedule.name=constant", "train.duration=7 steps"), local, machine=tiny_machine)
    assert losses(run_dir) == losses(local)
    ours, theirs = open_model(f"{run_dir}@latest"), open_model(str(local))
    assert ours.origin == f"checkpoint {url}/step-00000007 (step 7)"
    for name, tensor in ours.tensors.items():
        assert torch.equal(tensor.load(), theirs.tensors[name].load()), name
