"""What was predicted of a run, said before its first step and held against what was measured after its last.

The planner is not known here: whoever starts the run may hand over a `Forecaster`, a function of plain values. A run
never fails for want of a prediction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console

from modelworks.config import RunConfig, UserError, format_bytes, format_count
from modelworks.hardware import Machine
from modelworks.train.hooks import Recording
from modelworks.train.recording import RunLog


@dataclass(frozen=True)
class Forecast:
    """step_seconds: of a step of the full batch. memory: bytes of the fullest rank's tensors. basis: what rates it is
    from, in words. stages: of a batch ramp, (rows, seconds) of a step in each that is not the last."""

    step_seconds: float
    memory: float
    basis: str
    stages: tuple[tuple[int, float], ...] = ()


# (the resolved run, this machine's measured figures, machines of the run) -> what is predicted. Raises UserError where
# it cannot say.
Forecaster = Callable[[RunConfig, Machine, int], Forecast]


def say_forecast(
    forecaster: Forecaster,
    config: RunConfig,
    machine: Machine,
    n_hosts: int,
    recording: Recording,
    log: RunLog,
    console: Console,
    step: int,
) -> Forecast | None:
    """Predict, print and record; None where that is not possible, which is said in a line."""
    try:
        found = forecaster(config, machine, n_hosts)
    except UserError as error:
        console.print(f"not predicted: {error}", markup=False)
        return None
    except Exception as error:  # a mistake of the planner's must not cost the run
        console.print(f"not predicted: {type(error).__name__}: {error}", markup=False)
        return None
    speed = recording.tokens_per_step / found.step_seconds
    figures = {
        "step_seconds": (found.step_seconds, "s"),
        "tokens_per_second": (speed, "tokens/s"),
        "mfu": (recording.mfu(speed), ""),
        "tensor_memory": (found.memory, "bytes"),
    }
    for name, (value, unit) in figures.items():
        log.figure(step, f"predicted/{name}", value, unit, kind="predicted")
    of_step = "step of the full batch" if recording.loader.batches.ramps else "step"
    console.print(
        f"predicted: {describe_step(found.step_seconds)} a {of_step}, {format_count(speed)} tokens/s, MFU "
        f"{recording.mfu(speed):.1%}, {format_bytes(found.memory)} of tensors on the fullest rank; {found.basis}"
        + "".join(f"; {describe_step(seconds)} of {rows:,} rows" for rows, seconds in found.stages),
        markup=False,
        soft_wrap=True,
    )
    return found


def compare_forecast(forecast: Forecast, recording: Recording, log: RunLog, console: Console, step: int) -> None:
    """Predicted and measured step time side by side, printed and recorded; nothing where no step was made."""
    speed = recording.median_speed
    if speed is None:
        return
    seconds = recording.tokens_per_step / speed
    log.figure(step, "train/step_seconds", seconds, "s")
    off = seconds / forecast.step_seconds - 1.0
    how = f"{abs(off):.0%} {'longer' if off > 0 else 'shorter'}" if abs(off) >= 0.005 else "the same"
    console.print(
        f"predicted {describe_step(forecast.step_seconds)} a step; measured {describe_step(seconds)}: {how}",
        markup=False,
    )


def describe_step(seconds: float) -> str:
    """In the unit that people read."""
    return f"{seconds:.3g} s" if seconds >= 1.0 else f"{1e3 * seconds:.3g} ms"
