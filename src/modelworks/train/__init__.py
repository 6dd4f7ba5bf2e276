"""Training: the step, the loop around it, evaluation, and the run directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelworks.lazy_names import lazily

if TYPE_CHECKING:
    from modelworks.train.allocator import keep_freed_memory as keep_freed_memory
    from modelworks.train.beginning import print_decisions as print_decisions
    from modelworks.train.derivation import Decision as Decision
    from modelworks.train.derivation import Derived as Derived
    from modelworks.train.derivation import derive as derive
    from modelworks.train.evaluation.tasks import TaskRunner as TaskRunner
    from modelworks.train.evaluation.validation import TextScore as TextScore
    from modelworks.train.evaluation.validation import score_text as score_text
    from modelworks.train.job import train as train
    from modelworks.train.joining import joined_mesh as joined_mesh
    from modelworks.train.joining import run_device as run_device
    from modelworks.train.loop import Hook as Hook
    from modelworks.train.loop import StepDone as StepDone
    from modelworks.train.loop import TrainingFailed as TrainingFailed
    from modelworks.train.loss import vocabulary_loss as vocabulary_loss
    from modelworks.train.micro_batches import own_columns as own_columns
    from modelworks.train.precision import PRECISIONS as PRECISIONS
    from modelworks.train.precision import Precision as Precision
    from modelworks.train.preparation import check_references as check_references
    from modelworks.train.preparation import measure as measure
    from modelworks.train.result import Result as Result
    from modelworks.train.resuming import newest_checkpoint as newest_checkpoint
    from modelworks.train.start import check_vocabulary as check_vocabulary
    from modelworks.train.step import NonFiniteStep as NonFiniteStep
    from modelworks.train.step import apply_gradients as apply_gradients
    from modelworks.train.step import compute_gradients as compute_gradients
    from modelworks.train.step import data_rows as data_rows

_HOME = {
    "Decision": "derivation",
    "Derived": "derivation",
    "Hook": "loop",
    "NonFiniteStep": "step",
    "PRECISIONS": "precision",
    "Precision": "precision",
    "Result": "result",
    "StepDone": "loop",
    "TaskRunner": "evaluation.tasks",
    "TextScore": "evaluation.validation",
    "TrainingFailed": "loop",
    "apply_gradients": "step",
    "check_references": "preparation",
    "check_vocabulary": "start",
    "compute_gradients": "step",
    "data_rows": "step",
    "derive": "derivation",
    "joined_mesh": "joining",
    "keep_freed_memory": "allocator",
    "measure": "preparation",
    "newest_checkpoint": "resuming",
    "own_columns": "micro_batches",
    "print_decisions": "beginning",
    "run_device": "joining",
    "score_text": "evaluation.validation",
    "train": "job",
    "vocabulary_loss": "loss",
}

__all__ = sorted(_HOME)

__getattr__ = lazily(__name__, _HOME)
