"""`TrainState`: all that changes while a run trains, and how it is saved and restored.

A schedule and a loader are functions of the step, and dropout masks of their place, so the state is: the model, the
optimiser with its count of updates, the loss scale, the step, and the best evaluation so far. A run that restores
it goes on bit for bit as if it had never stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelworks.checkpoint import Checkpoint, write_checkpoint
from modelworks.config import RunConfig, UserError
from modelworks.data import Dataset
from modelworks.models import Transformer
from modelworks.optim import AdamW
from modelworks.train.precision import LossScaler


@dataclass
class TrainState:
    """step: batches consumed, and so the loader's position. best: (value, step) of `evaluate.best_metric` so far.

    metrics: what was evaluated at this very step, empty at most steps; saved with it, so that the best checkpoint is
    the one that was evaluated.
    """

    model: Transformer
    optimizer: AdamW
    scaler: LossScaler | None = None
    step: int = 0
    best: tuple[float, int] | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def save(self, directory: Path, config: RunConfig, dataset: Dataset) -> Path:
        """Write `directory/step-…`; raises OSError when that fails, and nothing partial is then visible.

        dataset: what it was trained on; its tokeniser is saved with it, and its key, which names the texts.
        """
        path: Path = write_checkpoint(
            directory,
            step=self.step,
            config=config,
            sections={
                "model": dict(self.model.named_parameters()),
                "optimizer": dict(self.optimizer.named_state()),
            },
            state={**self._values(), "dataset": dataset.key},
            tokenizer=dataset.tokenizer_directory,
            metrics=self.metrics,
        )
        return path

    def restore(self, checkpoint: Checkpoint) -> None:
        """Become the state that `checkpoint` holds. Raises `UserError` where it is of another model or optimiser."""
        checkpoint.load("model", dict(self.model.named_parameters()))
        values = checkpoint.state
        try:
            self.optimizer.load_state(checkpoint.tensors("optimizer"), int(values["updates"]))
            if self.scaler:
                self.scaler.load_state(values["loss_scaler"])
            best = values["best"]
            self.best = None if best is None else (float(best["value"]), int(best["step"]))
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise UserError(f"{checkpoint.path}: its training state cannot be used here: {error}") from None
        self.step = checkpoint.step
        self.metrics = checkpoint.metrics

    def _values(self) -> dict[str, Any]:
        return {
            "updates": self.optimizer.updates,
            "loader_step": self.step,
            "loss_scaler": self.scaler.state() if self.scaler else None,
            "best": self.best and {"value": self.best[0], "step": self.best[1]},
        }
