"""Zero 0, 1 and 2 against one process in float64: gradients, norm, three updates; bytes and traffic by the formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from data_cases import (
    LENGTH,
    ROWS,
    Case,
    assembled,
    assert_equal_to_one_process,
    backward_all,
    batch,
    build,
    loss_of,
    split,
    whole,
)
from pool import WorkerPool
from torch import nn

from modelworks.config import ParallelConfig
from modelworks.layout import Layout, ParameterPlan, ShardSpec, plan_parameters, split_in_chunks
from modelworks.layout.data_memory import data_parallel_memory, data_parallel_traffic, is_copied, padded_part
from modelworks.layout.placement import zero_dimension
from modelworks.models import CausalContext, Part, Transformer, default_dtype, initialize
from modelworks.parallel import Mesh, single_process
from modelworks.parallel.gradients import build_gradient_store
from modelworks.train.loss import vocabulary_loss

SMALL_BUCKETS = {"bucket_size": 2048}
# k has 2 rows and 18 columns, which 3 ranks cut along the columns: shards that are not contiguous.
SLANTED = {"d_model": 18, "n_heads": 9, "n_kv_heads": 1, "head_dim": 2}


def parallel(**keys: Any) -> ParallelConfig:
    return ParallelConfig(**{**SMALL_BUCKETS, **keys})


CASES = {
    "plain": Case(parallel(dp_replicate=2)),
    "plain, every": Case(parallel(dp_replicate=2, accumulate_reduce="every"), micro_batches=3),
    "plain, tied": Case(parallel(dp_replicate=2), {"tie_embeddings": True}, micro_batches=2),
    "1": Case(parallel(dp_shard=2, zero=1), micro_batches=4),
    "1, every": Case(parallel(dp_shard=3, zero=1, accumulate_reduce="every"), micro_batches=2),
    "1, slanted": Case(parallel(dp_shard=3, zero=1), SLANTED, p=float("inf")),
    "2": Case(parallel(dp_shard=2, zero=2), p=3.0),
    "2, uneven": Case(parallel(dp_shard=3, zero=2), {"tie_embeddings": True}, micro_batches=3),
    "2, every": Case(parallel(dp_shard=3, zero=2, accumulate_reduce="every"), SLANTED, micro_batches=4),
    "2, by hand": Case(parallel(dp_shard=3, zero=2), micro_batches=2, deferred=True),
    "2, by hand, every": Case(parallel(dp_shard=2, zero=2, accumulate_reduce="every"), micro_batches=2, deferred=True),
    "2, from meta": Case(parallel(dp_shard=3, zero=2), on_meta=True),
    "hybrid": Case(parallel(dp_replicate=2, dp_shard=2, zero=1), micro_batches=2),
    "hybrid, every": Case(parallel(dp_replicate=2, dp_shard=2, zero=2, accumulate_reduce="every"), micro_batches=3),
    "context": Case(parallel(dp_shard=2, cp=2, zero=2), {"family": "gpt2", "n_kv_heads": 4, "tie_embeddings": True}),
    "dropout": Case(parallel(dp_shard=2, zero=2), {"dropout": 0.2}, micro_batches=3, recompute="full"),
}


def expected_memory(case: Case, plans: dict[str, ParameterPlan]) -> Any:
    return data_parallel_memory(
        plans,
        case.layout,
        0,
        zero=case.parallel.zero,
        accumulate=case.parallel.accumulate_reduce,
        micro_batches=case.micro_batches,
        itemsize=case.dtype.itemsize,
    )


def assert_bytes_and_traffic(results: list[dict[str, Any]], case: Case) -> None:
    """Measured equals the formulas exactly, on every rank and in every step."""
    plans = results[0]["plans"]
    traffic = data_parallel_traffic(
        plans,
        case.layout,
        0,
        zero=case.parallel.zero,
        accumulate=case.parallel.accumulate_reduce,
        micro_batches=case.micro_batches,
        itemsize=case.dtype.itemsize,
    )
    for result in results:
        memory = expected_memory(case, result["plans"])
        assert result["resting"] == {"parameters": memory.parameters, "gradients": 0}
        assert result["after"]["gradients"] == 0
        for held in result["held"]:
            assert held[-1]["gradients"] == memory.gradients
            if case.parallel.accumulate_reduce == "last":
                assert [bytes_["gradients"] for bytes_ in held[:-2]] == [memory.accumulating] * (len(held) - 2)
        for measured in result["traffic"]:
            assert measured.keys() == traffic.keys()
            for key, volume in measured.items():
                assert volume == pytest.approx(traffic[key], rel=1e-12), key


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(workers: WorkerPool, name: str) -> None:
    case = CASES[name]
    results = workers.run(split, case.layout, case)
    assert_equal_to_one_process(results, case)
    assert_bytes_and_traffic(results, case)


@pytest.mark.slow
def test_sharding_sends_what_plain_data_parallelism_sends(workers: WorkerPool) -> None:
    sent = {}
    for zero, axis in ((0, "dp_replicate"), (1, "dp_shard"), (2, "dp_shard")):
        case = Case(parallel(zero=zero, **{axis: 2}))
        sent[zero] = sum(workers.run(split, case.layout, case)[0]["traffic"][0].values())
    assert sent[0] == sent[1] == sent[2] > 0


@pytest.mark.slow
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("zero", [0, 2])
def test_bfloat16_gradients_are_summed_in_float32(workers: WorkerPool, zero: int, deferred: bool) -> None:
    axis = "dp_shard" if zero else "dp_replicate"
    case = Case(parallel(zero=zero, **{axis: 2}), micro_batches=3, dtype=torch.bfloat16, deferred=deferred)
    results = workers.run(split, case.layout, case)
    assert all(gradient.dtype == torch.float32 for gradient in results[0]["gradients"].values())
    # One process adds up in bfloat16: 8 bits of mantissa.
    assert_equal_to_one_process(results, case, bound=0.05)
    assert_bytes_and_traffic(results, case)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_one_process_sends_nothing_and_copies_nothing(micro_batches: int, every: bool, dtype: torch.dtype) -> None:
    settings = parallel(accumulate_reduce="every" if every else "last")
    case = Case(settings, micro_batches=micro_batches, dtype=dtype)
    mesh = single_process(torch.device("cpu"))
    result = split(mesh, case)
    assert_equal_to_one_process([result], case, bound=0.05 if dtype == torch.bfloat16 else 1e-12)
    assert_bytes_and_traffic([result], case)
    model, _, store = build(mesh, case)
    backward_all(model, store, case, mesh, 0)
    kept = {name: parameter.grad for name, parameter in model.named_parameters()}
    if dtype == torch.float64:
        assert all(gradient is kept[name] for name, gradient in store.finish().items())
    assert all(gradient.dtype != torch.bfloat16 for gradient in store.finish().values())


class ExpertBlock(nn.Module):
    def __init__(self, local: tuple[int, ...]) -> None:
        super().__init__()
        self.up = nn.Linear(6, 5, bias=False, dtype=torch.float64)
        self.experts = nn.Parameter(torch.zeros(local, dtype=torch.float64))
        self.unused = nn.Parameter(torch.zeros(7, dtype=torch.float64))

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        y = torch.einsum("bd,eod->beo", self.up(x), self.experts).square().sum()
        return y + (self.unused.square().sum() * x.sum() if use else 0.0)


class Experts(nn.Module):
    """A block with a mixture's parameters, on this rank's part of the experts alone: a store looks at names only."""

    def __init__(self, local: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"0": ExpertBlock(local)})

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        return self.blocks["0"](x, use)  # type: ignore[no-any-return]


class Stage(nn.Module):
    """A parameter of its own and one that another stage on the rank holds too."""

    def __init__(self, name: str, shared: nn.Parameter) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict()
        self.shared, self.own = shared, name
        self.register_parameter(name, nn.Parameter(torch.ones(5, dtype=torch.float64)))

    def forward(self, factor: float) -> torch.Tensor:
        return (self.shared * factor).sum() + getattr(self, self.own).sum()  # type: ignore[no-any-return]


def expert_plans(mesh: Mesh, zero: int) -> dict[str, ParameterPlan]:
    """As `plan_parameters` would: experts spread over ep and cut over what is left, the rest cut over all."""
    shapes = {"blocks.0.up.weight": (5, 6), "blocks.0.experts": (4, 3, 5), "blocks.0.unused": (7,)}
    plans = {}
    for name, shape in shapes.items():
        experts = name.endswith("experts")
        computed = ShardSpec.whole(name, shape)
        if experts:
            computed = computed.cut(0, mesh.size("ep"), mesh.place("ep"))
        group = mesh.group("expert_shard" if experts else "shard")
        stored, dimension = computed, None
        if zero and group.size > 1:
            dimension = zero_dimension(computed.local_shape, group.size)
            stored = split_in_chunks(computed, dimension, group.size, group.index)
        plans[name] = ParameterPlan(computed, stored, dimension, experts=experts)
    return plans


def experts(mesh: Mesh, settings: ParallelConfig) -> dict[str, Any]:
    """The largest difference between what the store gives and local gradients summed by name, group after group."""
    plans = expert_plans(mesh, settings.zero)
    model = Experts(plans["blocks.0.experts"].computed.local_shape)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():  # the same on all ranks
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(mesh.rank), dtype=torch.float64)
    use = mesh.rank % 2 == 1  # half of the ranks never use one of the parameters
    expected = dict.fromkeys(plans, torch.zeros(()))
    for part in x:
        gradients = torch.autograd.grad(model(part, use), list(model.parameters()), allow_unused=True)
        for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
            expected[name] = expected[name] + (torch.zeros_like(parameter) if gradient is None else gradient)
    for name, plan in plans.items():
        groups = ("expert_shard", "expert_replicate") if plan.experts else ("data",)
        for group in groups:
            mesh.group(group).all_reduce_(expected[name])
    store = build_gradient_store([model], plans, mesh, settings)
    store.begin_step(len(x))
    for index, part in enumerate(x):
        store.before_backward(list(plans), last=index == len(x) - 1)
        model(part, use).backward()
        store.after_backward(list(plans))
    errors = {}
    for name, gradient in store.finish().items():
        plan = plans[name]
        inside = tuple(
            slice(first - start, stop - start)
            for (first, stop), (start, _) in zip(plan.stored.bounds, plan.computed.bounds, strict=True)
        )
        assert gradient.shape == plan.stored.local_shape
        errors[name] = float((gradient - expected[name][inside]).abs().sum())
    store.end_step()
    return errors


EXPERT_LAYOUTS = [
    {"dp_replicate": 4, "ep": 2},
    {"dp_shard": 4, "ep": 2, "zero": 1},
    {"dp_shard": 4, "ep": 4, "zero": 2},
    {"dp_replicate": 2, "dp_shard": 2, "ep": 2, "zero": 2},
    {"dp_replicate": 2, "dp_shard": 2, "ep": 4, "zero": 1},
]


@pytest.mark.slow
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("keys", EXPERT_LAYOUTS, ids=str)
def test_experts_and_parameters_that_some_ranks_do_not_use(
    workers: WorkerPool, keys: dict[str, int], every: bool
) -> None:
    settings = parallel(**keys, accumulate_reduce="every" if every else "last")
    for errors in workers.run(experts, Layout.of(settings), settings):
        assert errors.keys() == {"blocks.0.up.weight", "blocks.0.experts", "blocks.0.unused"}
        assert max(errors.values()) <= 1e-11


def two_stages(mesh: Mesh, settings: ParallelConfig) -> dict[str, float]:
    """A parameter of two parts on one rank, as tied embeddings under a schedule that comes back: reduced once."""
    shared = nn.Parameter(torch.full((4, 3), 2.0, dtype=torch.float64))
    parts = [Stage(name, shared) for name in ("first", "second")]
    plans = {}
    for name, shape in {"shared": (4, 3), "first": (5,), "second": (5,)}.items():
        computed = ShardSpec.whole(name, shape)
        stored = split_in_chunks(computed, 0, 2, mesh.rank)
        plans[name] = ParameterPlan(computed, stored, 0)
    store = build_gradient_store(parts, plans, mesh, settings)
    mesh.traffic.take()
    store.begin_step(1)
    for name, part, factor in (("second", parts[1], 3.0), ("first", parts[0], 5.0)):
        store.unshard([name])
        store.before_backward(["shared", name], last=True)
        part(factor).mul(mesh.rank + 1).backward()
        store.after_backward(["shared", name])
    gradients = store.finish()
    scattered = mesh.traffic.take()["shard", "reduce_scatter"].calls
    return {name: gradient.unique().tolist() for name, gradient in gradients.items()} | {"calls": scattered}


@pytest.mark.slow
def test_a_parameter_of_two_stages_is_reduced_after_both(workers: WorkerPool) -> None:
    settings = parallel(dp_shard=2, zero=2)
    for result in workers.run(two_stages, Layout.of(settings), settings):
        assert result == {"shared": [24.0], "first": [3.0], "second": [3.0], "calls": 3}


class Partial(nn.Module):
    """A parameter whose gradient is complete on each rank and two of which each rank has a part."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict()
        for name in ("complete", "first", "second"):
            self.register_parameter(name, nn.Parameter(torch.ones(3, 2, dtype=torch.float64)))

    def forward(self, factor: float) -> torch.Tensor:
        return (factor * (self.complete + 10 * self.first + 100 * self.second)).sum()  # type: ignore[no-any-return]


