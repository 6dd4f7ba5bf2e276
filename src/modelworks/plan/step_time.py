"""The time of one step of training, put together from compute, exchanges and the pipeline, over columns.

    step = (m t_max + idle) + sends + (gradients, updated parameters: what is not hidden) + optimiser + overhead

t: of a stage and micro-batch: its layers forward and backward with what is recomputed and what is exchanged inside
them, and the head on the last. Each part is an attribute of `StepTime`, so that a prediction can be explained.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from modelworks.plan.columns import OFFLOAD, Column
from modelworks.plan.compute import LayerTime, Passes, Work, head_time, layer_time, recomputed_seconds
from modelworks.plan.elements import layer_elements, rank_elements
from modelworks.plan.exchanges import beside, layer_exchange, send_seconds, step_exchange
from modelworks.plan.measured_step import measured_head, measured_layer, measured_parts, measured_send
from modelworks.plan.memory import layer_activations
from modelworks.plan.pipeline import Sends, Stages, makespan, stage_counts


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by cause; they sum to `total`.

    compute: matrix products, attention and elementwise work of the costliest stage, without what is recomputed.
    tensor, context, experts, gather: exchanges inside layers that nothing hides. data: gradients and parameters.
    """

    linear: Column
    attention: Column
    elementwise: Column
    head: Column
    recompute: Column
    tensor: Column
    context: Column
    experts: Column
    gather: Column
    idle: Column
    sends: Column
    data: Column
    optimizer: Column
    overhead: Column

    @property
    def total(self) -> Column:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class _Layer:
    """Seconds of one layer and micro-batch: what it computes, and what it waits for in exchanges and recomputes."""

    time: LayerTime
    recompute: Column
    tensor: Column
    context: Column
    experts: Column
    gather: Column
    exposed_forward: Column  # exchanges of the forward pass
    launch: Passes  # what the host needs beyond all of that

    @property
    def exposed(self) -> Column:
        return self.tensor + self.context + self.experts + self.gather

    @property
    def total(self) -> Column:
        return self.time.passes.total + self.recompute + self.exposed + self.launch.total

    @property
    def passes(self) -> Passes:
        """With what is exchanged and recomputed: all of that delays the gradient of the inputs, none the weights'."""
        computed = self.time.passes
        forward = computed.forward + self.exposed_forward + self.launch.forward
        return Passes(forward, self.total - forward - computed.backward_weight, computed.backward_weight)


LayerCosts = tuple[Passes, Passes, Sends]  # of a layer (exchanges included), of the head, of sends


def step_time(work: Work, stages: Stages | None = None) -> StepTime:
    """Of every row of the columns. stages: layers of the ranks, where they are known; else balanced ones."""
    return step_and_costs(work, stages)[0]


def step_and_costs(work: Work, stages: Stages | None = None) -> tuple[StepTime, LayerCosts]:
    """The same with what `layer_costs` says of each row."""
    if (measured := work.machine.measured) is not None:
        return StepTime(**measured_parts(work, measured, stages)), layer_costs(work)
    split, constants = work.split, work.constants
    layer, head, sent = _layer(work), head_time(work), _sends(work)
    stages = stages or stage_counts(work.shape, split, head.total / layer.total)
    passes, micro_batches = layer.passes, split.n_micro_batches
    # A stage between two others exchanges with both, the last with one: that much less it has to do.
    each = 2.0 * sent.busy
    inner, last = stages.most * layer.total, stages.last * layer.total + head.total - each / 2.0
    _, idle = makespan(
        split, stages, passes.forward, passes.backward_input, passes.backward_weight, head.total - each / 2.0
    )
    on_last = last >= inner
    layers = np.where(on_last, stages.last, stages.most) * micro_batches
    with_head = np.where(on_last, micro_batches, 0.0)
    steady = (split.virtual * micro_batches - with_head / 2.0) * each
    sends = np.where(split.pp > 1.0, steady + 2.0 * (split.pp - 1.0) * send_seconds(work), 0.0)
    dense_elements, expert_elements = rank_elements(work.shape, split, stages.most)
    data = _data_seconds(work, layer, stages.most, dense_elements, expert_elements)
    optimizer = _optimizer_seconds(work, dense_elements, expert_elements)
    so_far = layers * layer.total + with_head * head.total + idle + sends + data + optimizer
    time = layer.time
    seconds = StepTime(
        linear=layers * (time.linear + time.experts).total,
        attention=layers * time.attention.total,
        elementwise=layers * (time.elementwise + layer.launch).total,
        head=with_head * head.total,
        recompute=layers * layer.recompute,
        tensor=layers * layer.tensor,
        context=layers * layer.context,
        experts=layers * layer.experts,
        gather=layers * layer.gather,
        idle=idle,
        sends=sends,
        data=data,
        optimizer=optimizer,
        overhead=constants.step_overhead + _stragglers(work, inner, last) * so_far,
    )
    return seconds, (passes, head, sent)


def layer_costs(work: Work) -> LayerCosts:
    """Seconds for one micro-batch of a layer (exchanges included) and of the head; and of sends. For simulations."""
    if (measured := work.machine.measured) is not None:
        sends = Sends(measured_send(work, measured), 0.0)
        return measured_layer(work, measured).passes, measured_head(work, measured), sends
    return _layer(work).passes, head_time(work), _sends(work)


def _sends(work: Work) -> Sends:
    """What a stage sends, less what is hidden; twice that where it receives only then."""
    software = work.software
    whole = send_seconds(work)
    exposed = whole * (1.0 - software.overlap_pipeline * work.constants.pipeline_overlap)
    return Sends((1.0 + software.serial_sends) * exposed, whole - exposed)


