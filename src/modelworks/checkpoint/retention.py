"""Which checkpoints are kept.

The invariant: only complete checkpoints count towards what is kept, at least one of them always stays, and neither the
one that was just saved nor one that is protected is ever removed. Damaged and half-written ones are left alone: someone
may want to look at them.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from modelworks.checkpoint.errors import CheckpointError
from modelworks.checkpoint.faults import reached
from modelworks.checkpoint.manifest import decode_numbers, read_manifest
from modelworks.checkpoint.names import step_number
from modelworks.checkpoint.storage import Storage

Best = tuple[str, Literal["min", "max"]]  # a metric, and which of its values is the better one
_Metrics = dict[str, object]


@dataclass
class Retention:
    """Kept are the `keep_last` newest, steps that are a multiple of `keep_every`, the best by a metric, and `protect`:
    names, such as that of the checkpoint which the run was resumed from. back_to: a step that the run may go back to;
    the newest at or before it is kept."""

    storage: Storage
    keep_last: int
    keep_every: int | None = None
    best: Best | None = None
    protect: Collection[str] = ()
    back_to: int | None = None
    # What complete ones said of themselves: a manifest is read once, however many saves follow.
    _known: dict[str, _Metrics] = field(default_factory=dict, repr=False)

    def surplus(self, saved: str | None = None) -> list[str]:
        """Names of what need not be kept, oldest first.

        saved: what was just saved. Later steps than that are of a run that was given up, or damaged ones that a resumed
        run fell back behind: they count for nothing and stay until they are written again.
        """
        if saved is not None:
            self._known.pop(saved, None)
        complete = {
            name: metrics
            for name, metrics in complete_checkpoints(self.storage, self._known).items()
            if saved is None or step_number(name) <= step_number(saved)
        }
        self._known = dict(complete)
        names = list(complete)
        kept = {*names[-max(self.keep_last, 1) :], *self.protect, saved}
        kept |= {name for name in names if self.keep_every and step_number(name) % self.keep_every == 0}
        if self.best is not None:
            kept.add(_best(complete, *self.best))
        if self.back_to is not None:
            kept.update([name for name in names if step_number(name) <= self.back_to][-1:])
        return [name for name in names if name not in kept]

    def remove(self, saved: str | None = None) -> list[str]:
        """Remove the surplus and return its names. Raises OSError."""
        removed = self.surplus(saved)
        for name in removed:
            reached("before an old one is removed")
            self.storage.remove(name)
            self._known.pop(name, None)
        return removed


def best_checkpoint(storage: Storage, metric: str, mode: Literal["min", "max"]) -> str | None:
    """Name of the complete checkpoint with the best finite value of `metric`, the newest of equals; None if none has
    it."""
    return _best(complete_checkpoints(storage), metric, mode)


def complete_checkpoints(storage: Storage, known: dict[str, _Metrics] | None = None) -> dict[str, _Metrics]:
    """Name -> metrics of those with a valid manifest and every file there with its size, oldest first.

    known: of those that need not be looked at again.
    """
    found = {}
    for name in storage.checkpoints():
        if known is not None and name in known:
            found[name] = known[name]
            continue
        try:
            found[name] = read_manifest(storage.folder(name)).metrics
        except (CheckpointError, OSError):
            continue
    return found


def _best(complete: dict[str, _Metrics], metric: str, mode: Literal["min", "max"]) -> str | None:
    sign = 1.0 if mode == "min" else -1.0
    scored = []
    for name, metrics in complete.items():
        value = decode_numbers(metrics.get(metric))
        if isinstance(value, int | float) and math.isfinite(value):
            scored.append((sign * value, -step_number(name), name))
    return min(scored)[2] if scored else None