def partial_sums(mesh: Mesh, settings: ParallelConfig, group: str) -> dict[str, Any]:
    model, plans = Partial(), {}
    for name in ("complete", "first", "second"):
        computed = ShardSpec.whole(name, (3, 2))
        cut = settings.zero > 0
        stored = split_in_chunks(computed, 0, 2, mesh.place("shard")) if cut else computed
        plans[name] = ParameterPlan(computed, stored, 0 if cut else None, () if name == "complete" else (group,))
    store = build_gradient_store([model], plans, mesh, settings)
    mesh.traffic.take()
    store.begin_step(1)
    store.before_backward(list(plans), last=True)
    model(float(2**mesh.rank)).backward()
    store.after_backward(list(plans))
    gradients = {name: gradient.unique().tolist() for name, gradient in store.finish().items() if gradient.numel()}
    volumes = mesh.traffic.take()
    expected = data_parallel_traffic(
        plans, mesh.layout, mesh.rank, zero=settings.zero, accumulate="last", micro_batches=1, itemsize=8
    )
    same = {key: volumes[key].bytes == expected[key] for key in volumes if key[1] != "all_gather"}
    return {"gradients": gradients, "calls": volumes[group, "all_reduce"].calls, "bytes": same}


@pytest.mark.slow
@pytest.mark.parametrize("group", ["tp", "tied"])
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_partial_gradients_are_summed_once_more(workers: WorkerPool, zero: int, group: str) -> None:
    axis = {"dp_shard": 2} if zero else {"dp_replicate": 2}
    settings = parallel(**axis, zero=zero, **{"tp" if group == "tp" else "pp": 2})
    layout = Layout.of(settings)
    for rank, result in enumerate(workers.run(partial_sums, layout, settings, group)):
        over_data = float(sum(2**other for other in layout.ranks(rank, "data")))
        over_all = float(2**4 - 1)
        expected = {"complete": [over_data], "first": [10 * over_all], "second": [100 * over_all]}
        assert result["gradients"] == expected
        assert result["calls"] == 1
        assert list(result["bytes"].values()) == [True, True]


