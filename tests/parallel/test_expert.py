"""Expert parallelism against one process in float64: loss, every gradient, the router's losses, biases and records."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import WorkerPool
from torch import Tensor, nn

from modelworks.config import ModelConfig, ParallelConfig
from modelworks.layout import Layout, ParameterPlan, plan_parameters
from modelworks.models import (
    AttentionContext,
    CausalContext,
    Routing,
    RoutingTotals,
    Transformer,
    initialize,
    routed_layers,
    routing_state,
    update_router_bias,
)
from modelworks.models.layers.deferred import defer_weights
from modelworks.parallel import (
    Mesh,
    build_routing,
    context_parallel,
    reduce_totals_,
    sequence_columns,
    shard_experts,
    shard_tensor,
)
from modelworks.parallel.expert import ExpertExchange, by_expert
from modelworks.train.loss import vocabulary_loss

ROWS, LENGTH = 8, 8
SIZES: dict[str, Any] = {"n_layers": 3, "d_model": 16, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 53, "d_ff": 21}
SIZES |= {"max_seq_len": 16, "n_experts": 4, "d_expert": 12, "dense_layers": [1], "init_std": 0.3}
SIZES |= {"router_aux_loss": 0.3, "router_z_loss": 0.05}
DROPLESS = ModelConfig(**SIZES)
CAPACITY = ModelConfig(**SIZES, expert_capacity=0.8, family="qwen3_moe", experts_per_token=2, router_normalize=False)
BIAS = ModelConfig(**SIZES, router_bias=True, router_bias_rate=0.01)


def whole_model(config: ModelConfig, *, one_sided: bool = False) -> Transformer:
    """one_sided: a bias that sends every token to the experts 0 and 1."""
    model = Transformer(config).to(torch.float64).train()
    initialize(model, 3)
    if one_sided:
        for bias in routing_state(model).values():
            bias += torch.tensor([9.0, 9.0, 0.0, 0.0])
    return model


def batch(config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """tokens, targets and weights of the global batch, each (ROWS, LENGTH)."""
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(0, config.vocab_size, (2, ROWS, LENGTH), generator=generator)
    return tokens, targets, torch.rand(ROWS, LENGTH, generator=generator, dtype=torch.float64)


def backward(
    model: Transformer, micro: tuple[Tensor, ...], columns: Tensor, context: AttentionContext, **loss: Any
) -> Tensor:
    tokens, targets, weights = micro
    hidden = model(tokens, columns.expand(tokens.shape), context)
    value = vocabulary_loss(hidden, model.head_weight(), targets, weights, chunk_tokens=7, **loss)
    value.objective.backward()
    return value.objective.detach()


def one_process(config: ModelConfig, one_sided: bool) -> dict[str, Any]:
    """What every layout is to come to; a worker finds it once for each model."""
    key = (config.model_dump_json(), one_sided)
    if key not in _expected:
        _expected[key] = _one_process(config, one_sided)
    return _expected[key]


_expected: dict[tuple[str, bool], dict[str, Any]] = {}


def _one_process(config: ModelConfig, one_sided: bool) -> dict[str, Any]:
    model = whole_model(config, one_sided=one_sided)
    totals, routing = RoutingTotals(model), Routing(2.0 / ROWS, LENGTH)
    scale = 2.0 / float(batch(config)[2].sum())
    loss = backward(model, batch(config), torch.arange(LENGTH), CausalContext(routing=routing), scale=scale)
    totals.add(routing)
    update_router_bias(model, totals.loads())
    return {
        "loss": loss,
        "gradients": {name: parameter.grad for name, parameter in model.named_parameters()},
        "figures": totals.figures(ROWS),
        "bias": routing_state(model),
    }


def sum_of_ranks(gradient: Tensor, plan: ParameterPlan, mesh: Mesh) -> Tensor:
    """What the gradient's owner does: plain sums over the ranks that saw other tokens or had partial sums."""
    data = ("expert_shard", "expert_replicate") if plan.experts else ("data",)
    for group in (*plan.sums, *data):
        mesh.group(group).all_reduce_(gradient)
    return gradient


