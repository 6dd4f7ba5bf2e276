"""`Judge`: what the course of a run shows, said once, with its evidence.

    overfitting     the training loss falls, and the validation loss has been above its lowest for 3 evaluations
    plateau         from one quarter of the steps to the next, the last, the loss falls by less than half a percent
    growing norm    the gradient norm has grown threefold over the last half of the steps, steadily
    dead layer      a layer's gradient is nothing, beside that of the others
    exploding layer a layer's gradient has grown thirtyfold beside that of the others, or an update moves half of it
    drop            one evaluation is suddenly worse than those before
    off the law     the loss is above what a power law fitted to the first half of the steps says

All are functions of numbers that every rank has alike, and of the state, which is saved with each checkpoint. A finding
is said once; one about evaluations again after there was a new best.

The limits were chosen on simulated clean runs, see docs/health.md for the rates of false alarms measured on others.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelworks.config import HealthConfig
from modelworks.train.health.course import DEVIATION, Block, Course, fit_law

LEAST_BLOCKS = 32  # before the course is judged: 512 steps
_WORSE_IN_A_ROW = 3  # evaluations
_LEAST_EVALUATIONS = 5  # before one of them can be a drop
_LAYERS_IN_A_ROW = 5  # measurements of layers
_LEAST_SEEN = 12  # earlier measurements of a layer before it can have grown
_LAYERS_SEEN = 64  # that are remembered: what grows over fewer of them than half is seen
_EVALUATIONS_SEEN = 12
_LOWER_IS_BETTER = ("loss", "perplexity", "bits_per_byte", "brier")


@dataclass(frozen=True)
class Finding:
    """kind: as the module has them. subject: what it is about (a layer, a metric), empty for the run. text: in words.
    evidence: numbers."""

    kind: str
    subject: str
    text: str
    evidence: dict[str, float]


class Judge:
    """One run's. warmup_steps: of the schedule; what comes before twice of them is no part of a law."""

    def __init__(self, config: HealthConfig, *, warmup_steps: int) -> None:
        self._config, self._warmup = config, warmup_steps
        self._course = Course()
        self._said: set[str] = set()
        self._evaluations: dict[str, list[float]] = {}
        self._best: tuple[float, float, int] | None = None  # validation loss, training loss, step
        self._worse = 0  # evaluations in a row
        self._layers: dict[str, list[float]] = {}  # log of the gradient norm over that of the median layer
        self._ill: dict[str, int] = {}  # measurements in a row

    def step(self, step: int, loss: float, norm: float) -> list[Finding]:
        """Of an accepted step (from 1)."""
        if not self._course.add(step, loss, norm) or len(self._course.blocks) < LEAST_BLOCKS:
            return []
        blocks = self._course.blocks
        return self._new([*_plateau(blocks), *_growing(blocks), *_off_the_law(blocks, 2 * self._warmup)])

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """metrics: by name, `val_loss` among them."""
        found = list(self._overfitting(step, metrics["val_loss"])) if "val_loss" in metrics else []
        for name, value in metrics.items():
            if name in ("val_perplexity", "val_bits_per_byte"):  # the validation loss in other words
                continue
            found += self._drop(name, value)
        return self._new(found)

    def layers(
        self, names: Sequence[str], grad_norms: Sequence[float], ratios: Sequence[float] | None
    ) -> list[Finding]:
        """Of one measurement. ratios: update over weights; None where there was no update."""
        if not all(map(math.isfinite, grad_norms)):
            return []
        typical = statistics.median(grad_norms)
        found: list[Finding] = []
        for place, name in enumerate(names):
            norm, ratio = grad_norms[place], ratios[place] if ratios else None
            found += self._layer(name, norm, typical, ratio)
        return self._new(found)

    @property
    def ends(self) -> bool:
        """Whether the run has been found to overfit, and is to end then."""
        return self._config.overfitting == "stop" and "overfitting/" in self._said

    def _overfitting(self, step: int, value: float) -> Iterator[Finding]:
        train = self._course.level
        if self._config.overfitting == "off" or not math.isfinite(value) or train is None:
            return
        if self._best is None or value < self._best[0]:
            self._best, self._worse = (value, train, step), 0
            self._said -= {"overfitting/", "drop/val_loss"}
            return
        lowest, then, at = self._best
        self._worse = self._worse + 1 if value > 1.01 * lowest else 0
        if self._worse >= _WORSE_IN_A_ROW and train < 0.99 * then:
            text = (
                f"the validation loss has risen to {value:.4g} from {lowest:.4g} at step {at:,}, while the training "
                f"loss has fallen to {train:.4g} from {then:.4g}"
            )
            evidence = {"val_loss": value, "lowest": lowest, "lowest_step": at, "train": train, "train_then": then}
            yield Finding("overfitting", "", text, evidence)

    def _drop(self, name: str, value: float) -> Iterator[Finding]:
        past = self._evaluations.setdefault(name, [])
        if not math.isfinite(value):
            return
        sign = 1.0 if any(word in name for word in _LOWER_IS_BETTER) else -1.0
        if past and sign * value < min(sign * each for each in past):
            self._said.discard(f"drop/{name}")
        if len(past) >= _LEAST_EVALUATIONS:
            usual = statistics.median(past[-_LEAST_EVALUATIONS:])
            changes = [sign * (after - before) for before, after in itertools.pairwise(past)]  # above 0: worse
            deviation = DEVIATION * statistics.median(map(abs, changes))
            worse = sign * (value - usual)
            if worse > max(8 * deviation, 2 * max(changes), 0.1 * abs(usual)):
                text = f"{name} is {value:.4g} after {usual:.4g} (median of {_LEAST_EVALUATIONS} evaluations)"
                yield Finding("drop", name, text, {"value": value, "usual": usual, "deviation": deviation})
        self._evaluations[name] = [*past, value][-_EVALUATIONS_SEEN:]

    def _layer(self, name: str, norm: float, typical: float, ratio: float | None) -> Iterator[Finding]:
        past = self._layers.setdefault(name, [])
        share = math.log(norm / typical) if norm > 0 and typical > 0 else -math.inf
        usual = statistics.median(past) if len(past) >= _LEAST_SEEN else None
        dead = typical > 0 and norm < 1e-6 * typical
        grown = usual is not None and share > usual + math.log(30)
        moved = ratio is not None and ratio > 0.5
        for kind, ill in (("dead layer", dead), ("exploding layer", grown or moved)):
            key = f"{kind}/{name}"
            self._ill[key] = self._ill.get(key, 0) + 1 if ill else 0
            if self._ill[key] == _LAYERS_IN_A_ROW:
                what = "the median layer's"
                text = f"the gradient norm of {name} is {norm:.3g}, {what} {typical:.3g}"
                if grown and usual is not None:
                    text += f"; it used to be {math.exp(usual):.3g} times {what}"
                if moved and ratio is not None:
                    text += f"; an update moves it by {ratio:.0%} of its norm"
                yield Finding(kind, name, text, {"grad_norm": norm, "typical": typical})
        if math.isfinite(share) and not grown:  # what has grown does not become the usual
            self._layers[name] = [*past, share][-_LAYERS_SEEN:]

    def _new(self, found: Sequence[Finding]) -> list[Finding]:
        fresh = [finding for finding in found if f"{finding.kind}/{finding.subject}" not in self._said]
        self._said |= {f"{finding.kind}/{finding.subject}" for finding in fresh}
        return fresh

    def state(self) -> dict[str, Any]:
        """For a checkpoint: numbers, lists and text."""
        return {
            "course": self._course.state(),
            "said": sorted(self._said),
            "evaluations": {name: list(values) for name, values in self._evaluations.items()},
            "best": self._best and list(self._best),
            "worse": self._worse,
            "layers": {name: list(values) for name, values in self._layers.items()},
            "ill": dict(self._ill),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Raises KeyError, TypeError, ValueError or AttributeError for what is none."""
        self._course.load_state(state["course"])
        self._said = set(map(str, state["said"]))
        self._evaluations = {str(name): list(map(float, row)) for name, row in state["evaluations"].items()}
        self._layers = {str(name): list(map(float, row)) for name, row in state["layers"].items()}
        best = state["best"]
        self._best = None if best is None else (float(best[0]), float(best[1]), int(best[2]))
        self._worse, self._ill = int(state["worse"]), {str(name): int(count) for name, count in state["ill"].items()}


def _plateau(blocks: Sequence[Block]) -> Iterator[Finding]:
    """How far the loss falls from one quarter to the next is told by the slope of both (Theil 1950, Sen 1968: the
    median of the slopes of all pairs): nearly half again as sure as the difference of their medians."""
    quarter = len(blocks) // 4
    losses = [block.loss for block in blocks[-2 * quarter :]]
    then, now = statistics.median(losses[:quarter]), statistics.median(losses[quarter:])
    pairs = itertools.combinations(range(len(losses)), 2)
    slope = statistics.median((losses[after] - losses[before]) / (after - before) for before, after in pairs)
    around = [loss - slope * place for place, loss in enumerate(losses)]
    middle = statistics.median(around)
    deviation = DEVIATION * statistics.median(abs(each - middle) for each in around)
    # Of a slope through n places: sqrt(12 / n^3) deviations; over half of them sqrt(3 / n).
    fallen, error = -slope * quarter, deviation * math.sqrt(3 / len(losses))
    if fallen + 2 * error < 0.005 * now:
        first = blocks[-quarter].step
        text = f"since about step {first:,.0f} the loss is {now:.4g}; in as many steps before it was {then:.4g}"
        yield Finding("plateau", "", text, {"since": first, "loss": now, "before": then, "error": error})


def _growing(blocks: Sequence[Block]) -> Iterator[Finding]:
    half = [block.norm for block in blocks[len(blocks) // 2 :]]
    part = len(half) // 4
    levels = [statistics.median(half[place * part : (place + 1) * part]) for place in range(4)]
    rises = [after - before for before, after in itertools.pairwise(levels)]
    if levels[-1] - levels[0] > math.log(3) and min(rises) > 0.2:
        first = blocks[len(blocks) // 2].step
        now, then = math.exp(levels[-1]), math.exp(levels[0])
        text = f"the gradient norm has grown steadily since about step {first:,.0f}: {then:.3g}, now {now:.3g}"
        yield Finding("growing norm", "", text, {"since": first, "now": now, "then": then})


def _off_the_law(blocks: Sequence[Block], begin: float) -> Iterator[Finding]:
    end = blocks[-1].step / 2
    earlier = [block for block in blocks if max(begin, end / 8) < block.step <= end]
    last = blocks[-(len(blocks) // 4) :]
    if len(earlier) < 8 or (law := fit_law(earlier, last)) is None:
        return
    now = statistics.median(block.loss for block in last)
    if now > max(law.high + 4 * law.deviation / math.sqrt(len(last)), 1.05 * law.high):
        text = (
            f"the loss is {now:.4g}, and {law.low:.4g} to {law.high:.4g} was to be expected from the first half of the "
            f"steps ({law.floor:.3g} + A / step^{law.exponent:.2g})"
        )
        evidence = {"loss": now, "low": law.low, "high": law.high, "floor": law.floor, "exponent": law.exponent}
        yield Finding("off the law", "", text, evidence)
