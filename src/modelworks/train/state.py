"""`TrainState`: all that changes while a run trains, and how it is saved and restored.

A schedule and a loader are functions of the step, and dropout masks of their place, so the state is: the model, the
optimiser with its count of updates, the loss scale, the biases that balance experts, the step, and the best evaluation
so far. A run that restores it goes on bit for bit as if it had never stopped.

What is saved are whole tensors under their full names, put together from all ranks, so that a checkpoint does not
depend on the layout that wrote it, and a rank of any layout takes the slices that it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelworks.checkpoint import Checkpoint, Sections, write_checkpoint
from modelworks.config import RunConfig, UserError
from modelworks.data import Dataset
from modelworks.optim import AdamW
from modelworks.parallel import SplitModel
from modelworks.train.experts import expert_biases, set_expert_biases
from modelworks.train.precision import LossScaler
from modelworks.train.whole_tensors import write_together


@dataclass
class TrainState:
    """step: batches consumed, and so the loader's position. best: (value, step) of `evaluate.best_metric` so far.

    metrics: what was evaluated at this very step, empty at most steps; saved with it, so that the best checkpoint is
    the one that was evaluated.
    """

    model: SplitModel
    optimizer: AdamW
    scaler: LossScaler | None = None
    step: int = 0
    best: tuple[float, int] | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def save(self, directory: Path, config: RunConfig, dataset: Dataset) -> Path:
        """Write `directory/step-…`; every rank must call it, rank 0 writes. Raises OSError on all ranks when that
        fails, and nothing partial is then visible.

        dataset: what it was trained on; its tokeniser is saved with it, and its key, which names the texts.
        """
        values = self._values()

        def write(sections: Sections) -> Path:
            return write_checkpoint(
                directory,
                step=self.step,
                config=config,
                sections=sections,
                state={**values, "dataset": dataset.key},
                tokenizer=dataset.tokenizer_directory,
                metrics=self.metrics,
            )

        return write_together(self.model, dict(self.optimizer.named_state()), expert_biases(self.model), write)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Become the state that `checkpoint` holds, whose weights the model has already (`build_state`). Raises
        `UserError` where it is of another optimiser."""
        values = checkpoint.state
        try:
            self.optimizer.load_state(self._slices(checkpoint), int(values["updates"]))
            if self.scaler:
                self.scaler.load_state(values["loss_scaler"])
            self.model.gradients.after_update()  # master weights of another precision may have changed the shards
            best = values["best"]
            self.best = None if best is None else (float(best["value"]), int(best["step"]))
            set_expert_biases(self.model, dict(checkpoint.tensors("routing")))
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise UserError(f"{checkpoint.path}: its training state cannot be used here: {error}") from None
        self.step = checkpoint.step
        self.metrics = checkpoint.metrics

    def _slices(self, checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of the optimiser's tensors."""
        known = set(self.model.parameter_names)
        for full in checkpoint.shapes("optimizer"):
            name = full.rpartition("/")[0]
            if name not in known:
                raise ValueError(f"optimiser state {full} belongs to no parameter of this model")
            if name in self.model.plans:
                spec = self.model.plans[name].stored
                tensor = checkpoint.tensor("optimizer", full)
                if tuple(tensor.shape) != spec.shape:
                    raise ValueError(f"optimiser state {full}: shape {tuple(tensor.shape)}, expected {spec.shape}")
                yield full, tensor[spec.slices]

    def _values(self) -> dict[str, Any]:
        return {
            "updates": self.optimizer.updates,
            "loader_step": self.step,
            "loss_scaler": self.scaler.state() if self.scaler else None,
            "best": self.best and {"value": self.best[0], "step": self.best[1]},
        }


def first_not_finite(model: SplitModel) -> str | None:
    """The name of a parameter with an element that is not finite, the same on every rank; None where all are."""
    broken = [name for name, tensor in model.stored.items() if not bool(tensor.isfinite().all())]
    found = torch.tensor(float(bool(broken)), device=model.mesh.device)
    if not model.mesh.group("world").all_reduce_(found, "max"):
        return None
    names: list[str] = [name for names in model.mesh.group("world").gather_objects(broken[:1]) for name in names]
    return min(names)
