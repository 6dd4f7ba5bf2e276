"""Faults of a split run, each put in on a worker for the time of one job, and what `verify` must say of it.

A fault replaces one function or method of modelworks on every rank. `suspect` is a pattern that the first or second
suspect must match; `parameter` and `place` are patterns of the worst parameter and the first place that differs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import modelworks.optim.optimizer
import modelworks.parallel.apply
import modelworks.parallel.data
import modelworks.parallel.expert
import modelworks.parallel.ring_attention
import modelworks.train.loss
import modelworks.train.micro_batches
import modelworks.train.step
import modelworks.verify.runs
from modelworks.config import parse_run_config
from modelworks.parallel import Group, Mesh, SplitModel
from modelworks.parallel.data import ReplicatedStore
from modelworks.parallel.pipeline.edges import Edges
from modelworks.parallel.tensor import RowLinear
from modelworks.train.micro_batches import MicroBatches
from modelworks.verify import verify_on

patch = mock.patch.object
parallel, train = modelworks.parallel, modelworks.train


def verified_with(mesh: Mesh, fault: str, config: str, steps: int = 2, precision: str = "float64") -> Any:
    """On a worker: the comparison of a run that has this fault, on rank 0."""
    with FAULTS[fault].inject(mesh):
        found, _ = verify_on(mesh, parse_run_config(config, "test"), steps=steps, precision=precision)  # type: ignore[arg-type]
    return None if found is None else asdict(found)


@dataclass(frozen=True)
class Fault:
    model: str
    layout: dict[str, Any]
    inject: Callable[[Mesh], AbstractContextManager[Any]]
    suspect: str
    parameter: str = ""
    place: tuple[int, str] | None = None
    train: dict[str, Any] = field(default_factory=dict)


def _no_data_reduction(mesh: Mesh) -> Any:
    start = Group.start_all_reduce_

    def skipping(self: Group, x: Tensor, how: Any = "sum") -> Any:
        return None if self.name == "data" and x.numel() > 1 else start(self, x, how)

    return patch(Group, "start_all_reduce_", skipping)


def _no_replica_reduction(mesh: Mesh) -> Any:
    start = Group.start_all_reduce_

    def skipping(self: Group, x: Tensor, how: Any = "sum") -> Any:
        if self.name != "dp_replicate":
            return start(self, x, how)
        return start(self, torch.zeros(1), "sum")

    return patch(Group, "start_all_reduce_", skipping)


def _without_sum(group: str) -> Callable[[Mesh], Any]:
    def inject(mesh: Mesh) -> Any:
        sum_partial = parallel.data.sum_partial

        def partly(gradients: Any, plans: Any, mesh: Mesh) -> None:
            kept = {n: replace(plan, sums=tuple(s for s in plan.sums if s != group)) for n, plan in plans.items()}
            sum_partial(gradients, kept, mesh)

        return patch(parallel.data, "sum_partial", partly)

    return inject


def _experts_doubled(mesh: Mesh) -> Any:
    finish = ReplicatedStore.finish

    def doubling(self: Any) -> dict[str, Tensor]:
        gradients = finish(self)
        return {n: 2 * g if self._plans[n].experts else g for n, g in gradients.items()}

    return patch(ReplicatedStore, "finish", doubling)


def _experts_reduced_as_others(mesh: Mesh) -> Any:
    groups = parallel.data.reduction_groups
    return patch(parallel.data, "reduction_groups", lambda plan, *more: groups(replace(plan, experts=False), *more))


def _ring_backwards(mesh: Mesh) -> Any:
    def passing_back(x: Tensor, group: Group) -> Any:
        incoming = torch.empty_like(x)
        before, after = (group.index + 1) % group.size, (group.index - 1) % group.size
        works = group.exchange([(x, after)], [(incoming, before)])
        return lambda: parallel.ring_attention._arrived(works, x, incoming)

    return patch(parallel.ring_attention, "_start_passing_on", passing_back)


def _ring_loses_key_gradients(mesh: Mesh) -> Any:
    gradients = parallel.ring_attention.partial_attention_gradients

    def losing(*arguments: Any) -> tuple[Tensor, ...]:
        q, k, v = gradients(*arguments)
        return q, k if arguments[-1] else torch.zeros_like(k), v  # of keys from other ranks

    return patch(parallel.ring_attention, "partial_attention_gradients", losing)


def _all_counted(mesh: Mesh) -> Any:
    return patch(SplitModel, "counted", property(lambda self: set(self.plans)))


def _norm_of_own_shards(mesh: Mesh) -> Any:
    def reduce_partly(mesh: Mesh) -> Any:
        reduce = parallel.gradients.world_reduce(mesh)
        return lambda value, how: reduce(value * (mesh.rank != 1), how)

    return patch(train.step, "world_reduce", reduce_partly)


def _layer_dropped(mesh: Mesh) -> Any:
    stages = parallel.apply.stage_layers
    return patch(parallel.apply, "stage_layers", lambda config: [stages(config)[0][:-1], *stages(config)[1:]])


def _own_denominator(mesh: Mesh) -> Any:
    return patch(train.step, "_over_data_ranks", lambda model, value: float(value) * model.mesh.size("dp"))


def _same_shards(mesh: Mesh) -> Any:
    initialize_slice = modelworks.verify.runs.initialize_slice

    def first_shard(out: Tensor, config: Any, spec: Any, seed: int) -> None:
        bounds = tuple((0, end - start) for start, end in spec.bounds)
        initialize_slice(out, config, replace(spec, bounds=bounds), seed)

    return patch(modelworks.verify.runs, "initialize_slice", first_shard)


def _dropout_by_rank(mesh: Mesh) -> Any:
    keys = train.micro_batches.dropout_keys

    def by_rank(key: Any, mesh: Mesh, *more: Any, **others: Any) -> Any:
        return keys(replace(key, seed=key.seed + mesh.rank), mesh, *more, **others)

    return patch(train.micro_batches, "dropout_keys", by_rank)


def _stale_edge(mesh: Mesh) -> Any:
    send = Edges.send

    def previous(self: Any, action: Any, tensors: Any, place: int) -> None:
        if action.kind != "send_forward":
            return send(self, action, tensors, place)
        stale = self.__dict__.setdefault("stale", tensors)
        self.stale = tensors
        return send(self, action, stale, place)

    return patch(Edges, "send", previous)


def _not_gathered(mesh: Mesh) -> Any:
    return patch(ReplicatedStore, "after_update", lambda self: None)


def _documents_ignored(mesh: Mesh) -> Any:
    context = train.micro_batches.context_parallel
    ignoring = lambda mesh, mode, columns, documents, **more: context(mesh, mode, columns, None, **more)  # noqa: E731
    return patch(train.micro_batches, "context_parallel", ignoring)


def _row_bias_on_each(mesh: Mesh) -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self._leave(torch.nn.functional.linear(x, self.weight, self.bias))  # type: ignore[no-any-return]

    return patch(RowLinear, "forward", forward)


def _auxiliary_loss_on_each(mesh: Mesh) -> Any:
    build = train.micro_batches.build_routing
    more = lambda mesh, *, loss_scale, **rest: build(mesh, loss_scale=loss_scale * mesh.size("tp"), **rest)  # noqa: E731
    return patch(train.micro_batches, "build_routing", more)


def _softmax_of_own_vocabulary(mesh: Mesh) -> Any:
    exponentials = train.loss._become_exponentials

    def alone(z: Tensor, place: Tensor, here: Tensor, objective: Any) -> Any:
        return exponentials(z, place, here, replace(objective, group=None))

    return patch(train.loss, "_become_exponentials", alone)


def _outputs_out_of_order(mesh: Mesh) -> Any:
    return patch(parallel.expert, "restore", lambda outputs, order: outputs)


def _last_micro_batch_dropped(mesh: Mesh) -> Any:
    forward = MicroBatches.forward

    def dropping(self: Any, stage: int, part: Any, index: int, inputs: Any) -> Any:
        outputs, objective = forward(self, stage, part, index, inputs)
        return outputs, objective * 0 if objective is not None and index == len(self) - 1 else objective

    return patch(MicroBatches, "forward", dropping)


def _copies_not_averaged_alike(mesh: Mesh) -> Any:
    """One tensor rank forgets to update what every tensor rank holds whole."""
    apply = modelworks.verify.runs.apply_gradients

    def forgetting(model: SplitModel, *more: Any, **others: Any) -> Any:
        kept = {n: t.detach().clone() for n, t in model.stored.items() if n not in model.counted}
        done = apply(model, *more, **others)
        for name, before in kept.items():
            model.stored[name].detach().copy_(before)
        return done

    return patch(modelworks.verify.runs, "apply_gradients", forgetting)


def _nan_on_last_rank(mesh: Mesh) -> Any:
    forward = MicroBatches.forward

    def poisoned(self: Any, stage: int, part: Any, index: int, inputs: Any) -> Any:
        outputs, objective = forward(self, stage, part, index, inputs)
        return outputs, objective * torch.nan if objective is not None and mesh.rank == 1 else objective

    return patch(MicroBatches, "forward", poisoned)


def _clipping_forgotten(mesh: Mesh) -> Any:
    clip = train.step.clip_gradients
    return patch(
        train.step, "clip_gradients", lambda gradients, most, *rest, **more: clip(gradients, None, *rest, **more)
    )


def _sums_in_low_precision(mesh: Mesh) -> Any:
    return patch(ReplicatedStore, "_widen", lambda self, name: None)


def _no_master_weights(mesh: Mesh) -> Any:
    build = modelworks.verify.runs.build_optimizer

    def without(*arguments: Any, **more: Any) -> Any:
        with patch(modelworks.optim.optimizer, "_LOW_PRECISION", ()):
            return build(*arguments, **more)

    return patch(modelworks.verify.runs, "build_optimizer", _once(without, build))


def _once(first: Callable[..., Any], then: Callable[..., Any]) -> Callable[..., Any]:
    """The split run comes first."""
    calls = iter([first])
    return lambda *arguments, **more: next(calls, then)(*arguments, **more)


def _loss_scale_kept(mesh: Mesh) -> Any:
    apply = modelworks.verify.runs.apply_gradients
    return patch(
        modelworks.verify.runs,
        "apply_gradients",
        lambda *arguments, loss_scale, **more: apply(*arguments, loss_scale=1.0, **more),
    )


def _nothing(mesh: Mesh) -> Any:
    return patch(torch, "_unused", None, create=True)


FAULTS: dict[str, Fault] = {
    "data sum missing": Fault("llama", {"dp_replicate": 2}, _no_data_reduction, r"rows.*data-parallel place 1"),
    "replica sum missing": Fault(
        "llama", {"dp_replicate": 2, "dp_shard": 2, "zero": 1}, _no_replica_reduction, r"data axes.*dp_replicate"
    ),
    "context sum missing": Fault("llama", {"cp": 2}, _no_data_reduction, r"data axes.*cp"),
    "sum of norms missing": Fault("llama", {"tp": 2}, _without_sum("tp"), r"^tensor/sequence parallel", r"norm"),
    "sum of head copies missing": Fault("tied", {"tp": 4}, _without_sum("kv"), r"^keys and values.*kv", r"\.[kv]\."),
    "tied sum missing": Fault("tied", {"pp": 2}, _without_sum("tied"), r"^embedding and head", r"^embedding"),
    "experts doubled": Fault(
        "mixtral", {"dp_replicate": 2, "ep": 2}, _experts_doubled, r"^expert.*2 times", r"experts"
    ),
    "experts over wrong group": Fault(
        "mixtral", {"dp_replicate": 2, "ep": 2}, _experts_reduced_as_others, r"^expert parallel", r"experts"
    ),
    "ring backwards": Fault("llama", {"cp": 4}, _ring_backwards, r"context parallel: the ring", place=(0, "attention")),
    "key gradients lost": Fault("llama", {"cp": 2}, _ring_loses_key_gradients, r"layer 1 on.*attention.k.*ring"),
    "tied weight counted twice": Fault("tied", {"pp": 2}, _all_counted, r"^gradient norm.*embedding.weight counted 2"),
    "shard missing in norm": Fault(
        "llama", {"dp_shard": 2, "zero": 1}, _norm_of_own_shards, r"^gradient norm.*on no rank"
    ),
    "layer dropped": Fault("llama", {"pp": 2}, _layer_dropped, r"^pipeline partition", r"^blocks\.", (1, "input")),
    "own denominator": Fault("llama", {"dp_replicate": 2}, _own_denominator, r"^loss.*denominator"),
    "same shards": Fault("llama", {"tp": 2}, _same_shards, r"^initialisation", place=(0, "input")),
    "dropout by rank": Fault("gpt2", {"dp_replicate": 2}, _dropout_by_rank, r"place 1.*dropout", place=(0, "input")),
    "stale edge": Fault("llama", {"pp": 2}, _stale_edge, r"edge into stage 1", place=(2, "input")),
    "not gathered": Fault("llama", {"dp_shard": 2, "zero": 1}, _not_gathered, r"^update.*gathered"),
    "documents ignored": Fault(
        "llama", {"cp": 2}, _documents_ignored, r"context parallel.*documents", place=(0, "attention")
    ),
    "row bias on each": Fault("gpt2", {"tp": 2}, _row_bias_on_each, r"tensor parallel", place=(0, "attention")),
    "auxiliary loss on each": Fault("mixtral", {"tp": 2}, _auxiliary_loss_on_each, r"layer 1 on.*router.*auxiliary"),
    "softmax of own vocabulary": Fault("llama", {"tp": 2}, _softmax_of_own_vocabulary, r"^loss.*vocabulary"),
    "outputs out of order": Fault(
        "mixtral", {"dp_replicate": 2, "ep": 2}, _outputs_out_of_order, r"expert.*order", place=(0, "feed_forward")
    ),
    "last micro-batch dropped": Fault(
        "llama", {"dp_replicate": 2}, _last_micro_batch_dropped, r"rows.*micro-batch 2 of every rank"
    ),
    "copies drift apart": Fault("llama", {"tp": 2}, _copies_not_averaged_alike, r"^update: rank 1.*norm"),
    "clipping forgotten": Fault("llama", {"dp_replicate": 2}, _clipping_forgotten, r"^update.*clipping"),
    "not a number": Fault("llama", {"dp_replicate": 2}, _nan_on_last_rank, r"not finite"),
    "sums in low precision": Fault(
        "llama", {"dp_replicate": 2}, _sums_in_low_precision, r"^gradients.*dtype of sums", train={"precision": "bf16"}
    ),
    "no master weights": Fault(
        "tied", {"dp_shard": 2, "zero": 1}, _no_master_weights, r"^update.*master", train={"precision": "bf16"}
    ),
    "loss scale kept": Fault("llama", {"pp": 2}, _loss_scale_kept, r"^loss scale.*1024", train={"precision": "fp16"}),
    "none": Fault("llama", {"dp_replicate": 2}, _nothing, r""),
}
