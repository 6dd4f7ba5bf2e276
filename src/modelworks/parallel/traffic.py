"""What a rank sent: calls and bytes by kind of collective and by axis, counted where the collective is called.

Bytes are what one rank puts on the wire by the ring formulas (Thakur, Rabenseifner, Gropp 2005), with N ranks and a
whole tensor of S bytes (of an all-gather its result, of a reduce-scatter its input):

    all-reduce 2 (N - 1) / N S      all-gather, reduce-scatter, all-to-all (N - 1) / N S      send S

Whatever algorithm a backend chooses, none sends less, so counts of different layouts can be compared with the
planner's. Invariant: a group of one sends nothing and is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Volume:
    """calls of one kind along one axis, and bytes sent by this rank."""

    calls: int = 0
    bytes: float = 0.0


@dataclass
class Traffic:
    """Volumes by (axis, kind). One for each rank; cleared by whoever reads it once a step."""

    volumes: dict[tuple[str, str], Volume] = field(default_factory=dict)

    def add(self, axis: str, kind: str, size: float) -> None:
        volume = self.volumes.setdefault((axis, kind), Volume())
        volume.calls += 1
        volume.bytes += size

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What is sent inside is no part of training: figures of it are not compared with formulas."""
        counted = {key: Volume(volume.calls, volume.bytes) for key, volume in self.volumes.items()}
        yield
        self.volumes = counted

    def take(self) -> dict[tuple[str, str], Volume]:
        """What was counted since the last call."""
        taken, self.volumes = self.volumes, {}
        return taken

    def __iter__(self) -> Iterator[tuple[str, str, Volume]]:
        return ((axis, kind, volume) for (axis, kind), volume in sorted(self.volumes.items()))