def _layer(work: Work) -> _Layer:
    split, constants = work.split, work.constants
    time, exchange = layer_time(work), layer_exchange(work)
    passes, experts = time.passes, exchange.experts
    overlap = work.software.overlap_gather * constants.gather_overlap
    tensor = exchange.tensor * (1.0 - work.software.overlap_tensor * constants.tensor_overlap)
    context = beside(work, exchange.context, time.attention.forward, overlap)
    context_backward = beside(work, 2.0 * exchange.context, time.attention.backward_input, overlap)
    again = recomputed_seconds(work, time, tensor + context + experts)
    reruns = np.clip(split.recompute - 1.0, 0.0, 1.0)  # exchanges that a recomputed forward pass repeats
    backward = passes.backward_input + passes.backward_weight + again

    # ZeRO-3 gathers for each micro-batch anew, and reduces each (or sums and reduces once)
    gathers = np.where(split.gather_every > 0, 1.0, 1.0 / split.n_micro_batches)
    reduces = np.where(split.reduce_every > 0, 1.0, 1.0 / split.n_micro_batches)
    host = _host_seconds(work, gathers)
    gather = beside(work, exchange.gather * gathers + host, passes.forward, overlap)
    gather_backward = beside(work, exchange.gather * gathers + exchange.scatter * reduces + host, backward, overlap)
    exposed_forward = tensor + context + experts + gather
    exposed_backward = tensor + context_backward + experts + gather_backward
    return _Layer(
        time=time,
        recompute=again - reruns * (tensor + context + experts),
        tensor=tensor * (2.0 + reruns),
        context=context * (1.0 + reruns) + context_backward,
        experts=experts * (2.0 + reruns),
        gather=gather + gather_backward,
        exposed_forward=exposed_forward,
        launch=_launch_seconds(work, passes.forward + exposed_forward, backward + exposed_backward),
    )


def _host_seconds(work: Work, gathers: Column) -> Column:
    """A layer's traffic with the host in each pass: the shard that is gathered, and what the backward pass needs."""
    split, numerics = work.split, work.numerics
    shard = layer_elements(work.shape, split) * numerics.parameter / split.shards * gathers
    waits = (split.offload_params > 0) & (split.zero >= 3.0)
    moved = np.where(waits, shard, 0.0) + np.where(split.offload_activations > 0, layer_activations(work), 0.0)
    return moved / work.machine.host_bandwidth


def _launch_seconds(work: Work, forward: Column, backward: Column) -> Passes:
    """What the host adds to a layer's passes of so many seconds on the device.

    It launches kernels ahead, so that it sets the pace only where it is slower; one that waits for each kernel adds
    its own time. A backward pass has two kernels for each of a forward pass, and those that are run again.
    """
    software = work.software
    ahead = work.constants.launch
    passes = 2.0 + np.clip(work.split.recompute - 1.0, 0.0, 1.0)
    waited = ahead + work.constants.kernel_waits
    blocking = software.blocking > 0
    return Passes(
        np.where(blocking, waited, np.maximum(ahead - forward, 0.0)),
        np.where(blocking, passes * waited, np.maximum(passes * ahead - backward, 0.0)),
        0.0,
    )


def _stragglers(work: Work, inner: Column, last: Column) -> Column:
    """The part of a step that is lost to the slowest device: of all where stages are even, of its own stage's where
    one is slower than the others, as long as it is. inner, last: seconds of an inner and the last stage."""
    split, each = work.split, work.constants.straggler
    nodes = np.maximum(split.world / work.machine.node, 1.0)
    in_stage = np.maximum(nodes / split.pp, 1.0)
    everywhere, there = 1.0 + each * np.log2(nodes), 1.0 + each * np.log2(in_stage)
    return np.where(last > inner, np.maximum(there, everywhere * inner / last), everywhere) - 1.0


def _data_seconds(work: Work, layer: _Layer, layers: Column, elements: Column, expert_elements: Column) -> Column:
    """Gradients, beside the last micro-batch's backward pass (or every one's), and updated parameters, beside the next
    forward pass."""
    split, overlap = work.split, work.software.overlap_data
    passes = layer.time.passes
    reduce, update = step_exchange(work, elements, expert_elements)
    every = (split.reduce_every > 0) & (split.zero < 3.0)
    times = np.where(every, split.n_micro_batches, 1.0)
    window = layers * (passes.backward_input + passes.backward_weight + layer.recompute)
    reduced = beside(work, reduce * times, window * times, overlap)
    return reduced + beside(work, update, layers * passes.forward, overlap)


def _optimizer_seconds(work: Work, elements: Column, expert_elements: Column) -> Column:
    """Each state is read and written, the gradient read, the parameter written: bound by memory."""
    split, numerics, machine = work.split, work.numerics, work.machine
    shards = np.where(split.zero >= 1.0, split.shards, 1.0)
    expert_shards = np.where(split.zero >= 1.0, np.maximum(split.shards / split.ep, 1.0), 1.0)
    local = (elements / shards + expert_elements / expert_shards) * split.trains_weights
    moved = local * (2.0 * numerics.state + numerics.gradient + numerics.parameter)
    on_device = moved / (machine.bandwidth * work.constants.memory)
    # offloaded: the gradient leaves, the host updates, the parameter returns, one after the other as our trainer does
    # it; the devices of a host share its memory
    sharing = np.minimum(np.minimum(machine.node, split.world), HOST_DEVICES)
    away = local * (numerics.gradient + numerics.parameter) / machine.host_bandwidth
    away = away + moved * sharing / machine.host_memory_bandwidth
    files = local * 2.0 * numerics.state * sharing / machine.file_bandwidth
    away = away + np.where(split.offload == OFFLOAD["nvme"], files, 0.0)
    return np.where(split.offload > 0, away, on_device)


HOST_DEVICES = 8.0  # at most, however many devices the fast link joins