def stages(mesh: Mesh, case: Case) -> dict[str, Any]:
    """Two stages of the model on each rank, all forwards first: gradients of the whole batch."""
    config = case.model
    with default_dtype(case.dtype):
        parts = [Transformer(config, Part((0,), True, False)), Transformer(config, Part((1,), False, True))]
    for part in parts:
        initialize(part, 7)
    names = [[name for name, _ in part.named_parameters()] for part in parts]
    plans = plan_parameters(config, case.layout, case.parallel, mesh.rank, [range(config.n_layers)])
    store = build_gradient_store(parts, plans, mesh, case.parallel)
    tokens, targets, weights = batch(0)
    share, positions = ROWS // mesh.size("data") // case.micro_batches, torch.arange(LENGTH)
    first = mesh.place("data") * share * case.micro_batches
    edges = []
    store.begin_step(case.micro_batches)
    for index in range(case.micro_batches):
        rows = slice(first + index * share, first + (index + 1) * share)
        hidden = parts[0](tokens[rows], positions.expand(share, -1), CausalContext())
        received = hidden.detach().requires_grad_()
        result = parts[1](received, positions.expand(share, -1), CausalContext())
        scale = 1.0 / float(weights.sum())
        loss = vocabulary_loss(result, parts[1].head_weight(), targets[rows], weights[rows], scale=scale)
        edges.append((hidden, received, loss.objective))
    for index, (hidden, received, objective) in enumerate(edges):
        last = index == len(edges) - 1
        store.before_backward(names[1], last=last)
        objective.backward()
        store.after_backward(names[1])
        store.before_backward(names[0], last=last)
        hidden.backward(received.grad)
        store.after_backward(names[0])
    return {"gradients": store.finish(), "plans": plans}


