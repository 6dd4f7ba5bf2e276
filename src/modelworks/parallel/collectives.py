"""The collectives that we call ourselves, each differentiable one beside its backward and the reason why it is right.

With loss L summed over ranks, the gradient of a tensor is what every rank's use of it contributes:

    copy_to      y_i = x               x is the same on all ranks, each uses it     dx = sum_i dy_i     (all-reduce)
    reduce_from  y = sum_i x_i         y is the same on all ranks, used as one      dx_i = dy           (identity)
    gather_from  y = concat_i x_i      each rank uses all of it in part             dx_i = sum_j dy_j[i]  (red.-scatter)
    gather_copy  y = concat_i x_i      all ranks do the very same with y            dx_i = dy[i]        (slice)
    scatter_to   y_i = (sum_j x_j)[i]  each rank goes on with its slice             dx_j = concat_i dy_i  (all-gather)
    split_to     y_i = x[i]            x is the same on all ranks                   dx = concat_i dy_i  (all-gather)
    all_to_all   y_i = concat_j x_j[i] a permutation of rows over ranks             the reverse exchange

`gather_from` and `gather_copy` compute the same and differ only in what the ranks do afterwards: a tensor-parallel
product uses all tokens with a part of the weights, so gradients are partial sums; a loss that every rank computes
alike from gathered values must not be counted once a rank.

A group of one does nothing. No function here is traced by torch.compile: what counts and labels must run each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from modelworks.parallel.labels import Labels, Operation
from modelworks.parallel.traffic import Traffic
from modelworks.parallel.untraced import not_traced


class Pending:
    """An operation on its way: call it to wait for it and have the result. One without work is done already."""

    def __init__(self, work: Any, result: Tensor) -> None:
        self._work, self._result = work, result

    def __call__(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        return self._result

    @property
    def done(self) -> bool:
        """Whether calling would not wait for another rank."""
        return self._work is None or bool(self._work.is_completed())


class Group:
    """Ranks that talk along one axis. Every operation is counted in `traffic` and announced to `labels`.

    ranks: global numbers in the order of their places; index: this rank's own place. handle: the process group, None
    for a group of one.
    """

    def __init__(
        self, name: str, ranks: Sequence[int], rank: int, handle: Any, traffic: Traffic, labels: Labels | None = None
    ) -> None:
        self.name, self.ranks, self.index = name, tuple(ranks), tuple(ranks).index(rank)
        self.handle, self.traffic = handle, traffic
        self._labels = labels or Labels()

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_reduce_(self, x: Tensor, how: Literal["sum", "max"] = "sum") -> Tensor:
        """In place; returns x."""
        work = self.start_all_reduce_(x, how)
        if work is not None:
            work.wait()
        return x

    def start_all_reduce_(self, x: Tensor, how: Literal["sum", "max"] = "sum") -> Any:
        """In place, without waiting: returns what to `wait()` for, None for a group of one."""
        if self.size == 1:
            return None
        operation = self._begin("all_reduce", 2 * (self.size - 1) / self.size * _bytes(x))
        reduction = dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX
        return _Started(dist.all_reduce(x, reduction, group=self.handle, async_op=True), operation, self._labels, x)

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """Equal parts of all ranks, concatenated along `dim`."""
        if self.size == 1:
            return x
        return _joined_along(self.start_all_gather(x.contiguous())(), self.size, dim)

    def start_all_gather(self, x: Tensor, out: Tensor | None = None) -> Pending:
        """Along dimension 0, without waiting: call what is returned for the result. x: contiguous."""
        if self.size == 1:
            return Pending(None, x if out is None else out.copy_(x))
        operation = self._begin("all_gather", (self.size - 1) * _bytes(x))
        result = x.new_empty((self.size * x.shape[0], *x.shape[1:])) if out is None else out
        work = dist.all_gather_single(result, x, group=self.handle, async_op=True)
        return Pending(_Started(work, operation, self._labels, x), result)

    def reduce_scatter(self, x: Tensor, dim: int = 0) -> Tensor:
        """The sum over ranks, of which each keeps an equal part along `dim`."""
        if self.size == 1:
            return x
        parts = torch.cat(x.chunk(self.size, dim)) if dim else x.contiguous()
        return self.start_reduce_scatter(parts.view(self.size, -1))().view(_part_shape(x.shape, dim, self.size))

    def start_reduce_scatter(self, x: Tensor, out: Tensor | None = None) -> Pending:
        """Along dimension 0, without waiting: call what is returned for the result. x: contiguous."""
        if self.size == 1:
            return Pending(None, x if out is None else out.copy_(x))
        operation = self._begin("reduce_scatter", (self.size - 1) / self.size * _bytes(x))
        result = x.new_empty((x.shape[0] // self.size, *x.shape[1:])) if out is None else out
        work = dist.reduce_scatter_single(result, x, group=self.handle, async_op=True)
        return Pending(_Started(work, operation, self._labels, x), result)

    def all_to_all(self, x: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]) -> Tensor:
        """Rows of x: the first input_splits[0] go to place 0 and so on; what arrives, in the order of places."""
        if self.size == 1:
            return x
        staying = input_splits[self.index] * (_bytes(x) // max(1, x.shape[0]))
        operation = self._begin("all_to_all", _bytes(x) - staying)
        result = x.new_empty((sum(output_splits), *x.shape[1:]))
        parts = (list(output_splits), list(input_splits))
        work = dist.all_to_all_single(result, x.contiguous(), *parts, group=self.handle, async_op=True)
        _Started(work, operation, self._labels, x).wait()
        return result

    def exchange(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> list[Any]:
        """Start sending tensors to places and receiving into tensors from places; returns what to `wait()` for.

        Two ranks that do this at the same time cannot wait for each other in the wrong order.
        """
        transfers = [dist.P2POp(dist.isend, tensor, self.ranks[place], self.handle) for tensor, place in sends]
        transfers += [dist.P2POp(dist.irecv, tensor, self.ranks[place], self.handle) for tensor, place in receives]
        if not transfers:
            return []
        for tensor, _ in sends:
            self.traffic.add(self.name, "send", _bytes(tensor))
        others = tuple(sorted({self.ranks[place] for _, place in (*sends, *receives)}))
        operation = self._labels.begin(f"exchange {self.name}", self.ranks, others)
        example = transfers[0].tensor
        return [_Started(work, operation, self._labels, example) for work in dist.batch_isend_irecv(transfers)]

    def send(self, x: Tensor, place: int, tag: int = 0) -> Any:
        """Start sending; returns what to `wait()` for. x must not change until then."""
        self.traffic.add(self.name, "send", _bytes(x))
        other = self.ranks[place]
        operation = self._labels.begin(f"send {self.name} to rank {other}", self.ranks, (other,))
        return _Started(dist.isend(x, other, group=self.handle, tag=tag), operation, self._labels, x)

    def receive(self, x: Tensor, place: int, tag: int = 0) -> Any:
        """Start receiving into x; returns what to `wait()` for."""
        other = self.ranks[place]
        operation = self._labels.begin(f"receive {self.name} from rank {other}", self.ranks, (other,))
        return _Started(dist.irecv(x, other, group=self.handle, tag=tag), operation, self._labels, x)

    def broadcast_(self, x: Tensor, place: int = 0) -> Tensor:
        """In place, from the rank at `place`; returns x."""
        if self.size > 1:
            operation = self._begin("broadcast", _bytes(x) if self.index == place else 0)
            work = dist.broadcast(x, self.ranks[place], group=self.handle, async_op=True)
            _Started(work, operation, self._labels, x).wait()
        return x

    def gather_objects(self, value: Any) -> list[Any]:
        """Small values of all ranks, in the order of places, on every rank. For what is said, not for tensors."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self._labels.waiting(self._labels.begin(f"gather_objects {self.name}", self.ranks)):
            dist.all_gather_object(values, value, group=self.handle)
        return values

    def barrier(self) -> None:
        if self.size > 1:
            with self._labels.waiting(self._labels.begin(f"barrier {self.name}", self.ranks)):
                dist.barrier(group=self.handle)

    def _begin(self, kind: str, size: float) -> Operation:
        self.traffic.add(self.name, kind, size)
        return self._labels.begin(f"{kind} {self.name}", self.ranks)


