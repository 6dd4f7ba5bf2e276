"""What a run's gradients say about its batch: the noise scale, the critical batch, and where more is waste.

To reach a given loss with batches of B sequences takes S steps and E = S B sequences,

    S = S_min (1 + B_noise / B)        E = E_min (1 + B / B_noise)

so at B = B_noise, the *critical batch*, both are twice the least that they can be: below it a larger batch saves nearly
all the steps that it should, beyond it nearly none (McCandlish et al. 2018, 1812.06162, appendix D). B_noise is
measured as B_simple = tr(Sigma) / |G|^2, the variance of one sequence's gradient over the square of the true gradient's
length. What that leaves out: it takes the curvature to be alike in all directions, while the paper found the two to
agree within a factor of two or three; it is of SGD, Adam's critical batch being of the same order; and it grows as the
loss falls, so that a figure is of one stretch of one run.

Both numbers are noisy and their ratio more so: they are averaged apart over a stretch of steps, and then divided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from modelworks.config import RunConfig, UserError, load_run_config
from modelworks.records import read_records

STRETCHES = 8  # rows of the table over the run
_TRACE, _SQUARE = "noise/trace", "noise/square"


@dataclass(frozen=True)
class Stretch:
    """The noise scale over steps `first` to `last`. sequences: None where noise hid the gradient altogether."""

    first: int
    last: int
    sequences: float | None


@dataclass(frozen=True)
class CriticalBatch:
    """noise_scale: sequences, over the later half of the run. batch: the run's own, at its end.

    steps_factor, examples_factor: of that batch, over the fewest steps and the fewest sequences possible.
    """

    noise_scale: float
    batch: int
    seq_len: int
    stretches: list[Stretch]
    n_measured: int

    @property
    def steps_factor(self) -> float:
        return steps_factor(self.batch, self.noise_scale)

    @property
    def examples_factor(self) -> float:
        return examples_factor(self.batch, self.noise_scale)

    def choices(self) -> list[int]:
        """Batches to compare: powers of two around the critical one, and the run's own."""
        middle = max(0, round(math.log2(max(self.noise_scale, 1.0))))
        powers = {2 ** max(0, middle + offset) for offset in range(-3, 4)}
        return sorted(powers | {self.batch})


def steps_factor(batch: float, noise_scale: float) -> float:
    """Steps to a loss, over the fewest that any batch takes."""
    return 1.0 + noise_scale / batch


def examples_factor(batch: float, noise_scale: float) -> float:
    """Sequences (and so tokens, and FLOPs) to a loss, over the fewest that any batch takes."""
    return 1.0 + batch / noise_scale


def read_critical_batch(directory: Path) -> CriticalBatch:
    """From a run's records. Raises UserError where it measured no noise, saying how it would."""
    config = load_run_config(directory / "config.yaml")
    rows = _read_rows(directory / "records.jsonl")
    if not rows:
        raise UserError(f"{directory}: its records hold no gradient noise ({_TRACE}, {_SQUARE}); {_how(config)}")
    steps = sorted(rows)
    whole = _noise_scale([rows[step] for step in steps[len(steps) // 2 :]])
    if whole is None:
        raise UserError(
            f"{directory}: over its {len(steps)} measured steps the noise hides the gradient, so that the noise scale "
            "has no figure; measure more steps, or with a larger train.global_batch"
        )
    batch = config.batches.rows(steps[-1] - 1)  # of a ramp, where the run has come to
    return CriticalBatch(whole, batch, config.data.seq_len, _stretches(steps, rows), len(steps))


def _read_rows(path: Path) -> dict[int, tuple[float, float]]:
    """Step -> trace and square, both finite; a step made again after a crash counts as it was made last."""
    found: dict[str, dict[int, float]] = {_TRACE: {}, _SQUARE: {}}
    if path.exists():
        for record in read_records(path):
            if record.name in found and record.kind == "measured" and isinstance(record.value, (int, float)):
                found[record.name][record.step] = float(record.value)
    traces, squares = found[_TRACE], found[_SQUARE]
    both = {step: (traces[step], squares[step]) for step in traces.keys() & squares.keys()}
    return {step: pair for step, pair in both.items() if all(map(math.isfinite, pair))}


def _stretches(steps: Sequence[int], rows: dict[int, tuple[float, float]]) -> list[Stretch]:
    count = min(STRETCHES, len(steps))
    bounds = [index * len(steps) // count for index in range(count + 1)]
    parts = [steps[low:high] for low, high in pairwise(bounds)]
    return [Stretch(part[0], part[-1], _noise_scale([rows[step] for step in part])) for part in parts]


def _noise_scale(pairs: Sequence[tuple[float, float]]) -> float | None:
    """The ratio of the means. None where either is not above 0, which estimates that are unbiased can be."""
    trace, square = (math.fsum(column) / len(pairs) for column in zip(*pairs, strict=True))
    return trace / square if trace > 0 and square > 0 else None


def _how(config: RunConfig) -> str:
    """What a run needs in order to measure it."""
    if config.health.layers_every is None:
        return "health.layers_every is null: 10 measures it at every tenth step"
    if config.rank_rows == config.train.micro_batch and config.rank_rows == config.train.global_batch:
        return (
            f"a step was one micro-batch of {config.rank_rows} sequences, and needs two parts to compare: set "
            f"train.micro_batch to {max(1, config.rank_rows // 4)}, or have several data-parallel ranks"
        )
    return f"it is measured at every {config.health.layers_every}th step, of which there were none"
