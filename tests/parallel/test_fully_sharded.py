"""Zero 3 (FSDP2) against one process in float64, like zero 0 to 2; and what only zero 3 does: gather and free."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from data_cases import ROWS, Case, assembled, assert_equal_to_one_process, backward_all, build, loss_of, split, whole
from pool import WorkerPool
from test_data import EXPERT_LAYOUTS, SLANTED, assert_bytes_and_traffic, experts, parallel, two_stages

from modelworks.layout import Layout, plan_parameters
from modelworks.layout.data_memory import data_parallel_memory
from modelworks.models import Transformer, default_dtype, initialize
from modelworks.parallel import Mesh
from modelworks.parallel.expert import shard_experts
from modelworks.parallel.gradients import build_gradient_store

CASES = {
    "even": Case(parallel(dp_shard=2, zero=3), p=3.0),
    "uneven": Case(parallel(dp_shard=3, zero=3), micro_batches=3),
    "slanted, every": Case(parallel(dp_shard=3, zero=3, accumulate_reduce="every"), SLANTED, micro_batches=4),
    "tied": Case(parallel(dp_shard=3, zero=3), {"tie_embeddings": True}, micro_batches=2, on_meta=True),
    "hybrid": Case(parallel(dp_replicate=2, dp_shard=2, zero=3), micro_batches=3),
    "hybrid, every": Case(parallel(dp_replicate=2, dp_shard=2, zero=3, accumulate_reduce="every"), micro_batches=3),
    "context": Case(parallel(dp_shard=2, cp=2, zero=3), {"family": "gpt2", "n_kv_heads": 4}, on_meta=True),
    "by hand": Case(parallel(dp_shard=3, zero=3), micro_batches=2, deferred=True),
    "by hand, every": Case(parallel(dp_shard=2, zero=3, accumulate_reduce="every"), micro_batches=3, deferred=True),
    "dropout, recompute": Case(parallel(dp_shard=2, zero=3), {"dropout": 0.2}, micro_batches=2, recompute="full"),
    "selective": Case(parallel(dp_shard=2, zero=3), micro_batches=2, recompute="selective"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(workers: WorkerPool, name: str) -> None:
    case = CASES[name]
    results = workers.run(split, case.layout, case)
    assert_equal_to_one_process(results, case)
    assert_bytes_and_traffic(results, case)


@pytest.mark.slow
def test_sends_at_most_half_as_much_again(workers: WorkerPool) -> None:
    plain, sharded = Case(parallel(dp_replicate=2)), Case(parallel(dp_shard=2, zero=3))
    sent = [sum(workers.run(split, case.layout, case)[0]["traffic"][0].values()) for case in (plain, sharded)]
    assert 1.0 < sent[1] / sent[0] <= 1.5


@pytest.mark.slow
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("every", [False, True])
def test_bfloat16_gradients_are_reduced_in_float32(workers: WorkerPool, every: bool, deferred: bool) -> None:
    settings = parallel(dp_shard=2, zero=3, accumulate_reduce="every" if every else "last")
    case = Case(settings, micro_batches=3, dtype=torch.bfloat16, deferred=deferred)
    results = workers.run(split, case.layout, case)
    gradients = [gradient for result in results for gradient in result["gradients"].values()]
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    # Sums that had been rounded to bfloat16 on the way would be bfloat16 numbers.
    assert any((gradient != gradient.bfloat16()).any() for gradient in gradients)
    assert_equal_to_one_process(results, case, bound=0.05)
    assert_bytes_and_traffic(results, case)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [keys for keys in EXPERT_LAYOUTS if keys.get("zero")], ids=str)
def test_experts_on_their_own_groups(workers: WorkerPool, keys: dict[str, int]) -> None:
    settings = parallel(**{**keys, "zero": 3})
    for errors in workers.run(experts, Layout.of(settings), settings):
        assert errors.keys() == {"blocks.0.up.weight", "blocks.0.experts", "blocks.0.unused"}
        assert max(errors.values()) <= 1e-11


@pytest.mark.slow
def test_a_parameter_of_two_stages_is_reduced_after_both(workers: WorkerPool) -> None:
    settings = parallel(dp_shard=2, zero=3)
    for result in workers.run(two_stages, Layout.of(settings), settings):
        assert result == {"shared": [24.0], "first": [3.0], "second": [3.0], "calls": 3}


def gathering(mesh: Mesh, case: Case, gathers: str) -> dict[str, Any]:
    """Bytes of parameters at rest, gathered, after use and freed; bytes gathered for two micro-batches in flight."""
    with default_dtype(case.dtype):
        model = Transformer(case.model)
    initialize(model, 7)
    plans = plan_parameters(case.model, case.layout, case.parallel, mesh.rank, [range(2)])
    # One stage of a pipeline, as far as the store can see.
    store = build_gradient_store([model], plans, mesh, case.parallel.model_copy(update={"pp": 2, "pp_gather": gathers}))
    names = list(plans)
    sizes = [store.bytes()["parameters"]]
    mesh.traffic.take()
    store.unshard(names)
    sizes.append(store.bytes()["parameters"])
    half = ROWS // 2
    store.begin_step(2)
    # Both forwards come first, so that the first backward frees what the second needs again.
    losses = [loss_of(model, case, 0, first, first + half, plain=True) for first in (0, half)]
    for index, loss in enumerate(losses):
        store.before_backward(names, last=index == 1)
        loss.backward()
        store.after_backward(names)
    gathered = mesh.traffic.take()["shard", "all_gather"].bytes
    sizes.append(store.bytes()["parameters"])
    gradients = {name: gradient.clone() for name, gradient in store.finish().items()}
    store.reshard(names)
    sizes.append(store.bytes()["parameters"])
    store.end_step()
    return {"sizes": sizes, "gathered": gathered, "plans": plans, "gradients": gradients}


@pytest.mark.slow
@pytest.mark.parametrize("gathers", ["step", "micro-batch"])
def test_under_a_pipeline_gathered_once_a_step_or_for_each_use(workers: WorkerPool, gathers: str) -> None:
    case = CASES["even"]
    results = workers.run(gathering, case.layout, case, gathers)
    once = data_parallel_memory(
        results[0]["plans"], case.layout, 0, zero=3, accumulate="last", micro_batches=2, itemsize=8
    ).parameters
    gradients = assembled(results, "gradients")
    for name, expected in whole(case)["gradients"].items():
        torch.testing.assert_close(gradients[name], 2 * expected, rtol=0, atol=1e-12)  # both ranks had all rows
    for result in results:  # of two ranks, each sends its half once for each gathering
        assert result["sizes"] == [once, 3 * once, 3 * once if gathers == "step" else once, once]
        assert result["gathered"] == once if gathers == "step" else result["gathered"] > 2 * once


def evaluation_between_steps(mesh: Mesh, case: Case) -> bool:
    """An evaluation leaves what is outside the blocks gathered; an update after it must not be missed."""
    model, plans, store = build(mesh, case)
    names = list(plans)
    with torch.no_grad():
        before = loss_of(model, case, 0, 0, ROWS)
    for tensor in store.stored_parameters().values():
        tensor.detach().mul_(1.5)
    store.after_update()
    with torch.no_grad():
        after = loss_of(model, case, 0, 0, ROWS)
    store.reshard(names)
    with torch.no_grad():
        again = loss_of(model, case, 0, 0, ROWS)
    return bool(before != after) and bool(after == again)


@pytest.mark.slow
def test_an_update_after_an_evaluation_is_seen(workers: WorkerPool) -> None:
    case = CASES["even"]
    assert all(workers.run(evaluation_between_steps, case.layout, case))


def mixture(mesh: Mesh, case: Case) -> dict[str, Any]:
    plans = plan_parameters(case.model, case.layout, case.parallel, mesh.rank, [range(case.model.n_layers)])
    with default_dtype(case.dtype), torch.device("meta"):
        model = Transformer(case.model)
    shard_experts(model, plans, mesh)
    store = build_gradient_store([model], plans, mesh, case.parallel)
    with default_dtype(case.dtype):
        source = Transformer(case.model)
    initialize(source, 7)
    values = dict(source.named_parameters())
    store.load(lambda spec, tensor: tensor.copy_(values[spec.name][spec.slices]))
    backward_all(model, store, case, mesh, 0)
    return {"gradients": store.finish(), "plans": plans}


@pytest.mark.slow
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize(
    "keys",
    [
        {"dp_shard": 2, "zero": 3},
        {"dp_shard": 2, "ep": 2, "zero": 3},
        {"dp_shard": 4, "ep": 2, "zero": 2},
        {"dp_shard": 4, "ep": 2, "zero": 3},
    ],
    ids=str,
)
def test_a_mixture_of_experts_equals_one_process(workers: WorkerPool, keys: dict[str, int], every: bool) -> None:
    settings = parallel(**keys, accumulate_reduce="every" if every else "last")
    case = Case(settings, {"n_experts": 4, "experts_per_token": 2, "d_expert": 10}, micro_batches=3)
    gradients = assembled(workers.run(mixture, case.layout, case), "gradients")
    expected = whole(case)["gradients"]
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-12)
