"""What a checkpoint's `state` says besides tensors, believed only as far as it makes sense.

A manifest that was edited by hand and given a new checksum is no damaged one. Raised is ValueError, naming the key,
what it holds, and what was expected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelworks.data import Skips
from modelworks.train.health import Judge, Monitor, NoiseScale
from modelworks.train.precision import LossScaler

_SHOWN = 80  # characters of a value that makes no sense


@dataclass(frozen=True)
class SavedValues:
    """step: of the checkpoint, which bounds all counts."""

    values: Mapping[str, Any]
    step: int

    def updates(self) -> int:
        return self._count("updates", self._get("updates"))

    def best(self) -> tuple[float, int] | None:
        """(value, step) of the best evaluation so far."""
        best = self._get("best")
        if best is None:
            return None
        value = best.get("value") if isinstance(best, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _wrong("best", best, 'null or {"value": a finite number, "step": its step}')
        return float(value), self._count("best.step", best.get("step"))

    def set_scale(self, scaler: LossScaler) -> None:
        state = self._get("loss_scaler")
        try:
            scaler.load_state(state)
        except (KeyError, TypeError, ValueError):
            raise _wrong("loss_scaler", state, '{"scale": a number, "good_steps": a whole number}') from None

    def set_health(self, monitor: Monitor) -> None:
        """A run that did not watch has nothing to go on from: the monitor then begins anew."""
        state = self.values.get("health")
        if state is None:
            return
        try:
            monitor.load_state(state)
        except (KeyError, TypeError, ValueError):
            raise _wrong("health", state, "what a monitor saved, or null") from None

    def set_noise(self, noise: NoiseScale) -> None:
        """A run that did not measure it has none; the average then begins anew."""
        state = self.values.get("noise")
        if state is None:
            return
        try:
            noise.load_state(state)
        except (KeyError, TypeError, ValueError):
            raise _wrong("noise", state, "averages that a run saved, or null") from None

    def set_judge(self, judge: Judge) -> None:
        """A run that was not judged has no course: the judge then begins anew."""
        state = self.values.get("judgements")
        if state is None:
            return
        try:
            judge.load_state(state)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise _wrong("judgements", state, "what a judge saved, or null") from None

    def set_skips(self, skips: Skips) -> None:
        """A run that never went back left nothing out."""
        state = self.values.get("skips", [])
        try:
            skips.load_state(state)
        except (TypeError, ValueError):
            raise _wrong("skips", state, "rows of [spike, good, first, end], whole numbers") from None

    def _get(self, key: str) -> Any:
        if key not in self.values:
            raise ValueError(f"`state.{key}` is missing from its manifest")
        return self.values[key]

    def _count(self, key: str, value: object) -> int:
        if type(value) is not int or not 0 <= value <= self.step:
            raise _wrong(key, value, f"a whole number from 0 to its {self.step} steps")
        return value


def _wrong(key: str, value: object, expected: str) -> ValueError:
    text = repr(value)
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    return ValueError(f"`state.{key}` is {shown}, expected {expected}")
