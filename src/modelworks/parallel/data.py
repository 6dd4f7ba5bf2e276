"""Data parallelism with whole parameters on every rank: plain (zero 0), ZeRO-1 and ZeRO-2.

Gradients of ranks that saw other tokens add up, bucket by bucket, while the backward pass still runs. With zero 0 a
bucket is all-reduced. With ZeRO it is reduce-scattered, so that each rank has the sum of its shard only, updates that,
and all-gathers the parameters: together what an all-reduce sends (an all-reduce and then an all-gather would be half
as much again). With replicas the shard is also all-reduced over them (hybrid sharding).

Where no other rank has the same parameter, gradients stay where autograd put them: one process pays for nothing here.

Invariant: whatever each rank's tokens use, all ranks start the same collectives in the same order; a parameter that a
batch did not use counts as zero. A hook never waits for another rank, which might be waiting for this one inside its
own backward: it takes what has arrived and goes on.

Buckets and hooks are those of PyTorch DDP (Li et al. 2020, 2006.15704), shards of ZeRO (Rajbhandari et al. 2020,
1910.02054). `modelworks.layout.data_memory` has the bytes as formulas.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from modelworks.layout import ParameterPlan, is_copied, reduction_groups
from modelworks.parallel.buckets import LOW_PRECISION, Bucket, Parcel, fill_buckets, wide_dtype
from modelworks.parallel.collectives import Pending
from modelworks.parallel.gradients import Fill, named_parameters, storage_bytes, sum_partial
from modelworks.parallel.mesh import Mesh


class ReplicatedStore:
    """Zero 0-2. keep_buffers: zero 0 and 1 keep what they reduce until the step ends; zero 2 frees it at once.
    every: reduce each micro-batch. only: the names to look after, default all."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        plans: Mapping[str, ParameterPlan],
        mesh: Mesh,
        *,
        keep_buffers: bool,
        every: bool,
        bucket_bytes: int,
        only: Collection[str] | None = None,
    ) -> None:
        owned = named_parameters(parts)
        self._parameters = {name: p for name, (p, _) in owned.items() if only is None or name in only}
        self._plans = {name: plans[name] for name in self._parameters}
        self._mesh, self._keep_buffers, self._every = mesh, keep_buffers, every
        self._stored = {name: _stored(p, self._plans[name]) for name, p in self._parameters.items()}
        self._wide: dict[str, Tensor] = {}  # float32 sums of low-precision gradients
        self._micro_batches = 1
        self._states = [_BucketState(bucket) for bucket in self._new_buckets(parts, owned, bucket_bytes)]
        self._of_name = {name: state for state in self._states for name in state.bucket.names}
        self._alone = [name for name in self._parameters if name not in self._of_name]
        self._queue: list[_BucketState] = []  # armed, not yet started, in order
        self._flying: list[_BucketState] = []
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                hook = _hook(weakref.ref(self), name)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def stored_parameters(self) -> dict[str, Tensor]:
        return dict(self._stored)

    def leaves(self) -> dict[str, Tensor]:
        return dict(self._parameters)

    @torch.no_grad()
    def load(self, fill: Fill) -> None:
        for name, tensor in self._stored.items():
            fill(self._plans[name].stored, tensor.detach())
        self._gather(self._states)

    def begin_step(self, n_micro_batches: int) -> None:
        self._micro_batches = n_micro_batches
        for state in self._states:
            state.stages_done = 0

    def before_backward(self, names: Collection[str], last: bool, deferred: bool = False) -> None:
        for state in self._touched(names):
            state.stages_done += last and not deferred
            state.armed = not deferred and (self._every or (last and state.stages_done == state.bucket.owners))
            state.missing = set(state.bucket.names)
            if state.armed:
                self._queue.append(state)

    def after_backward(self, names: Collection[str]) -> None:
        for name in names:
            self._widen(name)
        while self._queue:
            self._start(self._queue.pop(0))
        self._advance(wait=False)

    def reduce(self, names: Collection[str]) -> None:
        for state in self._touched(names):
            state.stages_done += 1
            if self._every or state.stages_done == state.bucket.owners:
                self._start(state)
        self._advance(wait=False)

    @torch.no_grad()
    def finish(self) -> dict[str, Tensor]:
        self._advance(wait=True)
        gradients: dict[str, Tensor] = {}
        trained = [state for state in self._states if state.bucket.trained]
        for state in trained:
            if state.total is None:
                raise RuntimeError(f"no backward was the last one for {state.bucket.names[0]}: it was not reduced")
        if self._every:  # `last` has sent the shards after each reduce-scatter
            for index in range(1, max((len(state.bucket.groups) for state in trained), default=0)):
                over = [state for state in trained if index < len(state.bucket.groups)]
                works = [self._mesh.group(s.bucket.groups[index]).start_all_reduce_(_total(s)) for s in over]
                for work in works:
                    work.wait()
        for state in trained:
            shapes = {name: self._plans[name].stored.local_shape for name in state.bucket.names}
            gradients |= state.bucket.views(_total(state), shapes)
        gradients |= {name: self._whole(name) for name in self._alone if self._parameters[name].requires_grad}
        ordered = {name: gradients[name] for name in self._parameters if name in gradients}
        sum_partial(ordered, self._plans, self._mesh)
        return ordered

    @torch.no_grad()
    def after_update(self) -> None:
        self._gather([state for state in self._states if state.bucket.trained])

    def end_step(self) -> None:
        self._wide.clear()
        for parameter in self._parameters.values():
            parameter.grad = None
        for state in self._states:
            state.total = state.buffer = state.flight = None
        self._queue, self._flying = [], []

    def unshard(self, names: Collection[str]) -> None:
        """Parameters are whole always."""

    def reshard(self, names: Collection[str]) -> None:
        """Parameters stay whole."""

    def bytes(self) -> dict[str, int]:
        gradients = [parameter.grad for parameter in self._parameters.values()] + list(self._wide.values())
        gradients += [tensor for state in self._states for tensor in (state.total, state.buffer)]
        parameters = [*self._parameters.values(), *self._stored.values()]
        return {"parameters": storage_bytes(parameters), "gradients": storage_bytes(gradients)}

    def _new_buckets(
        self, parts: Sequence[nn.Module], owned: Mapping[str, tuple[nn.Parameter, int]], bucket_bytes: int
    ) -> list[Bucket]:
        """Of each part apart, because their backwards come at different times."""
        layout, rank = self._mesh.layout, self._mesh.rank
        sizes = {name: group.size for name, group in self._mesh.groups.items()}
        buckets: list[Bucket] = []
        seen: set[str] = set()
        for part in parts:
            parcels = []
            for name, parameter in reversed(list(part.named_parameters())):
                if name not in self._parameters or name in seen:
                    continue
                seen.add(name)
                plan = self._plans[name]
                groups = reduction_groups(plan, layout, rank)
                if not groups:
                    continue
                shape, dtype, owners = tuple(parameter.shape), parameter.dtype, owned[name][1]
                trained = parameter.requires_grad
                parcels.append(Parcel(name, shape, plan.zero_dimension, groups, dtype, trained, owners))
            buckets += fill_buckets(parcels, sizes, bucket_bytes)
        return buckets

    def _touched(self, names: Collection[str]) -> list[_BucketState]:
        wanted = {id(self._of_name[name]) for name in names if name in self._of_name}
        return [state for state in self._states if id(state) in wanted and state.bucket.trained]

    def _arrived(self, name: str, _: Tensor) -> None:
        """A backward has brought the gradient of `name`: start every bucket that is complete, in their order."""
        self._widen(name)
        if name in self._of_name:
            self._of_name[name].missing.discard(name)
        while self._queue and not self._queue[0].missing:
            self._start(self._queue.pop(0))
        self._advance(wait=False)

    @torch.no_grad()
    def _widen(self, name: str) -> None:
        """Move a low-precision gradient into its float32 sum, where several are to be added before the reduction."""
        parameter = self._parameters.get(name)
        if parameter is None or parameter.grad is None or parameter.dtype not in LOW_PRECISION:
            return
        if self._micro_batches == 1 or (self._every and name in self._of_name):
            return
        if name in self._wide:
            self._wide[name] += parameter.grad
        else:
            self._wide[name] = parameter.grad.float()
        parameter.grad = None

    def _whole(self, name: str) -> Tensor:
        """The gradient of a parameter that no other rank has."""
        parameter = self._parameters[name]
        self._widen(name)
        gradient = self._wide.get(name, parameter.grad)
        dtype = wide_dtype(parameter.dtype)
        if gradient is None or gradient.dtype != dtype:
            gradient = torch.zeros_like(parameter, dtype=dtype) if gradient is None else gradient.to(dtype)
            self._wide[name], parameter.grad = gradient, None
        return gradient

    @torch.no_grad()
    def _start(self, state: _BucketState) -> None:
        """Move the bucket's gradients into its buffer and send it off."""
        if state.flight is not None:  # of the micro-batch before: every rank is past the backward that started it
            self._flying.remove(state)
            while state.flight is not None:
                self._arrive(state)
        state.armed = False
        bucket = state.bucket
        values: dict[str, Tensor | None] = {}
        for name in bucket.names:
            self._widen(name)
            values[name] = self._wide.pop(name, self._parameters[name].grad)
        buffer = bucket.pack(values, wide_dtype(bucket.dtype), self._mesh.device)
        for name in bucket.names:
            self._parameters[name].grad = None
        state.buffer = buffer
        state.flying_over = list(bucket.groups[:1] if self._every else bucket.groups)
        group = self._mesh.group(state.flying_over[0])
        flat = buffer.view(-1)
        if bucket.cut:
            state.flight = group.start_reduce_scatter(flat)
        else:
            state.flight = Pending(group.start_all_reduce_(flat), flat)
        self._flying.append(state)

    @torch.no_grad()
    def _advance(self, wait: bool) -> None:
        """Take what has arrived, in order; with `wait`, everything."""
        while self._flying and (wait or _has_arrived(self._flying[0])):
            state = self._flying[0]
            self._arrive(state)
            if state.flight is None:
                self._flying.pop(0)

    def _arrive(self, state: _BucketState) -> None:
        """One group's sum is there: send it over the next group, or keep it."""
        assert state.flight is not None
        row = state.flight()
        state.flight = None
        state.flying_over.pop(0)
        if not self._keeps(state):
            state.buffer = None
        if state.flying_over:
            state.flight = Pending(self._mesh.group(state.flying_over[0]).start_all_reduce_(row), row)
        else:
            self._land(state, row)

    def _land(self, state: _BucketState, row: Tensor) -> None:
        if self._keeps(state):
            assert state.buffer is not None
            row = state.buffer[self._mesh.place(state.bucket.groups[0])].copy_(row)
        if state.total is None:
            state.total = row
        else:
            state.total += row

    def _keeps(self, state: _BucketState) -> bool:
        """Whether the buffer stays until the step ends, with the reduced shard in its own row."""
        return self._keep_buffers and state.bucket.cut and not self._every

    def _gather(self, states: Sequence[_BucketState]) -> None:
        """Whole parameters from every rank's shards; two buckets are on their way at a time."""
        device, flying = self._mesh.device, list[tuple[Bucket, Pending]]()
        for state in states:
            bucket = state.bucket
            if not bucket.cut:
                continue
            row = bucket.pack_row(self._stored, bucket.dtype, device)
            flying.append((bucket, self._mesh.group(bucket.groups[0]).start_all_gather(row)))
            if len(flying) == 2:
                self._spread(*flying.pop(0))
        for bucket, pending in flying:
            self._spread(bucket, pending)

    def _spread(self, bucket: Bucket, pending: Pending) -> None:
        bucket.unpack(
            pending().view(bucket.shards, bucket.width), {n: self._parameters[n].detach() for n in bucket.names}
        )


