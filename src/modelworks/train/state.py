"""`TrainState`: all that changes while a run trains, and how it is saved and restored.

A schedule and a loader are functions of the step, and dropout masks of their place, so the state is: the model, the
optimiser with its count of updates, the loss scale, the biases that balance experts, the step, the data that was left
out, and the best evaluation so far. A run that restores it goes on bit for bit as if it had never stopped.

What is saved are parts of logical tensors under their full names, so that a checkpoint does not depend on the layout
that wrote it, and a rank of any layout reads just the slices that it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from modelworks.checkpoint import Identity, Owners, Shard, whole_shards
from modelworks.config import RunConfig
from modelworks.data import Dataset, Skips
from modelworks.layout import ShardSpec
from modelworks.models import routing_state
from modelworks.optim import Optimizer
from modelworks.parallel import SplitModel
from modelworks.train.experts import set_expert_biases
from modelworks.train.health import Watch
from modelworks.train.precision import LossScaler
from modelworks.train.reading import CarefulReader
from modelworks.train.saved_values import SavedValues


@dataclass
class TrainState:
    """step: batches consumed, and so the loader's position. best: (value, step) of `evaluate.best_metric` so far.

    metrics: what was evaluated at this very step, empty at most steps; saved with it, so that the best checkpoint is
    the one that was evaluated. resumed_from: the checkpoint that it became, by path or URL, for people.
    watch: judges and measures steps. skips: the data that the run left out when it went back; the loader's own.
    """

    model: SplitModel
    optimizer: Optimizer
    scaler: LossScaler | None = None
    step: int = 0
    best: tuple[float, int] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    resumed_from: str | None = None
    watch: Watch | None = None
    skips: Skips = field(default_factory=Skips)

    @cached_property
    def shards(self) -> list[Shard]:
        """What this rank writes of a checkpoint, sections `model`, `optimizer` and, where experts are balanced,
        `routing`. Made once: updates change the tensors in place."""
        mesh = self.model.mesh
        owners = Owners(self._specs, mesh.rank, mesh.layout.world_size)
        shards = owners.shards("model", self.model.stored)
        shards += owners.shards("optimizer", dict(self.optimizer.named_state()))
        if all(mesh.place(axis) == 0 for axis in ("dp_replicate", "dp_shard", "cp", "tp")):
            for part in self.model.parts.values():
                shards += whole_shards("routing", routing_state(part))
        return shards

    def identity(self, config: RunConfig, dataset: Dataset) -> Identity:
        """What a checkpoint of this moment says of itself. dataset: what the run is trained on; its tokeniser is saved
        with it, and its key, which names the texts."""
        return Identity.of_run(
            config,
            world_size=self.model.mesh.layout.world_size,
            state={**self.values(), "dataset": dataset.key, "resumed_from": self.resumed_from},
            metrics=dict(self.metrics),
            tokenizer=dataset.tokenizer_directory,
        )

    def restore(self, reader: CarefulReader) -> None:
        """Become the state that a checkpoint holds, whose weights the model has already (`build_state`). All ranks call
        it. Raises `UserError` on all where it does not fit, `CorruptedCheckpoint` where bytes have changed."""
        checkpoint, mesh = reader.checkpoint, self.model.mesh
        with reader.noting("its training state"):
            saved = SavedValues(checkpoint.state, checkpoint.step)
            self.optimizer.load_state(self._slices(reader), saved.updates())
            self.take_values(saved)
            saved.set_skips(self.skips)
            set_expert_biases(
                self.model, {name: reader.whole("routing", name) for name in checkpoint.shapes("routing")}
            )
        if mesh.is_main:  # the other files are for readers of the model, and must be as sound as the rest
            with reader.noting("its tokenizer"):
                checkpoint.check_files()
        reader.settle(mesh)
        self.model.gradients.after_update()  # master weights of another precision may have changed the shards
        self.step = checkpoint.step
        self.resumed_from = checkpoint.label
        self.metrics = checkpoint.metrics

    def reload(self, reader: CarefulReader) -> None:
        """Become an earlier state of this very run, weights included. All ranks call it; raises as `restore` does."""
        self.model.gradients.load(reader.fill)
        self.restore(reader)

    def take_values(self, saved: SavedValues) -> None:
        """Become what a state said of itself (`values`) but for its tensors, its updates and what it skipped."""
        if self.scaler:
            saved.set_scale(self.scaler)
        self.best = saved.best()
        if self.watch and self.watch.monitor:
            saved.set_health(self.watch.monitor)
        if self.watch and self.watch.run_judge:
            saved.set_judge(self.watch.run_judge)
        if self.watch:
            saved.set_noise(self.watch.noise)

    def values(self) -> dict[str, Any]:
        """Everything of a checkpoint's `state` that is no tensor: numbers, lists and text."""
        return {
            "updates": self.optimizer.updates,
            "loader_step": self.step,
            "loss_scaler": self.scaler.state() if self.scaler else None,
            "health": self.watch.monitor.state() if self.watch and self.watch.monitor else None,
            "noise": self.watch.noise.state() if self.watch else None,
            "judgements": self.watch.run_judge.state() if self.watch and self.watch.run_judge else None,
            "best": self.best and {"value": self.best[0], "step": self.best[1]},
            "skips": self.skips.state(),
        }

    def _slices(self, reader: CarefulReader) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of the optimiser's tensors."""
        known = set(self.model.parameter_names)
        specs = self.optimizer.state_specs(self.model.split.specs)
        for full, shape in reader.checkpoint.shapes("optimizer").items():
            name = full.rpartition("/")[0]
            if name not in known:
                raise ValueError(f"optimiser state {full} belongs to no parameter of this model")
            if name in self.model.plans:
                if full not in specs:
                    raise ValueError(f"optimiser state {full}: {self.optimizer.config.name} keeps no such thing")
                if shape != specs[full].shape:
                    raise ValueError(f"optimiser state {full}: shape {shape}, expected {specs[full].shape}")
                yield full, reader.slice("optimizer", full, specs[full].bounds)

    def _specs(self, rank: int) -> dict[str, ShardSpec]:
        """What any rank stores: parameters, and state that is not of their shape."""
        parameters = self.model.stored_specs(rank)
        states = self.optimizer.state_specs(parameters)
        return parameters | {n: s for n, s in states.items() if s.bounds != parameters[n.rpartition("/")[0]].bounds}
