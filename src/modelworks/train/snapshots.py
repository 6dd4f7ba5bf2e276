"""`Snapshots`: whole states of a run in host memory, each rank its own part, for going back a few steps.

A snapshot is a copy of what this rank holds: its shards of the weights and of the optimiser's state, the biases of its
routers, and the values that a checkpoint has. Taking it back is bit for bit the state that it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
from torch import Tensor

from modelworks.config import HELD_STATES, UserError, format_bytes
from modelworks.models import routing_state
from modelworks.train.derivation import Decision
from modelworks.train.experts import set_expert_biases
from modelworks.train.saved_values import SavedValues
from modelworks.train.state import TrainState

_SHARE = 0.25  # of the free memory of a machine: the steps to come need some, too
_KEY = "health.rollback_from"


@dataclass(frozen=True)
class _Snapshot:
    step: int
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    biases: dict[str, Tensor]
    values: dict[str, Any]
    metrics: dict[str, float]


class Snapshots:
    """Of one rank. All ranks take, drop and go back to the same steps."""

    def __init__(self) -> None:
        self._held: list[_Snapshot] = []  # oldest first

    def take(self, state: TrainState, *, needed_from: int) -> None:
        """Keep a copy of the state. needed_from: the earliest step that may be gone back to; what is older than the
        newest one before it is dropped first."""
        older = [snapshot for snapshot in self._held if snapshot.step <= needed_from]
        self._held = [*older[-1:], *(each for each in self._held if needed_from < each.step < state.step)]
        self._held.append(
            _Snapshot(
                state.step,
                _copies(state.model.stored.items()),
                _copies(state.optimizer.named_state()),
                _copies(_biases(state)),
                state.values(),
                dict(state.metrics),
            )
        )

    def newest(self, step: int) -> int | None:
        """Of that step or before it; later ones are dropped."""
        self._held = [snapshot for snapshot in self._held if snapshot.step <= step]
        return self._held[-1].step if self._held else None

    def restore(self, state: TrainState) -> None:
        """Let the state be that of the newest snapshot, but for what it skipped."""
        snapshot = self._held[-1]
        saved = SavedValues(snapshot.values, snapshot.step)
        state.model.gradients.load(lambda spec, out: _set(out, snapshot.weights[spec.name]))
        state.optimizer.load_state(snapshot.optimizer.items(), saved.updates())
        state.take_values(saved)
        set_expert_biases(state.model, snapshot.biases)
        state.step, state.metrics = snapshot.step, dict(snapshot.metrics)


def choose_place(state: TrainState, wanted: str, ranks_here: int) -> Decision:
    """Whether snapshots are kept: `value` is memory or disk. wanted: `health.rollback_from`. All ranks call it, and
    decide alike. Raises UserError where memory is asked for and there is too little."""
    if wanted == "disk":
        return Decision(_KEY, "disk", "asked for: states of checkpoints")
    tensors = [*state.model.stored.values(), *(tensor for _, tensor in state.optimizer.named_state())]
    needed = HELD_STATES * sum(tensor.nbytes for tensor in tensors)
    free = psutil.virtual_memory().available
    ranks = state.model.mesh.group("world").gather_objects((needed, int(_SHARE * free) // ranks_here))
    needed, room = max(ranks, key=lambda rank: rank[0] - rank[1])
    sizes = f"{HELD_STATES} states of {format_bytes(needed // HELD_STATES)} on each rank"
    if needed <= room:
        return Decision(_KEY, "memory", f"{sizes}, and the last checkpoint where none of them is old enough")
    if wanted == "memory":
        raise UserError(
            f"{_KEY}: memory needs {format_bytes(needed)} on each rank ({sizes}), expected at most "
            f"{format_bytes(room)}, {_SHARE:.0%} of what is free; use disk or auto"
        )
    return Decision(_KEY, "disk", f"{sizes} are more than {_SHARE:.0%} of the free memory, {format_bytes(room)}")


def _biases(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    for part in state.model.parts.values():
        yield from routing_state(part).items()


def _copies(tensors: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors}


def _set(out: Tensor, value: Tensor) -> None:
    out.copy_(value)
