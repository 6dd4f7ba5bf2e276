"""What each rank sends in a training step, along every axis, as formulas: calls and bytes by (group, kind).

For one micro-batch of r rows on one rank, with T columns of each row (seq_len / cp), d channels, N ranks of the axis
and an element of the stream of e bytes, S = r T d e, what is sent is

    tensor            each of: attention, feed-forward of a layer; the embedding and the final norm half of that
      sequence par.   forward (N-1)/N S all-gather and (N-1)/N S reduce-scatter; backward the same again
      plain           forward one all-reduce 2 (N-1)/N S, backward one                  (Shoeybi 2019; Korthikanti 2022)
    vocabulary loss   2 (N-1)/N of 4 wide numbers a token, in two all-reduces a chunk   (Shoeybi 2019)
    pipeline          S (/ tp under sequence parallelism) for each send of the program  (Narayanan 2021)
    ring              a layer: 2 (N-1) KV, and (N-1) KV in the wide dtype               (Liu 2023)
    Ulysses           a layer: 2 (N-1)/N (2 Q + KV)                                     (Jacobs 2023)
    experts           a layer: 4 (ep-1)/ep r T k d e if balanced, and counts            (Lepikhin 2020)

with Q and KV the bytes of a rank's queries and of its keys and values. Recomputation runs the forward exchanges of a
block again, all but its last where nothing after that is kept. Data parallelism is in `data_traffic`. What only keeps
ranks in step (norms, loss, target weights, stop flag: some scalars) is `control`.

Invariant: these are the counts that `Mesh.traffic` has after a step, exactly; tested for every axis. Only experts
depend on the data: what they really send follows from the counts of rows (`routed`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from modelworks.config import ModelConfig, RunConfig
from modelworks.layout.data_traffic import DataParallelStep
from modelworks.layout.layout import Layout
from modelworks.layout.loss_chunks import loss_chunk_tokens
from modelworks.layout.pipeline.actions import SENDS, Action
from modelworks.layout.pipeline.partition import stage_layers
from modelworks.layout.pipeline.program import build_program
from modelworks.layout.placement import plan_parameters, stages_of
from modelworks.layout.volume import Sent, Tally, Volume

CONTROL_BYTES = 8  # of a float64 scalar
STOP_FLAG_BYTES = 4
COUNT_BYTES = 8  # of an int64 count
DOCUMENT_BYTES = 4  # of an int32 document id


def step_traffic(
    config: RunConfig,
    rank: int,
    micro_batches: Sequence[int],
    itemsize: int = 4,
    *,
    product_itemsize: int | None = None,
    routed: tuple[float, float] | None = None,
) -> Sent:
    """(group, kind) -> calls and bytes that `rank` sends in one step of training.

    micro_batches: rows of each. itemsize: bytes of a parameter and of an element of the residual stream.
    product_itemsize: of results of matrix products, where autocast makes them narrower. routed: (rows that left for
    other ranks' experts, rows that came from them), over all layers and micro-batches; None expects balance.
    """
    total: Sent = {}
    for sent in traffic_by_cause(
        config, rank, micro_batches, itemsize, product_itemsize=product_itemsize, routed=routed
    ).values():
        for key, volume in sent.items():
            before = total.get(key, Volume(0, 0.0))
            total[key] = Volume(before.calls + volume.calls, before.bytes + volume.bytes)
    return total


def traffic_by_cause(
    config: RunConfig,
    rank: int,
    micro_batches: Sequence[int],
    itemsize: int = 4,
    *,
    product_itemsize: int | None = None,
    routed: tuple[float, float] | None = None,
) -> dict[str, Sent]:
    """`step_traffic` in parts: `data`, `tensor`, `loss`, `pipeline`, `context`, `experts`, `control`."""
    step = _Step.of(config, rank, micro_batches, itemsize, product_itemsize or itemsize)
    tallies = {name: Tally() for name in ("data", "tensor", "loss", "pipeline", "context", "experts", "control")}
    _add_data(step, tallies["data"])
    for rows in micro_batches:
        _add_tensor(step, tallies["tensor"], rows)
        _add_loss(step, tallies["loss"], rows)
        _add_context(step, tallies["context"], rows)
        _add_routing(step, tallies["experts"], rows)
    _add_experts(step, tallies["experts"], routed)
    _add_pipeline(step, tallies["pipeline"])
    _add_control(step, tallies["control"])
    return {name: dict(tally) for name, tally in tallies.items()}


@dataclass(frozen=True)
class _Step:
    """What all parts need to know. stages: of this rank, number -> layers. length: columns of a row on this rank."""

    config: RunConfig
    layout: Layout
    rank: int
    all_stages: list[list[int]]
    micro_batches: Sequence[int]
    actions: tuple[Action, ...]
    itemsize: int
    product: int

    @classmethod
    def of(cls, config: RunConfig, rank: int, micro_batches: Sequence[int], itemsize: int, product: int) -> _Step:
        parallel, layout = config.parallel, Layout.of(config.parallel)
        program = build_program(
            parallel.pp_schedule,
            parallel.pp,
            len(micro_batches),
            parallel.pp_virtual,
            zero3=parallel.zero == 3 and parallel.pp > 1,
            gather=parallel.pp_gather,
            accumulate_reduce=parallel.accumulate_reduce,
        )
        actions = program[layout.coordinates(rank).pp]
        return cls(config, layout, rank, stage_layers(config), micro_batches, actions, itemsize, product)

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @property
    def stages(self) -> dict[int, list[int]]:
        return {stage: self.all_stages[stage] for stage in stages_of(self.layout, self.config.parallel, self.rank)}

    @property
    def layers(self) -> list[int]:
        return [layer for layers in self.stages.values() for layer in layers]

    @property
    def holds_first(self) -> bool:
        return 0 in self.stages

    @property
    def holds_last(self) -> bool:
        return len(self.all_stages) - 1 in self.stages

    @property
    def length(self) -> int:
        return self.config.data.seq_len // self.layout.cp

    @property
    def wide(self) -> int:
        return max(4, self.itemsize)

    @property
    def recomputes(self) -> bool:
        return self.config.train.recompute != "none"

    @property
    def runs(self) -> int:
        """Forward passes of a block for one backward pass."""
        return 2 if self.recomputes else 1

    def has_experts(self, layer: int) -> bool:
        return bool(self.model.n_experts) and self.model.has_experts(layer)


def _add_data(step: _Step, tally: Tally) -> None:
    model, parallel = step.model, step.config.parallel
    plans = plan_parameters(model, step.layout, parallel, step.rank, step.all_stages)
    last = len(step.all_stages) - 1
    names: dict[int, list[str]] = {}
    for stage, layers in step.stages.items():
        mine = []
        for name in plans:
            if name.startswith("blocks."):
                here = int(name.split(".", 2)[1]) in layers
            elif name == "embedding.weight":
                here = stage == 0 or (stage == last and model.tie_embeddings)
            else:
                here = stage == (0 if name == "position_embedding.weight" else last)
            if here:
                mine.append(name)
        names[stage] = mine
    DataParallelStep(
        plans, step.layout, step.rank, parallel, names, step.actions, step.itemsize, model.n_kv_heads
    ).add_to(tally)


def _add_tensor(step: _Step, tally: Tally, rows: int) -> None:
    ranks, sequence = step.layout.tp, step.config.parallel.sequence_parallel
    size = rows * step.length * step.model.d_model

    def enter(times: int, backward: int) -> None:
        """From the stream to what every rank uses: forward passes, backward passes."""
        if sequence:
            tally.part("tp", "all_gather", ranks, size * step.itemsize, times)
            tally.part("tp", "reduce_scatter", ranks, size * step.itemsize, backward)
        else:
            tally.all_reduce("tp", ranks, size * step.itemsize, backward)

    def leave(times: int, backward: int, itemsize: int) -> None:
        """From partial sums to the stream."""
        if sequence:
            tally.part("tp", "reduce_scatter", ranks, size * itemsize, times)
            tally.part("tp", "all_gather", ranks, size * itemsize, backward)
        else:
            tally.all_reduce("tp", ranks, size * itemsize, times)

    if step.holds_first:
        leave(1, 1, step.itemsize)  # the embedding
    if step.holds_last:
        enter(1, 1)  # after the final norm
    # A block that is run again stops when all that was kept is there: its last sum is then not made.
    keeps_last = step.model.norm_position == "post" or step.model.dropout > 0
    for _ in step.layers:
        enter(2 * step.runs, 2)
        leave(step.runs, 1, step.product)
        leave(step.runs if keeps_last else 1, 1, step.product)


def _add_loss(step: _Step, tally: Tally, rows: int) -> None:
    ranks, tokens = step.layout.tp, rows * step.length
    if ranks == 1 or not step.holds_last:
        return
    chunks = -(-tokens // loss_chunk_tokens(step.model.vocab_size, ranks, step.product))
    # The largest logit; then the exponentials' sum, the target's logit and the logits' sum.
    tally.all_reduce("tp", ranks, (1 + 3) * tokens * step.wide / (2 * chunks), 2 * chunks)


def _add_context(step: _Step, tally: Tally, rows: int) -> None:
    ranks, model, config = step.layout.cp, step.model, step.config
    if ranks == 1:
        return
    if config.data.packing == "within-document":
        tally.part("cp", "all_gather", ranks, ranks * rows * step.length * DOCUMENT_BYTES)
    queries = rows * step.length * model.n_heads // step.layout.tp * model.head_dim
    keys = 2 * rows * step.length * max(1, model.n_kv_heads // step.layout.tp) * model.head_dim
    for _ in step.layers:
        if config.parallel.cp_mode == "ring":
            tally.send("cp", keys * step.product, (step.runs + 1) * (ranks - 1))
            tally.send("cp", keys * max(4, step.product), ranks - 1)
        else:
            tally.part("cp", "all_to_all", ranks, (queries + keys) * step.product, step.runs + 1)
            tally.part("cp", "all_to_all", ranks, queries * step.product, step.runs + 1)


def _add_routing(step: _Step, tally: Tally, rows: int) -> None:
    """Counts that a router's loss and capacity need of whole rows, and those that go before rows of experts."""
    model, layout = step.model, step.layout
    for layer in step.layers:
        if not step.has_experts(layer):
            continue
        if model.router_aux_loss:
            tally.all_reduce("cp", layout.cp, rows * model.n_experts * COUNT_BYTES, step.runs)
        if model.expert_capacity is not None:
            choices = rows * step.config.data.seq_len * model.experts_per_token
            tally.all_reduce("cp", layout.cp, choices * COUNT_BYTES, step.runs)
        tally.part("ep", "all_to_all", layout.ep, model.n_experts * COUNT_BYTES, step.runs)


def _add_experts(step: _Step, tally: Tally, routed: tuple[float, float] | None) -> None:
    """Rows to the experts and back, and their gradients."""
    ranks, model = step.layout.ep, step.model
    passes = len(step.micro_batches) * sum(step.has_experts(layer) for layer in step.layers)
    if ranks == 1 or not passes:
        return
    if routed is None:
        tokens = sum(step.micro_batches) * step.length * model.experts_per_token
        even = (ranks - 1) / ranks * tokens * passes / len(step.micro_batches)
        routed = (even, even)
    left, came = (rows * model.d_model / passes for rows in routed)
    tally.all_to_all("ep", ranks, left * step.itemsize, passes * step.runs)
    tally.all_to_all("ep", ranks, came * step.product, passes * step.runs)
    tally.all_to_all("ep", ranks, left * step.product, passes)
    tally.all_to_all("ep", ranks, came * step.itemsize, passes)


def _add_pipeline(step: _Step, tally: Tally) -> None:
    parallel, length = step.config.parallel, step.length
    if parallel.sequence_parallel:
        length //= parallel.tp
    for action in step.actions:
        if action.kind in SENDS:
            rows = step.micro_batches[action.micro_batch]
            tally.send("pp", rows * length * step.model.d_model * step.itemsize)


def figured_layers(model: ModelConfig) -> int:
    """Layers that figures are told by (`layer_of`): blocks, embeddings, the final norm and a head of its own."""
    return model.n_layers + 2 + (model.positions == "learned") + (not model.tie_embeddings)


def _add_control(step: _Step, tally: Tally) -> None:
    layout, model = step.layout, step.model
    world = layout.world_size
    tally.all_reduce("dp", layout.size(step.rank, "dp"), CONTROL_BYTES)  # target weights
    tally.all_reduce("world", world, CONTROL_BYTES)  # loss
    order = float(step.config.train.grad_clip_norm)
    sums = order in (1.0, 2.0)
    norms = figured_layers(model) * CONTROL_BYTES if step.config.health.layers_every else 0
    tally.all_reduce("world", world, CONTROL_BYTES + (norms if sums else 0))  # norm, and with it those of layers
    if not sums:
        tally.all_reduce("world", world, CONTROL_BYTES, 0 if math.isinf(order) else 1)
        tally.all_reduce("world", world, norms, 1 if norms else 0)
    tally.all_reduce("world", world, STOP_FLAG_BYTES)
    if model.n_experts:
        for layers in step.stages.values():  # loads, dropped choices and two losses of each layer
            values = sum(map(step.has_experts, layers)) * (model.n_experts + 3)
            tally.all_reduce("data", layout.size(step.rank, "data"), values * CONTROL_BYTES)
