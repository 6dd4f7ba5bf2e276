"""Communication on paper: collectives by the group that they run over and by kind, with what one rank sends.

Bytes are those of the ring formulas (see `modelworks.parallel.traffic`, which counts by the same rules as the run
goes): of N ranks and a whole tensor of S bytes, an all-reduce sends 2 (N - 1)/N S, an all-gather, reduce-scatter or
all-to-all (N - 1)/N S, and a send S.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

Sent = dict[tuple[str, str], "Volume"]  # (group, kind of collective) -> what one rank sends


class Volume(NamedTuple):
    """Calls of one kind along one axis, and the bytes that one rank sends in all of them."""

    calls: int
    bytes: float


class Tally:
    """Adds up what is sent. A group of one rank sends nothing and is left out."""

    def __init__(self) -> None:
        self._volumes: Sent = {}

    def all_reduce(self, group: str, ranks: int, size: float, calls: int = 1) -> None:
        """size: bytes of the whole tensor in one call."""
        self._add(group, "all_reduce", ranks, 2 * (ranks - 1) / ranks * size, calls)

    def part(self, group: str, kind: str, ranks: int, size: float, calls: int = 1) -> None:
        """An all-gather, a reduce-scatter or an evenly split all-to-all of `size` bytes in one call."""
        self._add(group, kind, ranks, (ranks - 1) / ranks * size, calls)

    def send(self, group: str, size: float, calls: int = 1) -> None:
        self._add(group, "send", 2, size, calls)

    def all_to_all(self, group: str, ranks: int, size: float, calls: int = 1) -> None:
        """size: bytes that leave this rank in one call."""
        self._add(group, "all_to_all", ranks, size, calls)

    def __iter__(self) -> Iterator[tuple[tuple[str, str], Volume]]:
        return iter(self._volumes.items())

    def _add(self, group: str, kind: str, ranks: int, size: float, calls: int) -> None:
        if ranks == 1 or calls == 0:
            return
        before = self._volumes.get((group, kind), Volume(0, 0.0))
        self._volumes[group, kind] = Volume(before.calls + calls, before.bytes + calls * size)
