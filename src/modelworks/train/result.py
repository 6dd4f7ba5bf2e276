"""What is left of a run in figures: the last line of `--json`, and `summary.json`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from modelworks.config import count_parameters
from modelworks.data import TrainLoader
from modelworks.train.derivation import Derived
from modelworks.train.hooks import Recording, Validation
from modelworks.train.saving import Checkpoints
from modelworks.train.state import TrainState


@dataclass(frozen=True)
class Result:
    """How a run ended. losses in nats per token, of the last step and the last evaluation; mfu and
    tokens_per_second are medians over this process's steps. stopped_by: the signal's name, None for a run that
    reached its end. checkpoint, checkpoint_step: path or URL of the newest one, and its step. last_save_failed: the
    newest state is not saved. sample: {prompt, text} of the last evaluation. parallel: of a split run, what it last
    measured of its split beside the formulas (`SplitRecords`). predicted_step_seconds: before the first step; None
    where nothing was predicted."""

    steps: int
    tokens: int
    train_loss: float | None
    val_loss: float | None
    val_perplexity: float | None
    val_bits_per_byte: float | None
    tokens_per_second: float | None
    mfu: float | None
    seconds: float
    checkpoint: str | None
    baselines: dict[str, float]
    parameters: int
    peak_memory: int
    sample: dict[str, str] | None = None
    stopped_by: str | None = None
    last_save_failed: bool = False
    checkpoint_step: int | None = None
    parallel: dict[str, Any] | None = None
    predicted_step_seconds: float | None = None


def with_earlier_figures(result: Result, summary: Mapping[str, Any]) -> Result:
    """The result of a run that was at its end already: what its steps measured is in the summary written then."""
    if summary.get("steps") != result.steps:
        return result
    of_steps = ("train_loss", "tokens_per_second", "mfu", "seconds", "peak_memory", "sample", "parallel")
    return replace(result, **{name: summary[name] for name in of_steps if summary.get(name) is not None})


def build_result(
    state: TrainState,
    derived: Derived,
    loader: TrainLoader,
    recording: Recording,
    validation: Validation,
    checkpoints: Checkpoints,
    baselines: dict[str, float],
    started: float,
    signal: Any,
) -> Result:
    speed = recording.median_speed
    score = validation.latest
    metrics = state.metrics  # of the checkpoint, where a finished run was resumed and nothing was left to do
    return Result(
        steps=state.step,
        tokens=loader.tokens(state.step),
        train_loss=recording.losses[-1] if recording.losses else None,
        val_loss=score.loss if score else metrics.get("val_loss"),
        val_perplexity=score.perplexity if score else metrics.get("val_perplexity"),
        val_bits_per_byte=score.bits_per_byte if score else metrics.get("val_bits_per_byte"),
        tokens_per_second=speed,
        mfu=None if speed is None else recording.mfu(speed),
        seconds=time.monotonic() - started,
        checkpoint=checkpoints.latest,
        checkpoint_step=checkpoints.latest_step,
        baselines=baselines,
        parameters=count_parameters(derived.config.model).total,
        peak_memory=recording.memory.peak(),
        sample=dict(zip(("prompt", "text"), validation.samples[0], strict=True)) if validation.samples else None,
        stopped_by=None if signal is None else signal.name,
        last_save_failed=checkpoints.failed,
    )