@pytest.mark.slow
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_two_stages_on_a_rank(workers: WorkerPool, zero: int, every: bool) -> None:
    case = Case(parallel(dp_shard=2, zero=zero, accumulate_reduce="every" if every else "last"), micro_batches=2)
    gradients = assembled(workers.run(stages, case.layout, case), "gradients")
    for name, expected in whole(case)["gradients"].items():
        torch.testing.assert_close(gradients[name], expected, rtol=0, atol=1e-12)


def with_frozen(mesh: Mesh, case: Case, frozen: list[str]) -> dict[str, Any]:
    with default_dtype(case.dtype):
        model = Transformer(case.model)
    initialize(model, 7)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    plans = plan_parameters(case.model, case.layout, case.parallel, mesh.rank, [range(case.model.n_layers)])
    store = build_gradient_store([model], plans, mesh, case.parallel)
    backward_all(model, store, case, mesh, 0)
    gradients = {name: gradient.clone() for name, gradient in store.finish().items()}
    stored = {name: tensor.requires_grad for name, tensor in store.stored_parameters().items()}
    return {"gradients": gradients, "stored": stored, "plans": {name: plans[name] for name in gradients}}


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_frozen_parameters_have_no_gradient_and_disturb_no_other(workers: WorkerPool, zero: int) -> None:
    frozen = ["blocks.0.attention_norm.weight", "blocks.1.feed_forward.up.weight", "embedding.weight"]
    case = Case(parallel(**({"dp_shard": 3} if zero else {"dp_replicate": 3}), zero=zero), micro_batches=2)
    results = workers.run(with_frozen, case.layout, case, frozen)
    gradients, expected = assembled(results, "gradients"), whole(case)["gradients"]
    assert gradients.keys() == expected.keys() - set(frozen)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-12)
    assert [name for name, trained in results[0]["stored"].items() if not trained] == sorted(
        frozen, key=list(results[0]["stored"]).index
    )


