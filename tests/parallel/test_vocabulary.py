"""The vocabulary loss over ranks that each have some rows of the head, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pool import WorkerPool
from torch import Tensor

from modelworks.layout import Layout, ShardSpec, split_evenly
from modelworks.parallel import Mesh
from modelworks.parallel.vocabulary import VocabularyRows
from modelworks.train.loss import vocabulary_loss

N, D, V = 23, 5, 17  # the vocabulary divides by no number of ranks


def inputs(dtype: torch.dtype, steepness: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64).to(dtype)
    head = torch.randn(V, D, generator=generator, dtype=torch.float64)
    head[2] *= steepness
    head = head.to(dtype)
    targets = torch.randint(0, V, (N,), generator=generator)
    weights = torch.rand(N, generator=generator, dtype=torch.float64)
    weights[::3] = 0.0
    return hidden, head, targets, weights


def split_loss(mesh: Mesh, dtype: torch.dtype, settings: dict[str, Any], steepness: float = 1.0) -> dict[str, Any]:
    """Loss and gradients from this rank's rows of the head, and the collectives that it took."""
    hidden, head, targets, weights = inputs(dtype, steepness)
    spec = ShardSpec.whole("head.weight", (V, D)).cut(0, mesh.size("tp"), mesh.place("tp"))
    hidden, own = hidden.requires_grad_(), head[spec.slices].clone().requires_grad_()
    loss = vocabulary_loss(hidden, own, targets, weights, group=mesh.group("tp"), vocabulary=spec, **settings)
    loss.objective.backward()
    traffic = {kind: (volume.calls, volume.bytes) for kind, volume in mesh.traffic.take().items()}
    return {
        "values": torch.stack([loss.objective.detach(), loss.nll]),
        "hidden": hidden.grad,
        "head": own.grad,
        "traffic": traffic,
    }


def whole_loss(dtype: torch.dtype, settings: dict[str, Any], steepness: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    hidden, head, targets, weights = inputs(dtype, steepness)
    hidden.requires_grad_(), head.requires_grad_()
    loss = vocabulary_loss(hidden, head, targets, weights, **settings)
    loss.objective.backward()
    return torch.stack([loss.objective.detach(), loss.nll]), hidden.grad, head.grad  # type: ignore[return-value]


@pytest.mark.parametrize("chunk_tokens", [7, None])
@pytest.mark.parametrize(("label_smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.01), (0.2, 0.01)])
@pytest.mark.parametrize("tp", [2, 3])
def test_equals_one_process(
    workers: WorkerPool, tp: int, label_smoothing: float, z_loss: float, chunk_tokens: int | None
) -> None:
    settings = {"label_smoothing": label_smoothing, "z_loss": z_loss, "chunk_tokens": chunk_tokens, "scale": 2.0}
    values, hidden_gradient, head_gradient = whole_loss(torch.float64, settings)
    results = workers.run(split_loss, Layout(tp=tp), torch.float64, settings)
    for result in results:
        torch.testing.assert_close(result["values"], values, rtol=1e-12, atol=0)
    # Each rank has its own entries' part of the hidden states' gradient.
    parts = torch.stack([result["hidden"] for result in results])
    assert (parts.sum(0) - hidden_gradient).norm() < 1e-12 * hidden_gradient.norm()
    assert (parts[0] - hidden_gradient).norm() > 1e-3 * hidden_gradient.norm()
    heads = torch.cat([result["head"] for result in results])
    assert (heads - head_gradient).norm() < 1e-12 * head_gradient.norm()


def test_a_largest_logit_on_one_rank_that_the_others_exponentials_cannot_reach(workers: WorkerPool) -> None:
    settings = {"label_smoothing": 0.0, "z_loss": 0.0, "chunk_tokens": 7, "scale": 1.0}
    values, _, head_gradient = whole_loss(torch.float64, settings, 3000.0)
    assert 1000 < values[1] < float("inf")
    results = workers.run(split_loss, Layout(tp=2), torch.float64, settings, 3000.0)
    torch.testing.assert_close(results[1]["values"], values, rtol=1e-12, atol=0)
    heads = torch.cat([result["head"] for result in results])
    assert (heads - head_gradient).norm() < 1e-12 * head_gradient.norm()


def test_bf16_logits_give_the_same_up_to_rounding(workers: WorkerPool) -> None:
    settings = {"label_smoothing": 0.1, "z_loss": 0.0, "chunk_tokens": 7, "scale": 1.0}
    values, hidden_gradient, _ = whole_loss(torch.bfloat16, settings)
    results = workers.run(split_loss, Layout(tp=2), torch.bfloat16, settings)
    assert results[0]["values"].dtype == torch.float32
    torch.testing.assert_close(results[0]["values"], values, rtol=1e-6, atol=0)
    both = results[0]["hidden"].float() + results[1]["hidden"].float()
    assert (both - hidden_gradient.float()).norm() < 0.02 * hidden_gradient.float().norm()


def test_two_small_collectives_a_chunk(workers: WorkerPool) -> None:
    """The largest logit of each token, and three sums of each: no more is sent, however large the vocabulary."""
    settings = {"label_smoothing": 0.1, "z_loss": 0.01, "chunk_tokens": 6, "scale": 1.0}
    [first, *_] = workers.run(split_loss, Layout(tp=2), torch.float64, settings)
    assert first["traffic"] == {("tp", "all_reduce"): (2 * 4, 2 * (1 / 2) * (1 + 3) * N * 8)}


def loss_of_no_such_target(mesh: Mesh, target: int) -> str:
    hidden, head, targets, weights = inputs(torch.float64)
    targets[4] = target
    spec = ShardSpec.whole("head.weight", (V, D)).cut(0, mesh.size("tp"), mesh.place("tp"))
    try:
        vocabulary_loss(hidden, head[spec.slices], targets, weights, group=mesh.group("tp"), vocabulary=spec)
    except RuntimeError as error:
        return str(error)
    return "no error"


def loss_without_a_spec(mesh: Mesh) -> str:
    hidden, head, targets, weights = inputs(torch.float64)
    try:
        vocabulary_loss(hidden, head, targets, weights, group=mesh.group("tp"))
    except ValueError as error:
        return str(error)
    return "no error"


def test_ranks_that_all_have_the_whole_head_are_refused(workers: WorkerPool) -> None:
    for message in workers.run(loss_without_a_spec, Layout(tp=2)):
        assert "over 2 ranks was given 17 rows of the head" in message


@pytest.mark.parametrize("target", [-1, V])
def test_a_target_outside_the_vocabulary_is_refused_on_every_rank(workers: WorkerPool, target: int) -> None:
    for message in workers.run(loss_of_no_such_target, Layout(tp=2), target):
        assert "out of bounds" in message


@given(total=st.integers(1, 60), parts=st.integers(1, 8))
def test_each_valid_id_is_on_one_rank(total: int, parts: int) -> None:
    table, ids = torch.arange(total), torch.arange(total)
    found = torch.zeros(total, dtype=torch.int64)
    for part in range(min(parts, total)):
        first, end = split_evenly(total, min(parts, total), part)
        places, here = VocabularyRows(first, end, total).places(ids)
        assert torch.equal(table[first:end][places][here], ids[here])
        found += here
        outside, _ = VocabularyRows(first, end, total).places(torch.tensor([-1, total]))
        assert (outside == end - first).all()
    assert (found == 1).all()
