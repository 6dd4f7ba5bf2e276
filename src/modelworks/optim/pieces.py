"""What a rule works on: pieces of parameters with their gradients and state, and batches of them that fit the cache.

A rule is a formula over lists of tensors. Where torch has a fused kernel for the whole of it, that runs on whole lists;
on a CPU those without one have compiled kernels of ours (`modelworks.optim.compiled`). What is left, other devices and
a CPU without a compiler, runs torch's operations one after the other, and each would go through all of memory: so a
large tensor is cut, small ones are put together, and all passes are made over one batch before the next. On a CPU what
a batch holds stays in the second-level cache; on other devices batches only bound the scratch memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from modelworks.layout import ShardSpec
from modelworks.optim.groups import ParameterOptions
from modelworks.optim.sums import Sums

# Bytes of one tensor's part in a batch, for each thread. Scratch of 128 KB and more is mapped and unmapped by glibc
# each time, which costs as much as the arithmetic.
_CACHED = 64 * 1024
_SCRATCH = 256 * 2**20  # bytes, on devices other than a CPU


@dataclass(frozen=True)
class Piece:
    """One parameter in one step, or the slice of it that this rank holds. All tensors are contiguous.

    value: what the update changes. gradient: of its shape, dtype and device. state: by kind, updated in place, of the
    shapes that the rule asked for.
    """

    spec: ShardSpec
    value: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    options: ParameterOptions

    @property
    def name(self) -> str:
        return self.spec.name


@dataclass(frozen=True)
class Step:
    """lr: the schedule's rate. number: of this update, from 1: t of bias corrections."""

    lr: float
    number: int


class Rule(Protocol):
    """One optimiser's formula. A value: nothing in it changes."""

    def states(self, spec: ShardSpec) -> dict[str, ShardSpec]:
        """What is kept for a slice of a parameter: kind -> logical shape and the slice of it that goes with `spec`.
        Zeros at first, float32 or wider. Kinds must be the same on every rank."""

    def update(self, pieces: Sequence[Piece], step: Step, sums: Sums) -> None:
        """Change values and state in place. Called on every rank, also on one without pieces, as `sums` may talk."""


def alike(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces with elements, in lists that share options, dtype and device: what one kernel can take."""
    groups: dict[object, list[Piece]] = {}
    for piece in pieces:
        if piece.value.numel():
            groups.setdefault((piece.options, piece.value.dtype, piece.value.device), []).append(piece)
    yield from groups.values()


@dataclass(frozen=True)
class Batch:
    """Flat parts of tensors. owners: which piece each is of. columns: value, gradient, then the states asked for."""

    owners: list[int]
    columns: tuple[list[Tensor], ...]


def batch_elements(tensor: Tensor) -> int:
    """How many elements of tensors like this one a batch has at most."""
    size = _CACHED * torch.get_num_threads() if tensor.device.type == "cpu" else _SCRATCH
    return size // tensor.element_size()


def batches(pieces: Sequence[Piece], *kinds: str) -> Iterator[Batch]:
    """All elements of `pieces` (of one dtype and device, as from `alike`). A large tensor is cut, small ones are put
    together."""
    if not pieces:
        return
    limit = batch_elements(pieces[0].value)
    small = Batch([], tuple([] for _ in range(2 + len(kinds))))
    room = limit
    for owner, piece in enumerate(pieces):
        flat = [tensor.reshape(-1) for tensor in (piece.value, piece.gradient, *(piece.state[k] for k in kinds))]
        size = flat[0].numel()
        if size >= limit:
            for parts in zip(*(torch.split(tensor, limit) for tensor in flat), strict=True):
                yield Batch([owner], tuple([part] for part in parts))
            continue
        if size > room:
            yield small
            small, room = Batch([], tuple([] for _ in small.columns)), limit
        small.owners.append(owner)
        for column, tensor in zip(small.columns, flat, strict=True):
            column.append(tensor)
        room -= size
    if small.owners:
        yield small
