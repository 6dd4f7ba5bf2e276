"""What happens after each step of a run, put together: records, evaluation, judgements, checkpoints, going back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from modelworks.checkpoint import Storage
from modelworks.config import training_flops_per_token
from modelworks.data import validation_batches
from modelworks.train.derivation import Decision, Derived
from modelworks.train.evaluation.samples import choose_prompts
from modelworks.train.experts import whole_model
from modelworks.train.health.judging import Judging
from modelworks.train.health.records import HealthRecords
from modelworks.train.hooks import Questions, Recording, Validation
from modelworks.train.loop import Hook
from modelworks.train.one_rank import on_rank_0
from modelworks.train.preparation import Prepared
from modelworks.train.recording import MemoryMeter, RunLog
from modelworks.train.rollback import Rollbacks
from modelworks.train.saving import Checkpoints, build_checkpoints
from modelworks.train.split_records import SplitRecords
from modelworks.train.state import TrainState
from modelworks.train.terminal import Terminal

if TYPE_CHECKING:
    from modelworks.train.evaluation.tasks import TaskRunner


@dataclass
class Hooks:
    """What happens after a step, in the order of `all`: an evaluation comes before the checkpoint that stores it."""

    log: RunLog
    terminal: Terminal
    recording: Recording
    health: HealthRecords | None
    split: SplitRecords | None
    validation: Validation
    questions: Questions | None
    checkpoints: Checkpoints
    rollbacks: Rollbacks | None
    judging: Judging | None
    run_dir: Path
    further: Sequence[Hook]

    @property
    def all(self) -> list[Hook]:
        # Records of the split before the evaluation, which goes through the same executor.
        before = (self.recording, self.health, self.split, self.validation, self.questions, self.judging)
        own = (*before, self.checkpoints, self.rollbacks)
        return [*(hook for hook in own if hook is not None), *self.further]


def build_hooks(
    prepared: Prepared,
    state: TrainState,
    run_dir: Path,
    storage: Storage | None,
    log: RunLog,
    memory: MemoryMeter,
    console: Console,
    peak_flops: float,
    states: Decision | None,
    further: Sequence[Hook],
) -> Hooks:
    """states: where those to go back to are kept; None: nowhere."""
    derived, dataset, loader = prepared.derived, prepared.dataset, prepared.loader
    config = derived.config
    terminal = Terminal(console, total_steps=derived.total_steps, log_every=config.train.log_every)
    flops = training_flops_per_token(config.model, config.data.seq_len).training
    text = validation_batches(
        dataset,
        seq_len=config.data.seq_len,
        rows=max(1, derived.micro_batch),
        packing=config.data.packing,
        max_tokens=config.evaluate.max_tokens,
    )
    prompts = choose_prompts(config.evaluate.prompts, dataset, config.evaluate.samples)
    questions = _questions(prepared.tasks, derived, dataset.tokenizer)
    checkpoints = build_checkpoints(derived, state, dataset, log, terminal, storage, prepared.resumed)
    rollbacks = None
    if states:
        rollbacks = Rollbacks(config, run_dir, loader, checkpoints, log, terminal, states)
    health = HealthRecords(log, terminal, loader, state.model.mesh) if state.watch else None
    return Hooks(
        log,
        terminal,
        recording=Recording(log, terminal, memory, loader, flops, peak_flops),
        health=health,
        split=SplitRecords(log, derived, state, run_dir) if state.model.mesh.layout.world_size > 1 else None,
        validation=Validation(log, terminal, derived, text, dataset, loader, prompts),
        questions=Questions(log, terminal, derived.tasks_every, questions) if questions else None,
        checkpoints=checkpoints,
        rollbacks=rollbacks,
        judging=Judging(log, terminal, health) if health and config.health.judgements else None,
        run_dir=run_dir,
        further=further,
    )


def _questions(tasks: TaskRunner | None, derived: Derived, tokenizer: Any) -> Any:
    """What asks the configured question sets; None where there are none."""
    if tasks is None:
        return None

    def run(state: TrainState) -> dict[str, float]:
        """Asked by rank 0 of the whole model; the answers are everybody's, since they may decide which step is best."""
        model = whole_model(state.model)

        def ask() -> dict[str, float]:
            assert model is not None
            return dict(tasks.run(model, tokenizer, precision=derived.precision))

        return on_rank_0(state.model.mesh, ask)

    return run