class _Started:
    """An operation under way. On a CUDA device `wait` only orders streams: the process goes on, and the operation
    counts as awaited until the device has done it."""

    def __init__(self, work: Any, operation: Operation, labels: Labels, x: Tensor) -> None:
        self._work, self._operation, self._labels, self._on_cuda = work, operation, labels, x.is_cuda

    def wait(self) -> None:
        with self._labels.waiting(self._operation):
            self._work.wait()
        if self._on_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._labels.unfinished(self._operation, event.query)

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


@not_traced
def copy_to(x: Tensor, group: Group) -> Tensor:
    """x as it is; its gradient is the sum of all ranks' gradients."""
    return _exchanged(x, group, lambda x: x.view_as(x), lambda gradient: group.all_reduce_(_copy(gradient)))


@not_traced
def reduce_from(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks; the gradient passes as it is."""
    return _exchanged(x, group, lambda x: group.all_reduce_(_copy(x)), lambda gradient: gradient)


@not_traced
def gather_from(x: Tensor, group: Group, dim: int) -> Tensor:
    """All ranks' parts along `dim`; gradients of all ranks are summed, each rank getting its part's."""
    return _exchanged(
        x, group, lambda x: group.all_gather(x, dim), lambda gradient: group.reduce_scatter(gradient, dim)
    )


@not_traced
def gather_copy(x: Tensor, group: Group, dim: int) -> Tensor:
    """All ranks' parts along `dim`, for a use that is the same on every rank: the gradient is the own part's."""
    return _exchanged(x, group, lambda x: group.all_gather(x, dim), lambda gradient: _own_part(gradient, group, dim))


@not_traced
def scatter_to(x: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's part along `dim` of the sum over ranks; gradients of all parts are gathered."""
    return _exchanged(
        x, group, lambda x: group.reduce_scatter(x, dim), lambda gradient: group.all_gather(gradient, dim)
    )


@not_traced
def split_to(x: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's part along `dim` of an x that all ranks hold; gradients of all parts are gathered."""
    return _exchanged(x, group, lambda x: _own_part(x, group, dim), lambda gradient: group.all_gather(gradient, dim))


@not_traced
def all_to_all(x: Tensor, group: Group, output_splits: Sequence[int], input_splits: Sequence[int]) -> Tensor:
    """Rows exchanged by `Group.all_to_all`; gradients go back the same way."""
    return _exchanged(
        x,
        group,
        lambda x: group.all_to_all(x, output_splits, input_splits),
        lambda gradient: group.all_to_all(gradient, input_splits, output_splits),
    )


_Change = Callable[[Tensor], Tensor]


def _exchanged(x: Tensor, group: Group, there: _Change, back: _Change) -> Tensor:
    """`there` on x in the forward pass, `back` on the gradient in the backward pass; x itself for a group of one."""
    return x if group.size == 1 else _Exchange.apply(x, there, back)  # type: ignore[no-untyped-call]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: _Change, back: _Change) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


def _copy(x: Tensor) -> Tensor:
    """What may be changed in place."""
    return x.contiguous().clone()


def _own_part(x: Tensor, group: Group, dim: int) -> Tensor:
    return x.chunk(group.size, dim)[group.index].contiguous()


def _joined_along(stacked: Tensor, parts: int, dim: int) -> Tensor:
    """Parts that lie one after the other along dimension 0, side by side along `dim`."""
    return stacked if dim == 0 else torch.cat(stacked.chunk(parts), dim)


def _part_shape(shape: torch.Size, dim: int, parts: int) -> tuple[int, ...]:
    if shape[dim] % parts:
        raise ValueError(f"dimension {dim} of size {shape[dim]} does not divide over {parts} ranks")
    return (*shape[:dim], shape[dim] // parts, *shape[dim + 1 :])


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
