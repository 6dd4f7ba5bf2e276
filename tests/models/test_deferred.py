"""Weight gradients put off: made later, and the same as by a whole backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from modelworks.models import CausalContext, Transformer, activation_bytes
from modelworks.models.layers.deferred import DeferredWeights, defer_weights, linear

LENGTH = 16
# Not a router's weight: its product is small, and in another precision.
LINEAR = ("attention.q.", "attention.k.", "attention.v.", "attention.o.", ".gate.", ".up.", ".down.")


def objective(model: Transformer, seed: int, autocast: bool = False) -> Tensor:
    tokens = torch.randint(0, 61, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(LENGTH).expand(2, -1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model.logits(model(tokens, positions, CausalContext()))
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), tokens.flatten())


def is_put_off(name: str) -> bool:
    return name.endswith(".weight") and any(part in name for part in LINEAR)


def gradients(model: Transformer) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def whole(model: Transformer, **options: Any) -> dict[str, Tensor]:
    """Two micro-batches."""
    model.zero_grad()
    for seed in range(2):
        objective(model, seed, **options).backward()  # type: ignore[no-untyped-call]
    return gradients(model)


def in_halves(model: Transformer, **options: Any) -> dict[str, Tensor]:
    """The same, both forwards first, weight gradients last and in the other order."""
    model.zero_grad()
    deferred = defer_weights(model)
    with deferred.splitting():
        losses = [objective(model, seed, **options) for seed in range(2)]
    for micro_batch in (1, 0):
        with deferred.collect(micro_batch):
            losses[micro_batch].backward()  # type: ignore[no-untyped-call]
    early = gradients(model)
    assert not any(is_put_off(name) for name in early)  # really put off
    assert all(is_put_off(name) for name, _ in model.named_parameters() if name not in early)
    for micro_batch in range(2):
        deferred.run(micro_batch)
    return gradients(model)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"family": "gpt2", "n_kv_heads": 4},
        {"family": "qwen3", "norm_position": "post"},
        {"family": "qwen2", "tie_embeddings": True},
        {"n_experts": 4, "family": "mixtral"},
    ],
    ids=["llama", "gpt2", "qwen3", "qwen2", "mixtral"],
)
def test_the_same_gradients(small: Any, changes: dict[str, Any], recompute: Any) -> None:
    model = small(**changes).double()
    model.set_recompute(recompute)
    expected = whole(model)
    result = in_halves(model)
    assert result.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(result[name], gradient, rtol=1e-12, atol=1e-14, msg=lambda m, n=name: f"{n}: {m}")
    again = whole(model)  # a micro-batch that is not split is computed as if nothing were bound
    assert all(torch.equal(again[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize("kind", ["bf16", "autocast"])
def test_low_precision(small: Any, kind: str) -> None:
    """The products are those of a whole backward pass; only the order in which two micro-batches add up differs."""
    model = small(family="gpt2", n_kv_heads=4)
    model = model.bfloat16() if kind == "bf16" else model
    expected, result = (made(model, autocast=kind == "autocast") for made in (whole, in_halves))
    for name, gradient in expected.items():
        assert result[name].dtype == gradient.dtype == (torch.bfloat16 if kind == "bf16" else torch.float32)
        difference = (result[name].double() - gradient.double()).norm() / gradient.double().norm().clamp(min=1e-6)
        assert difference < 0.01, name


def test_packed_storage_is_not_copied(small: Any) -> None:
    """Fused weights that lie back to back are used as they lie."""
    model = small().double()
    expected = whole(model)
    model.pack_storage()
    for name, gradient in in_halves(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-14)


def test_frozen_weights_and_inputs_without_gradient() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    x, deferred = torch.randn(5, 4, dtype=torch.float64), DeferredWeights()
    with deferred.splitting():
        y = linear(x, weight, None, deferred)  # nothing before it waits for a gradient: made at once
        z = linear(x.clone().requires_grad_(), torch.nn.Parameter(weight.detach(), requires_grad=False), None, deferred)
    with deferred.collect(0):
        (y.sum() + z.sum()).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(weight.grad, torch.ones(3, 5, dtype=torch.float64) @ x)
    deferred.run(0)
    torch.testing.assert_close(weight.grad, torch.ones(3, 5, dtype=torch.float64) @ x)


def test_misuse_is_said(small: Any) -> None:
    deferred = defer_weights(small())
    with deferred.collect(3):
        pass
    with pytest.raises(ValueError, match="micro-batch 3 wait already"), deferred.collect(3):
        pass
    deferred.run(3)
    with pytest.raises(KeyError):
        deferred.run(3)


def test_one_queue_for_a_model(small: Any) -> None:
    model = small()
    assert defer_weights(model) is defer_weights(model)


def test_no_more_is_kept_than_by_a_whole_backward(small: Any) -> None:
    """Between forward and backward: a packed weight is not kept beside its parts' copies."""
    model = small(d_model=64, n_layers=3)
    deferred = defer_weights(model)

    def split() -> Tensor:
        with deferred.splitting():
            return objective(model, 0)

    held = list(model.parameters())
    split()  # rotary frequencies are made once and stay
    assert activation_bytes(split, held) <= activation_bytes(lambda: objective(model, 0), held)