def _hook(store: weakref.ref[ReplicatedStore], name: str) -> Callable[[Tensor], None]:
    """Tells the store that a gradient is there. The parameter's hooks lie where Python's collector does not look: one
    that held the store, which holds the parameter, would keep both, and the process groups, for ever."""

    def arrived(parameter: Tensor) -> None:
        there = store()
        if there is not None:
            there._arrived(name, parameter)

    return arrived


class _BucketState:
    """What a bucket has going on. total: reduced gradients of this step so far, the row of this rank (width,)."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.missing: set[str] = set()  # names whose gradient the running backward has not brought yet
        self.stages_done = 0  # of the stages that own it, those past their last backward
        self.armed = False  # reduced during the running backward
        self.flight: Pending | None = None
        self.flying_over: list[str] = []  # groups still to reduce over, the one in flight first
        self.buffer: Tensor | None = None  # what is in flight, or kept
        self.total: Tensor | None = None


def _stored(parameter: nn.Parameter, plan: ParameterPlan) -> Tensor:
    """The shard of a whole parameter: a view of it, or a copy where a view would not be contiguous."""
    if tuple(parameter.shape) != plan.computed.local_shape:
        name, expected = plan.computed.name, plan.computed.local_shape
        raise ValueError(f"{name}: the parameter has shape {tuple(parameter.shape)}, its plan says {expected}")
    tensor = parameter.detach()
    if plan.zero_dimension is not None:
        (start, _), (first, last) = (spec.bounds[plan.zero_dimension] for spec in (plan.computed, plan.stored))
        tensor = tensor.narrow(plan.zero_dimension, first - start, last - first)
        # Fused optimisers walk over memory as if it had no gaps.
        tensor = tensor.clone(memory_format=torch.contiguous_format) if is_copied(plan) else tensor
    return tensor.requires_grad_(parameter.requires_grad)


def _total(state: _BucketState) -> Tensor:
    assert state.total is not None
    return state.total


def _has_arrived(state: _BucketState) -> bool:
    return state.flight is not None and state.flight.done
