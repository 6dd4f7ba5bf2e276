"""Whole matrices from shards, computed once each: the work of one step spread over the ranks that hold them.

Of every matrix one of its holders is the owner, by a rule that all ranks work out alone: the dearest matrices first,
each to the holder with the least to do. The owner receives the slices that it lacks from ranks that count them,
computes, and sends each holder its slice of the result, so that copies stay bit for bit alike.

A rank works on one matrix at a time, while the slices of the next one come and those of the result before go out:
beside its own slices it holds two whole matrices and two results at most. All ranks start messages in the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from torch import Tensor

from modelworks.layout import ShardSpec
from modelworks.optim.orthogonal import is_matrix
from modelworks.parallel.mesh import Mesh

Specs = Mapping[str, ShardSpec]
T = TypeVar("T")


@dataclass(frozen=True)
class _Job:
    """One matrix. index: in a stack of experts, None for a matrix by itself. holders: rank -> its slice."""

    name: str
    index: int | None
    shape: tuple[int, ...]
    holders: dict[int, ShardSpec]
    owner: int

    def part(self, rank: int, tensor: Tensor) -> Tensor:
        """This matrix's part of a holder's slice."""
        return tensor if self.index is None else tensor[self.index - self.holders[rank].bounds[0][0]]

    def place(self, rank: int) -> tuple[slice, ...]:
        """Where a holder's part lies in the matrix."""
        return self.holders[rank].slices[-2:]

    def senders(self) -> list[int]:
        """Who sends the owner what it lacks: a rank for every slice, the owner itself for the one that it has."""
        own = self.holders[self.owner].bounds[-2:]
        return [r for r, s in self.holders.items() if r == self.owner or (s.counted and s.bounds[-2:] != own)]


class MatrixExchange:
    """specs_of: rank -> what it stores, by name. Calls are collective, with matrices of the same names everywhere."""

    def __init__(self, mesh: Mesh, specs_of: Callable[[int], Specs]) -> None:
        self._mesh = mesh
        self._specs_of = specs_of
        self._rounds = cache(self._plan)

    def __call__(
        self, slices: Mapping[str, Tensor], specs: Mapping[str, ShardSpec], compute: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """See `optim.orthogonal.WholeMatrices`."""
        results = {name: tensor.new_empty(tensor.shape) for name, tensor in slices.items()}
        rounds = self._rounds(frozenset(slices))
        gathers = _one_ahead(self._gather(jobs, slices) for jobs in rounds)
        returned: Callable[[], None] | None = None
        for jobs, gathered in zip(rounds, gathers, strict=True):
            computed = {number: compute(whole) for number, whole in gathered().items()}
            if returned:
                returned()
            returned = self._return(jobs, computed, results)
        if returned:
            returned()
        return results

    def _gather(self, jobs: list[_Job], slices: Mapping[str, Tensor]) -> Callable[[], dict[int, Tensor]]:
        """Starts it. What it returns waits, and gives the matrices of one round that this rank owns (one at most), by
        number."""
        rank = self._mesh.rank
        sends, receives, wholes, places = [], [], {}, []
        for number, job in enumerate(jobs):
            if job.owner == rank:
                own = job.part(rank, slices[job.name]).to(self._mesh.device)  # offloaded state is on the host
                wholes[number] = own.new_empty(job.shape)
                wholes[number][job.place(rank)] = own
                for sender in job.senders():
                    if sender != rank:
                        buffer = own.new_empty(wholes[number][job.place(sender)].shape)
                        receives.append((buffer, sender))
                        places.append((number, job.place(sender)))
            elif rank in job.senders():
                part = job.part(rank, slices[job.name]).to(self._mesh.device).contiguous()
                sends.append((part, job.owner))
        wait = self._talk(sends, receives)

        def finish() -> dict[int, Tensor]:
            wait()
            for (buffer, _), (number, place) in zip(receives, places, strict=True):
                wholes[number][place] = buffer
            return wholes

        return finish

    def _return(
        self, jobs: list[_Job], computed: Mapping[int, Tensor], results: Mapping[str, Tensor]
    ) -> Callable[[], None]:
        """Starts it. What it returns waits, and then the results of one round are there."""
        rank = self._mesh.rank
        sends, receives, targets = [], [], []
        for number, job in enumerate(jobs):
            if rank not in job.holders:
                continue
            target = job.part(rank, results[job.name])
            if job.owner == rank:
                target.copy_(computed[number][job.place(rank)])
                others = [holder for holder in job.holders if holder != rank]
                sends += [(computed[number][job.place(holder)].contiguous(), holder) for holder in others]
            else:
                receives.append((target.new_empty(target.shape, device=self._mesh.device), job.owner))
                targets.append(target)
        wait = self._talk(sends, receives)

        def finish() -> None:
            wait()
            for (buffer, _), target in zip(receives, targets, strict=True):
                target.copy_(buffer)

        return finish

    def _talk(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> Callable[[], None]:
        """Between two ranks messages arrive in the order of the jobs, on both sides the same. Returns what waits for
        them; until then it keeps what is sent."""
        works = self._mesh.group("world").exchange(sends, receives)

        def wait() -> None:
            for work in works:
                work.wait()
            sends.clear()

        return wait

    def _plan(self, own: frozenset[str]) -> list[list[_Job]]:
        """Rounds in which a rank owns one matrix at most; the same on every rank. own: what this rank hands in."""
        n_ranks = self._mesh.layout.world_size
        held = [self._specs_of(rank) for rank in range(n_ranks)]
        held[self._mesh.rank] = {name: spec for name, spec in held[self._mesh.rank].items() if name in own}
        return plan_rounds(held, lambda spec: is_matrix(spec.name, spec.shape))


def _one_ahead(items: Iterator[T]) -> Iterator[T]:
    """Each item when the next one has been made."""
    last: list[T] = []
    for item in items:
        yield from last
        last = [item]
    yield from last


def plan_rounds(held: list[Specs], wanted: Callable[[ShardSpec], bool]) -> list[list[_Job]]:
    """held: by rank, what it stores. wanted: whether a parameter is a matrix, or a stack of them."""
    found: dict[tuple[str, int | None], dict[int, ShardSpec]] = defaultdict(dict)
    for rank, specs in enumerate(held):
        for name, spec in specs.items():
            if wanted(spec) and spec.n_local:
                stacked = range(*spec.bounds[0]) if len(spec.shape) == 3 else [None]
                for index in stacked:
                    found[name, index][rank] = spec
    shapes = {spec.name: spec.shape[-2:] for holders in found.values() for spec in holders.values()}

    def cost(key: tuple[str, int | None]) -> int:
        rows, columns = shapes[key[0]]
        return rows * columns * min(rows, columns)

    load = [0] * len(held)
    queues: list[list[_Job]] = [[] for _ in held]
    for key in sorted(found, key=lambda key: (-cost(key), key[0], key[1] or 0)):
        holders = found[key]
        owner = min(holders, key=lambda rank: (load[rank], rank))
        load[owner] += cost(key)
        queues[owner].append(_Job(*key, shapes[key[0]], holders, owner))
    rounds: list[list[_Job]] = []
    for queue in queues:
        for number, job in enumerate(queue):
            if number == len(rounds):
                rounds.append([])
            rounds[number].append(job)
    return rounds
