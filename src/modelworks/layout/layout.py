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

import itertools
import math
import operator
from dataclasses import dataclass, fields, replace

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
        for axis, degree in zip(AXES, self.degrees, strict=True):
            place = getattr(coordinates, axis)
            if not 0 <= place < degree:
                raise IndexError(f"{axis} {place} is outside a degree of {degree}")
            rank = rank * degree + place
        return rank

    def ranks(self, rank: int, group: str) -> tuple[int, ...]:
        """The ranks of `rank`'s group of that name, itself included, in the order of their places in it.

        Groups are the axes, `world`, and those that combine axes: `dp` (dp_replicate x dp_shard: other rows), `shard`
        (dp_shard x cp: what ZeRO shards over), `data` (all that hold the same parameters), `ep`, `expert_shard` and
        `expert_replicate` (what is left of `shard` and `dp_replicate` for an expert's parameters).
        """
        if group == "world":
            return tuple(range(self.world_size))
        here = self.coordinates(rank)
        if group in AXES:
            degree = self.degrees[AXES.index(group)]
            return tuple(self.rank(replace(here, **{group: place})) for place in range(degree))
        if group in _COMBINED:
            return self._product(here, _COMBINED[group])
        data = self._product(here, _COMBINED["data"])
        place = data.index(rank)
        if group == "ep":
            first = place - place % self.ep
            return data[first : first + self.ep]
        if group in ("expert_shard", "expert_replicate"):
            return self._expert_ranks(data, place, group)
        raise KeyError(f"no group is called {group}")

    def kv_ranks(self, rank: int, n_kv_heads: int) -> tuple[int, ...]:
        """The group `kv`: tensor-parallel ranks that hold a copy of the same key/value heads."""
        tensor = self.ranks(rank, "tp")
        copies = max(1, self.tp // n_kv_heads)
        first = tensor.index(rank) // copies * copies
        return tensor[first : first + copies]

    def tied_ranks(self, rank: int) -> tuple[int, ...]:
        """The group `tied`: the first and last pipeline ranks, which both hold a tied embedding; else `rank` alone."""
        pipeline = self.ranks(rank, "pp")
        ends = (pipeline[0], pipeline[-1])
        return ends if self.pp > 1 and rank in ends else (rank,)

    def size(self, rank: int, group: str) -> int:
        """Ranks in that group, counted without listing them: plans for thousands of ranks ask this often."""
        del rank  # all groups of a name are equally large
        if group == "ep":
            return self.ep
        if group in ("expert_shard", "expert_replicate"):
            copies = self.dp_replicate * self.dp_shard * self.cp // self.ep
            return self._expert_shards if group == "expert_shard" else copies // self._expert_shards
        return math.prod(getattr(self, axis) for axis in _axes(group))

    def place(self, rank: int, group: str) -> int:
        """Where `rank` stands in its group of that name, from 0."""
        here = self.coordinates(rank)
        if group in ("ep", "expert_shard", "expert_replicate"):
            place = self.place(rank, "data")
            number, within = place // self.ep, self._expert_shards
            return {"ep": place % self.ep, "expert_shard": number % within}.get(group, number // within)
        place = 0
        for axis in _axes(group):
            place = place * getattr(self, axis) + getattr(here, axis)
        return place

    def _product(self, here: Coordinates, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that differ from `here` along `axes` only, the last of them running fastest."""
        strides, stride = {}, 1
        for axis, degree in zip(reversed(AXES), reversed(self.degrees), strict=True):
            strides[axis] = stride
            stride *= degree
        first = self.rank(replace(here, **dict.fromkeys(axes, 0)))
        degrees = (range(self.degrees[AXES.index(axis)]) for axis in axes)
        steps = tuple(strides[axis] for axis in axes)
        return tuple(first + sum(map(operator.mul, place, steps)) for place in itertools.product(*degrees))

    def _expert_ranks(self, data: tuple[int, ...], place: int, group: str) -> tuple[int, ...]:
        """Ranks that hold the same experts. Those of one replica shard them, unless an expert group leaves it."""
        same = data[place % self.ep :: self.ep]
        within = self._expert_shards
        number = place // self.ep
        if group == "expert_shard":
            first = number - number % within
            return same[first : first + within]
        return same[number % within :: within]

    @property
    def _expert_shards(self) -> int:
        """Ranks of one replica that hold the same experts; 1 where an expert group leaves it."""
        replica = self.dp_shard * self.cp
        return replica // self.ep if replica % self.ep == 0 else 1


def _axes(group: str) -> tuple[str, ...]:
    """The axes along which the ranks of a group differ, slowest first."""
    if group == "world":
        return AXES
    if group not in _COMBINED and group not in AXES:
        raise KeyError(f"no group is called {group}")
    return _COMBINED.get(group, (group,))


_COMBINED = {
    "dp": ("dp_replicate", "dp_shard"),
    "shard": ("dp_shard", "cp"),
    "data": ("dp_replicate", "dp_shard", "cp"),
}