def started_before(mesh: Mesh, case: Case) -> list[int]:
    """Reductions started when the backward pass comes to the first layer's gradient, and in all."""
    model, plans, store = build(mesh, case)
    mesh.traffic.take()
    counts = []

    def count(*_: Any) -> None:
        counts.append(sum(volume.calls for _, kind, volume in mesh.traffic if kind != "all_gather"))

    model.embedding.weight.register_hook(count)  # type: ignore[union-attr]
    store.begin_step(1)
    loss = loss_of(model, case, 0, 0, ROWS)
    store.before_backward(list(plans), last=True)
    loss.backward()
    store.after_backward(list(plans))
    store.finish()
    count()
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("axis", [{"dp_replicate": 2}, {"dp_shard": 2, "zero": 1}, {"dp_shard": 2, "zero": 2}], ids=str)
def test_reduction_overlaps_with_the_backward_pass(workers: WorkerPool, axis: dict[str, int]) -> None:
    case = Case(parallel(**axis))
    for before, in_all in workers.run(started_before, case.layout, case):
        assert in_all > 3
        assert before >= in_all - 2  # all but the buckets that the embedding is in and the one being filled


@pytest.mark.slow
def test_finishing_before_the_last_backward_is_an_error(workers: WorkerPool) -> None:
    with pytest.raises(AssertionError, match="no backward was the last one for"):
        workers.run(finish_too_early, Layout(dp_replicate=2), CASES["plain"])


