"""What a worker of the pool does in the tests of loading under another layout: restore, save again, train on, save."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from split_jobs import MACHINE

from modelworks.checkpoint import Checkpoint, Saver, open_checkpoint, open_storage
from modelworks.config import RunConfig, parse_run_config
from modelworks.parallel import Mesh
from modelworks.train import PRECISIONS, Precision, data_rows, derive
from modelworks.train.reading import CarefulReader
from modelworks.train.start import build_state
from modelworks.train.state import TrainState
from modelworks.train.step import train_step
from modelworks.verify.batches import verification_batch

FLOAT64 = Precision("float64", torch.float64)
DATA: Any = SimpleNamespace(key="none", tokenizer_directory=None)


def read(*overrides: str) -> RunConfig:
    """Sizes that no degree divides: uneven shards, and empty ones over eight ranks. The embedding is tied."""
    text = """
        model: {n_layers: 4, d_model: 16, n_heads: 4, n_kv_heads: 2, d_ff: 13, vocab_size: 67, max_seq_len: 16,
                tie_embeddings: true}
        data: {seq_len: 16, tokenizer: none, packing: within-document}
        train: {global_batch: 8, micro_batch: 1, precision: fp32, device: cpu, duration: 1000 steps}
        schedule: {name: constant}
        optimizer: {lr: 1e-3}
    """
    return parse_run_config(text, "test", list(overrides))


def segment(
    mesh: Mesh, overrides: list[str], directory: str, source: str | None, steps: int, precision: str = "float64"
) -> dict[str, Any]:
    """One layout's part of a run. source: the checkpoint that it goes on from; None: the beginning.

    Returns the losses, and where the state was saved: `loaded`, right after it was restored, and `trained`, at the end.
    """
    config, place = read(*overrides), Path(directory)
    kind = FLOAT64 if precision == "float64" else PRECISIONS[precision]
    derived = replace(derive(config, MACHINE), precision=kind)
    reader = CarefulReader(open_checkpoint(Path(source))) if source else None
    state = build_state(derived, mesh, reader, scratch=place / "offload")
    if reader:
        state.restore(reader)
    loaded = _save(mesh, state, config, place / "loaded")
    state.model.train()
    # Two rows at once where a rank has them: still as many micro-batches as the pipelines have stages.
    micro_batch = min(2, config.rank_rows)
    losses = []
    for _ in range(steps):
        batch = verification_batch(config, state.step).rows(data_rows(state.model, config.train.global_batch))
        more: dict[str, Any] = {"step": state.step, "lr": 1e-3, "micro_batch": micro_batch, "precision": kind}
        losses.append(train_step(state.model, state.optimizer, batch, config, **more).loss)
        state.step += 1
    return {"losses": losses, "loaded": loaded, "trained": _save(mesh, state, config, place / "trained")}


def restored_alike(mesh: Mesh, overrides: list[str], source: str, lacks: str = "") -> str:
    """What all ranks are told where a checkpoint is damaged in bytes that only some of them read, or lacks state that
    only some of them need."""
    derived = derive(read(*overrides), MACHINE)
    reader = CarefulReader(open_checkpoint(Path(source)))
    state = build_state(derived, mesh, reader)
    shapes = Checkpoint.shapes

    def without(checkpoint: Checkpoint, section: str) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in shapes(checkpoint, section).items() if name != lacks}

    try:
        with patch.object(Checkpoint, "shapes", without):
            state.restore(reader)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _save(mesh: Mesh, state: TrainState, config: RunConfig, place: Path) -> str:
    saver = Saver(mesh, open_storage(place), background=True)
    saver.begin(state.step, state.shards, state.identity(config, DATA))
    outcome = saver.wait()
    assert outcome is not None
    assert outcome.where is not None, outcome.error
    return outcome.where
