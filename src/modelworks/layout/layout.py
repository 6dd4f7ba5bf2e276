"""`Layout`: the degrees of parallelism of a run, and where each rank stands.

Ranks are numbered with the last axis of `AXES` running fastest:

    pp      pipeline stages             sends the least, so its ranks may be farthest apart
    dp_replicate, dp_shard              data parallel: whole replicas, and shards of one
    cp      context (sequence) parallel
    tp      tensor parallel             sends the most, so its ranks are neighbours

    pp 2, tp 2, the rest 1:     stage 0: ranks 0 1      stage 1: ranks 2 3

Invariant: rank <-> coordinates is a bijection of range(world_size). Experts are spread inside this world: an expert
group is `ep` ranks that are consecutive along (dp_replicate, dp_shard, cp), so `ep` adds no ranks.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, fields, replace

from modelworks.config import ParallelConfig, UserError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # slowest first


@dataclass(frozen=True)
class Coordinates:
    """A rank's place along each axis, from 0."""

    pp: int = 0
    dp_replicate: int = 0
    dp_shard: int = 0
    cp: int = 0
    tp: int = 0


@dataclass(frozen=True)
class Layout:
    """Degrees, each at least 1. Raises UserError when one is not, or `ep` does not divide its ranks."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise UserError(f"parallel.{field.name}: got {getattr(self, field.name)}, expected at least 1")
        ranks = self.dp_replicate * self.dp_shard * self.cp
        if ranks % self.ep:
            raise UserError(
                f"parallel.ep: got {self.ep}, expected a divisor of dp_replicate * dp_shard * cp, which is {ranks}"
            )

    @classmethod
    def of(cls, parallel: ParallelConfig) -> Layout:
        """The layout that a run description asks for."""
        return cls(**{field.name: getattr(parallel, field.name) for field in fields(cls)})

    @property
    def world_size(self) -> int:
        return math.prod(self.degrees)

    @property
    def degrees(self) -> tuple[int, ...]:
        """The degree along each axis, in the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` stands. Raises IndexError outside range(world_size)."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is outside a world of {self.world_size}")
        places = []
        for degree in reversed(self.degrees):
            rank, place = divmod(rank, degree)
            places.append(place)
        return Coordinates(*reversed(places))

    def rank(self, coordinates: Coordinates) -> int:
        """The inverse of `coordinates`."""
        rank = 0
        for axis, place, degree in zip(AXES, astuple(coordinates), self.degrees, strict=True):
            if not 0 <= place < degree:
                raise IndexError(f"{axis} {place} is outside a degree of {degree}")
            rank = rank * degree + place
        return rank

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axis` only, `rank` included, in order of their place."""
        here = self.coordinates(rank)
        degree = self.degrees[AXES.index(axis)]
        return tuple(self.rank(replace(here, **{axis: place})) for place in range(degree))
