"""The training loop: batches in, updates out. Everything else is a hook.

A hook is told of each finished step and may record, evaluate, sample or save; none of them changes the mathematics.
They are called in the order given, so that an evaluation comes before the checkpoint that stores its result.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from modelworks.data.batch import Batch
from modelworks.parallel import agree
from modelworks.parallel.traffic import Volume
from modelworks.train.derivation import Derived
from modelworks.train.health import Judgement
from modelworks.train.state import TrainState
from modelworks.train.step import NonFiniteStep, StepResult, train_step
from modelworks.train.stopping import StopRequest

_REMEDY = "nothing was updated. A lower optimizer.lr, a longer schedule.warmup or train.precision=fp32 usually help"


class TrainingFailed(Exception):
    """The run cannot go on, and it is not a mistake in the configuration; the message says what was kept.

    judgement: of the step that ended it, where the answers to spikes are used up: its state may be ruined. bad: of a
    step that was not finite, and changed nothing."""

    def __init__(self, message: str, judgement: Judgement | None = None, bad: NonFiniteStep | None = None) -> None:
        super().__init__(message)
        self.judgement, self.bad = judgement, bad


@dataclass(frozen=True)
class StepDone:
    """step: updates asked for so far, this one included. seconds: the step alone, with its wait for data.

    waited: seconds of it in which this process waited for other ranks. sent: (axis, kind of collective) -> what this
    rank sent in it. undone: the run goes back behind this step, so that nothing is worth evaluating or saving.
    """

    step: int
    result: StepResult
    lr: float
    seconds: float
    last: bool  # of the whole run
    stopping: bool  # asked to stop: nothing but saving should follow
    sent: dict[tuple[str, str], Volume] = field(default_factory=dict)
    waited: float = 0.0
    undone: bool = False


class Hook(Protocol):
    def after_step(self, state: TrainState, done: StepDone) -> None: ...


def run_steps(
    state: TrainState, derived: Derived, batches: Iterable[Batch], hooks: Sequence[Hook], stop: StopRequest
) -> Judgement | None:
    """Train from `state.step` to the end, or until asked to stop. batches: this rank's rows, from that step on.

    Returns the judgement of a step behind which the run has to go back, which is the caller's business; else None.
    All ranks stop at the same step: a signal that one of them got is everybody's.
    Raises TrainingFailed, with the state as it was before the bad step, when loss or gradients are not finite.
    """
    rate, mesh = derived.schedule, state.model.mesh
    state.model.train()
    source = iter(batches)
    stopping = agree(stop.requested, mesh)
    while state.step < derived.total_steps and not stopping and not (state.watch and state.watch.ended):
        started, waited = time.perf_counter(), mesh.labels.waited_seconds
        mesh.traffic.take()
        mesh.labels.step(state.step + 1)
        mesh.labels.doing("data")
        batch, lr = next(source), rate(state.step)
        if state.watch:
            state.watch.begin(state.step + 1)
            lr *= state.watch.rate_factor
        mesh.labels.doing("forward and backward passes")
        try:
            result = train_step(
                state.model,
                state.optimizer,
                batch,
                derived.at(state.step).config,
                step=state.step,
                lr=lr,
                micro_batch=derived.micro_batch,
                precision=derived.precision,
                scaler=state.scaler,
                watch=state.watch,
            )
        except NonFiniteStep as error:
            raise TrainingFailed(_explain(error, state, derived), bad=error) from error
        except FloatingPointError as error:  # fp16 whose loss scale cannot fall any lower
            raise TrainingFailed(f"step {state.step + 1}: {error}; {_REMEDY}") from error
        state.step += 1
        state.metrics = {}
        stopping = agree(stop.requested, mesh)
        mesh.labels.doing("records, evaluation, checkpoint")
        undone = result.judgement is not None and result.judgement.good is not None
        done = StepDone(
            state.step,
            result,
            lr,
            time.perf_counter() - started,
            last=state.step == derived.total_steps and not undone,
            stopping=stopping,
            sent=mesh.traffic.take(),
            waited=mesh.labels.waited_seconds - waited,
            undone=undone,
        )
        for hook in hooks:
            hook.after_step(state, done)
        if result.judgement and result.judgement.stops:
            raise TrainingFailed(_stopped(result.judgement, state.step), result.judgement)
        if undone:
            return result.judgement
    return None


def _stopped(judgement: Judgement, step: int) -> str:
    if judgement.against:
        return f"step {step}: {judgement.reason}: the run diverges; health.spikes: the answers to that are used up"
    steps = ", ".join(map(str, judgement.steps))
    return (
        f"step {step}: {judgement.reason}; health.spikes: the answers to spikes are used up (steps {steps}, whose "
        "updates were left out)"
    )


def _explain(error: NonFiniteStep, state: TrainState, derived: Derived) -> str:
    step = state.step
    what = f"step {step + 1}: the loss is {error.loss} and the gradient norm {error.grad_norm}"
    where = ""
    if error.rows:
        begin = derived.batches.first_sample(step) + state.skips.before(step)
        first, end = error.rows
        where = f" (first in samples {begin + first} to {begin + end - 1})"
    return f"{what}{where}; {_REMEDY}"
