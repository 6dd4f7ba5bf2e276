"""What a run left in its directory."""

from __future__ import annotations

from pathlib import Path

import torch

from modelworks.checkpoint import Checkpoint, open_checkpoint
from modelworks.records import read_records


def series(run_dir: Path, name: str) -> list[tuple[int, float]]:
    """(step, value) of a figure."""
    records = read_records(run_dir / "records.jsonl")
    return [(record.step, float(record.value)) for record in records if record.name == name]


def newest(run_dir: Path) -> Checkpoint:
    """The newest checkpoint, which must be whole."""
    checkpoint = open_checkpoint(max((run_dir / "checkpoints").glob("step-*")))
    checkpoint.verify()
    return checkpoint


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the newest checkpoint."""
    checkpoint = newest(run_dir)
    return {
        f"{section}/{name}": tensor
        for section in ("model", "optimizer", "routing")
        for name, tensor in checkpoint.tensors(section)
    }


def assert_same_weights(run_dir: Path, reference: Path) -> None:
    """Bit for bit."""
    ours, theirs = weights(run_dir), weights(reference)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