def compare(
    mesh: Mesh,
    config: ModelConfig,
    *,
    one_sided: bool = False,
    recompute: Any = "none",
    compiled: bool = False,
    deferred: bool = False,
) -> dict[str, Any]:
    """The worst differences to one process of what this rank has, after micro-batches of one row."""
    layout = mesh.layout
    plans = plan_parameters(config, layout, ParallelConfig(tp=layout.tp), mesh.rank, [range(config.n_layers)])
    part = whole_model(config, one_sided=one_sided)
    shard_tensor(part, {name: without_experts(plan) for name, plan in plans.items()}, mesh, sequence_parallel=True)
    shard_experts(part, plans, mesh)
    part.set_recompute(recompute)
    waiting = defer_weights(part)
    if compiled:
        warnings.filterwarnings("ignore", message="The .grad attribute")  # the compiler looks at every tensor
        for block in part.blocks.values():
            block.compile(backend="aot_eager")
    columns = sequence_columns(LENGTH, layout.cp, mesh.place("cp"), "ring")
    place, share = mesh.place("dp"), ROWS // mesh.size("dp")
    scale = 2.0 / float(batch(config)[2].sum())
    totals, loss = RoutingTotals(part), torch.zeros((), dtype=torch.float64)
    for row in range(place * share, (place + 1) * share):
        routing = build_routing(
            mesh, loss_scale=2.0, rows=ROWS, row_length=LENGTH, columns=columns if layout.cp > 1 else None
        )
        micro = tuple(tensor[row : row + 1, columns] for tensor in batch(config))
        context: AttentionContext = CausalContext(routing=routing)
        if layout.cp > 1:
            context = context_parallel(mesh, "ring", columns, None, routing=routing)
        options = {"scale": scale, "group": mesh.group("tp"), "vocabulary": plans["head.weight"].computed}
        if deferred:
            with waiting.splitting(), waiting.collect(row):
                loss += backward(part, micro, columns, context, **options)
            waiting.run(row)
        else:
            loss += backward(part, micro, columns, context, **options)
        totals.add(routing)
    reduce_totals_(totals, mesh)
    update_router_bias(part, totals.loads())

    expected = one_process(config, one_sided)
    gradients = {}
    for name, parameter in part.named_parameters():
        assert tuple(parameter.shape) == plans[name].computed.local_shape, name
        assert parameter.grad is not None, name
        mine = sum_of_ranks(parameter.grad, plans[name], mesh)
        gradients[name] = float((mine - expected["gradients"][name][plans[name].computed.slices]).abs().max())
    figures = totals.figures(ROWS)
    assert figures.keys() == expected["figures"].keys()
    return {
        "loss": abs(float(mesh.group("data").all_reduce_(loss) - expected["loss"])),
        "gradients": gradients,
        "figures": max(abs(figures[name] - value) for name, value in expected["figures"].items()),
        "bias": all(torch.equal(bias, expected["bias"][name]) for name, bias in routing_state(part).items()),
        "exchanged": any(mixture.exchange is not None for _, mixture in routed_layers(part)),
    }


def without_experts(plan: ParameterPlan) -> ParameterPlan:
    """A plan whose slices of experts are still whole, so that `shard_experts` cuts them itself."""
    if not plan.experts:
        return plan
    spec = plan.computed
    bounds = ((0, spec.shape[0]), *spec.bounds[1:])
    return ParameterPlan(type(spec)(spec.name, spec.shape, bounds), plan.stored, experts=True)


