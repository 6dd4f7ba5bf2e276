"""The family in anybody's loop: the same update as the trainer's, and what torch's optimisers can do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelworks import optim
from modelworks.config import OptimizerConfig
from modelworks.optim import build_optimizer

CLASSES = [optim.Sgd, optim.Adam, optim.AdamW, optim.Lamb, optim.Lars, optim.Lion, optim.Adafactor]


def model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.LayerNorm(5), nn.Linear(5, 3)).to(dtype)


def backward(network: nn.Module, seed: int) -> Tensor:
    network.zero_grad()
    dtype = next(network.parameters()).dtype
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    loss: Tensor = network(x).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


@pytest.mark.parametrize("kind", CLASSES)
def test_the_same_update_as_the_trainers(kind: Any) -> None:
    """With groups: biases and norms of one dimension take no trust ratio, and here no decay."""
    mine, trainers = model(), model()
    groups = [
        {"params": [p for p in mine.parameters() if p.ndim > 1]},
        {"params": [p for p in mine.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = kind(groups, lr=0.01, weight_decay=0.1)
    vectors = [name for name, parameter in trainers.named_parameters() if parameter.ndim < 2]
    trust = {"no_trust": vectors} if kind in (optim.Lamb, optim.Lars) else {}
    config = OptimizerConfig(name=kind.NAME, weight_decay=0.1, no_decay=vectors, **trust)
    reference = build_optimizer(trainers.named_parameters(), config)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, total_iters=4)
    for step in range(6):
        backward(mine, step)
        backward(trainers, step)
        gradients = {n: p.grad for n, p in trainers.named_parameters() if p.grad is not None}
        reference.step(gradients, schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    for ours, theirs in zip(mine.parameters(), trainers.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CLASSES)
def test_a_saved_state_goes_on_bit_for_bit(kind: Any, dtype: torch.dtype, tmp_path: Any) -> None:
    network = model(dtype)
    optimizer = kind(network.parameters(), lr=0.01)
    for step in range(3):
        backward(network, step)
        optimizer.step()
    torch.save([network.state_dict(), optimizer.state_dict()], tmp_path / "state.pt")
    other = model(dtype)
    restored = kind(other.parameters(), lr=0.5)
    weights, state = torch.load(tmp_path / "state.pt", weights_only=True)
    other.load_state_dict(weights)
    restored.load_state_dict(state)
    for step in range(3, 6):
        for each, its in ((network, optimizer), (other, restored)):
            backward(each, step)
            its.step()
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("kind", CLASSES)
def test_missing_sparse_and_zero_gradients(kind: Any) -> None:
    embedding, unused = nn.Embedding(7, 3, sparse=True), nn.Parameter(torch.ones(2, 2))
    dense = copy.deepcopy(embedding)
    dense.sparse = False
    still = nn.Parameter(torch.ones(4, 3))
    still.grad = torch.zeros(4, 3)
    optimizers = [kind([embedding.weight, unused, still], weight_decay=0.0), kind(dense.parameters(), weight_decay=0.0)]
    for _ in range(2):
        for layer, optimizer in zip((embedding, dense), optimizers, strict=True):
            layer.weight.grad = None
            layer(torch.tensor([1, 5, 5])).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(embedding.weight, dense.weight)
    assert torch.equal(unused, torch.ones(2, 2))
    assert unused not in optimizers[0].state
    assert torch.equal(still, torch.ones(4, 3))


def test_a_closure_is_called_with_gradients_enabled() -> None:
    network = model()
    optimizer = optim.Lion(network.parameters())
    assert optimizer.step(lambda: float(backward(network, 0).detach())) > 0
    assert all(optimizer.state[parameter]["step"] == 1 for parameter in network.parameters())


def test_settings_that_do_not_exist_or_make_no_sense_are_refused() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    with pytest.raises(TypeError, match=r"Lion has no setting 'eps'; it has betas, lr, weight_decay"):
        optim.Lion(parameters, eps=1e-8)
    with pytest.raises(ValueError, match=r"adamw: lr is -1: Input should be greater than or equal to 0"):
        optim.AdamW(parameters, lr=-1)
    with pytest.raises(ValueError, match=r"sgd: momentum is 1\.0"):
        optim.Sgd([{"params": parameters, "momentum": 1.0}])