def finish_too_early(mesh: Mesh, case: Case) -> None:
    build(mesh, case)[2].finish()


def test_formulas_by_hand() -> None:
    """A (5, 4) and a (2, 6) parameter over 3 ranks: 2 rows each, and 2 columns each."""
    layout, plans = Layout(dp_shard=3, dp_replicate=2), {}
    for name, shape in {"blocks.0.a": (5, 4), "head": (2, 6)}.items():
        whole = ShardSpec.whole(name, shape)
        dimension = zero_dimension(shape, 3)
        plans[name] = ParameterPlan(whole, split_in_chunks(whole, dimension, 3, 0), dimension)
    assert [padded_part(plan, 3) for plan in plans.values()] == [8, 4]
    assert [is_copied(plan) for plan in plans.values()] == [False, True]
    common: dict[str, Any] = {"micro_batches": 4}
    memory = {
        (zero, accumulate): data_parallel_memory(plans, layout, 0, zero=zero, accumulate=accumulate, **common)
        for zero in (1, 2, 3)
        for accumulate in ("last", "every")
    }
    assert {key: value.gradients for key, value in memory.items()} == {
        (1, "last"): 4 * 36, (1, "every"): 4 * 12, (2, "last"): 4 * 12,
        (2, "every"): 4 * 12, (3, "last"): 4 * 12, (3, "every"): 4 * 12,
    }  # fmt: skip
    assert {value.accumulating for key, value in memory.items() if key[1] == "last"} == {4 * 32}
    assert {value.parameters for key, value in memory.items()} == {4 * 36, 4 * 12}  # the copied shard has 4 elements
    traffic = data_parallel_traffic(plans, layout, 0, zero=3, accumulate="every", **common)
    assert traffic == {
        ("shard", "reduce_scatter"): 4 * 2 * 12 * 4,
        ("dp_replicate", "all_reduce"): 12 * 4,
        ("shard", "all_gather"): 4 * 2 * (2 * 8 + 4) * 4,
    }
    once = data_parallel_traffic(plans, layout, 0, zero=3, accumulate="last", gathers="step", **common)
    assert once["shard", "all_gather"] == 2 * 12 * 4


@pytest.mark.slow
def test_a_plan_of_another_shape_is_refused(workers: WorkerPool) -> None:
    with pytest.raises(AssertionError, match=r"the parameter has shape \(50, 16\), its plan says \(51, 16\)"):
        workers.run(wrong_plan, Layout(dp_replicate=2), replace(CASES["plain"], changes={}))


def wrong_plan(mesh: Mesh, case: Case) -> None:
    model, plans, _ = build(mesh, case)
    for name in ("embedding.weight",):
        spec = ShardSpec.whole(name, (51, 16))
        plans[name] = ParameterPlan(spec, spec)
    build_gradient_store([model], plans, mesh, case.parallel)