def assert_equal_to_one_process(results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        assert result["loss"] <= 1e-12, rank
        assert {name: error for name, error in result["gradients"].items() if error > 1e-12} == {}, rank
        assert result["figures"] <= 1e-12, rank
        assert result["bias"], rank
        assert result["exchanged"], rank


LAYOUTS = {
    "ep2": Layout(dp_replicate=2, ep=2),
    "ep4": Layout(dp_shard=4, ep=4),
    "ep2-dp4": Layout(dp_replicate=4, ep=2),
    "ep2-shard4": Layout(dp_shard=4, ep=2),
    "ep2-hybrid": Layout(dp_replicate=2, dp_shard=2, ep=2),
    "ep4-hybrid": Layout(dp_replicate=2, dp_shard=2, ep=4),
    "ep2-cp2": Layout(cp=2, ep=2),
    "ep4-cp2-shard2": Layout(dp_shard=2, cp=2, ep=4),
    "ep2-tp2": Layout(dp_shard=2, tp=2, ep=2),
    "ep2-tp2-cp2": Layout(cp=2, tp=2, ep=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("config", [DROPLESS, CAPACITY], ids=["dropless", "capacity"])
def test_equals_one_process(workers: WorkerPool, config: ModelConfig, name: str) -> None:
    assert_equal_to_one_process(workers.run(compare, LAYOUTS[name], config))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(dp_replicate=2, cp=2, tp=2, ep=4), Layout(dp_shard=2, cp=2, tp=2, ep=2)])
def test_equals_one_process_on_eight_ranks(workers: WorkerPool, layout: Layout) -> None:
    assert_equal_to_one_process(workers.run(compare, layout, CAPACITY))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ep2-dp4", "ep4-cp2-shard2", "ep2-tp2"])
def test_the_bias_moves_alike_everywhere(workers: WorkerPool, name: str) -> None:
    assert_equal_to_one_process(workers.run(compare, LAYOUTS[name], BIAS))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ep2", "ep4"])
def test_ranks_that_no_token_comes_to(workers: WorkerPool, name: str) -> None:
    assert_equal_to_one_process(workers.run(compare, LAYOUTS[name], BIAS, one_sided=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [{"recompute": "selective"}, {"recompute": "full"}, {"deferred": True}],
    ids=["selective", "full", "deferred"],
)
def test_with_recomputation_and_put_off_weight_gradients(workers: WorkerPool, how: dict[str, Any]) -> None:
    assert_equal_to_one_process(workers.run(compare, LAYOUTS["ep4-cp2-shard2"], CAPACITY, **how))


@pytest.mark.slow
def test_with_compiled_blocks(workers: WorkerPool) -> None:
    assert_equal_to_one_process(workers.run(compare, LAYOUTS["ep2-cp2"], CAPACITY, compiled=True))


class ScaledBy(nn.Module):
    """Experts that multiply by their own number: which expert saw a row can be read off its output."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        numbers = torch.arange(self.first, self.first + len(counts), dtype=rows.dtype) + 1
        return rows * numbers.repeat_interleave(counts)[:, None]


def exchange_drawn_rows(mesh: Mesh, n_draws: int) -> list[str]:
    """Routings drawn with many empty experts and rows that are not sent; what went wrong, in words."""
    group, per_rank = mesh.group("ep"), 2
    n_experts = per_rank * group.size
    exchange, experts = ExpertExchange(group), ScaledBy(per_rank * group.index)
    problems = []
    for draw in range(n_draws):
        generator = torch.Generator().manual_seed(1000 * draw + mesh.rank)
        counts = torch.randint(0, 4, (n_experts,), generator=generator)
        counts *= torch.rand(n_experts, generator=generator) < 0.6
        if draw % 5 == mesh.rank:
            counts.zero_()
        kept = int(counts.sum())
        rows = torch.randn(kept + draw % 3, 3, generator=generator, dtype=torch.float64).requires_grad_()
        result = exchange(experts, rows, counts)  # type: ignore[arg-type]
        numbers = torch.zeros(len(rows), 1, dtype=torch.float64)
        numbers[:kept, 0] = (torch.arange(n_experts) + 1.0).double().repeat_interleave(counts)
        if not torch.equal(result, rows * numbers):
            problems.append(f"draw {draw}: outputs")
        weights = torch.randn(rows.shape, generator=generator, dtype=torch.float64)
        (result * weights).sum().backward()
        # The rows of other ranks' experts leave and return, forward; those of theirs that came here do, backward.
        arriving = group.all_gather(counts).view(group.size, group.size, per_rank)
        elsewhere = kept - int(arriving[group.index, group.index].sum())
        guests = int(arriving[:, group.index].sum() - arriving[group.index, group.index].sum())
        volume = mesh.traffic.take()["ep", "all_to_all"]
        if (volume.calls, volume.bytes) != (5, 8 * (n_experts - per_rank) + 2 * (elsewhere + guests) * 3 * 8):
            problems.append(f"draw {draw}: {volume}")
        if rows.grad is None or not torch.equal(rows.grad, weights * numbers):
            problems.append(f"draw {draw}: gradients")
    return problems


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_come_back_to_where_they_left(workers: WorkerPool, ranks: int) -> None:
    assert workers.run(exchange_drawn_rows, Layout(dp_shard=ranks, ep=ranks), 25) == [[]] * ranks


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(st.integers(0, 3), min_size=n, max_size=n), min_size=1)))
def test_order_by_expert(arriving: list[list[int]]) -> None:
    expert_of = [expert for counts in arriving for expert, count in enumerate(counts) for _ in range(count)]
    order = by_expert(torch.tensor(arriving)).tolist()
    assert order == sorted(range(len(expert_of)), key=lambda row: (expert_of[row], row))


def unsplit(mesh: Mesh) -> bool:
    """Whether `shard_experts` leaves a part alone whose experts are all here."""
    part = whole_model(DROPLESS)
    before = dict(part.named_parameters())
    shard_experts(part, {}, mesh)
    return all(parameter is before[name] for name, parameter in part.named_parameters())


@pytest.mark.slow
def test_without_expert_parallelism_nothing_changes(workers: WorkerPool) -> None:
    assert workers.run(unsplit, Layout(dp_shard=2)) == [True, True]
