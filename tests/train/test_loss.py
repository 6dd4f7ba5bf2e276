"""The chunked vocabulary loss against F.cross_entropy in float64, and what it holds in memory."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from modelworks.layout import ShardSpec
from modelworks.train.loss import vocabulary_loss

N, D, V = 23, 5, 17


def make_inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    head = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=generator)
    weights = torch.rand(N, generator=generator, dtype=torch.float64)
    weights[::3] = 0.0
    return hidden, head, targets, weights


def reference(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, smoothing: float, z: float) -> Tensor:
    logits = hidden @ head.T
    losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
    return (weights * (losses + z * logits.logsumexp(-1).square())).sum()


@pytest.mark.parametrize("chunk", [1, 4, 23, 1000])
@pytest.mark.parametrize(("smoothing", "z"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.3), (0.2, 0.01)])
def test_value_and_gradients_equal_torch(chunk: int, smoothing: float, z: float) -> None:
    hidden, head, targets, weights = make_inputs()
    expected = reference(hidden, head, targets, weights, smoothing, z)
    expected_gradients = torch.autograd.grad(expected, (hidden, head))
    loss = vocabulary_loss(
        hidden, head, targets, weights, label_smoothing=smoothing, z_loss=z, scale=2.0, chunk_tokens=chunk
    )
    torch.testing.assert_close(loss.objective, 2.0 * expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(loss.nll, reference(hidden, head, targets, weights, 0.0, 0.0), rtol=1e-13, atol=0)
    for ours, theirs in zip(torch.autograd.grad(loss.objective, (hidden, head)), expected_gradients, strict=True):
        torch.testing.assert_close(ours, 2.0 * theirs, rtol=0, atol=1e-12)


def test_gradcheck() -> None:
    hidden, head, targets, weights = make_inputs()
    assert torch.autograd.gradcheck(
        lambda h, w: (
            vocabulary_loss(h, w, targets, weights, label_smoothing=0.1, z_loss=0.05, chunk_tokens=7).objective
        ),
        (hidden, head),
    )


def test_tied_head_gradient_adds_to_the_embedding() -> None:
    _, head, targets, weights = make_inputs()
    tokens = torch.arange(N) % V
    loss = vocabulary_loss(torch.tanh(head[tokens]), head, targets, weights, chunk_tokens=4)
    expected = reference(torch.tanh(head[tokens]), head, targets, weights, 0.0, 0.0)
    torch.testing.assert_close(
        *(torch.autograd.grad(value, head)[0] for value in (loss.objective, expected)), rtol=0, atol=1e-12
    )


def test_a_token_of_weight_zero_changes_nothing() -> None:
    hidden, head, targets, weights = make_inputs()
    changed_targets = torch.where(weights == 0, (targets + 1) % V, targets)
    with torch.no_grad():
        changed_hidden = torch.where(weights[:, None] == 0, hidden * 3 + 1, hidden)
    changed_hidden.requires_grad_()
    first = vocabulary_loss(hidden, head, targets, weights)
    second = vocabulary_loss(changed_hidden, head, changed_targets, weights)
    assert torch.equal(first.objective, second.objective)
    gradients = [torch.autograd.grad(loss.objective, head)[0] for loss in (first, second)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-13)


def test_a_head_that_is_not_the_whole_vocabulary_needs_ranks_that_have_the_rest() -> None:
    hidden, head, targets, weights = make_inputs()
    some = ShardSpec("head.weight", (V, D), ((3, 9), (0, D)))
    for rows, spec in ((head[3:9], some), (head, some)):
        with pytest.raises(ValueError, match="rows of the head"):
            vocabulary_loss(hidden, rows, targets, weights, vocabulary=spec)


@pytest.mark.parametrize("target", [-1, V])
def test_a_target_outside_the_vocabulary_is_refused(target: int) -> None:
    hidden, head, targets, weights = make_inputs()
    targets[5] = target
    with pytest.raises(RuntimeError, match="out of bounds"):
        vocabulary_loss(hidden, head, targets, weights)


@settings(deadline=None, max_examples=25)
@given(chunk=st.integers(1, 30), rows=st.sampled_from([1, 23]))
def test_leading_dimensions_and_chunks_do_not_matter(chunk: int, rows: int) -> None:
    hidden, head, targets, weights = make_inputs()
    shaped = (hidden.view(rows, -1, D), head, targets.view(rows, -1), weights.view(rows, -1))
    loss = vocabulary_loss(*shaped, chunk_tokens=chunk)
    torch.testing.assert_close(loss.objective, vocabulary_loss(hidden, head, targets, weights).objective)
    (gradient,) = torch.autograd.grad(loss.objective, hidden)
    assert gradient.shape == hidden.shape


def test_bf16_sums_in_float32_and_stays_near_the_float64_value() -> None:
    hidden, head, targets, weights = make_inputs()
    expected = reference(hidden, head, targets, weights, 0.0, 0.0)
    expected_gradients = torch.autograd.grad(expected, (hidden, head))
    low = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden, head)]
    loss = vocabulary_loss(low[0], low[1], targets, weights.float(), chunk_tokens=4)
    assert loss.objective.dtype == loss.nll.dtype == torch.float32
    assert loss.nll.item() == pytest.approx(expected.item(), rel=2e-2)
    for ours, theirs in zip(torch.autograd.grad(loss.objective, low), expected_gradients, strict=True):
        assert ours.dtype == torch.bfloat16
        assert ((ours.double() - theirs).norm() / theirs.norm()).item() < 2e-2


def test_autocast_computes_in_its_dtype_and_returns_the_weights_dtype() -> None:
    hidden, head, targets, weights = make_inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = vocabulary_loss(hidden, head, targets, weights)
    full = vocabulary_loss(hidden, head, targets, weights)
    assert loss.objective != full.objective
    assert loss.nll.item() == pytest.approx(full.nll.item(), rel=2e-2)
    assert {gradient.dtype for gradient in torch.autograd.grad(loss.objective, (hidden, head))} == {torch.float32}


def test_the_scale_saves_fp16_gradients_from_underflow() -> None:
    hidden, head, targets, _ = make_inputs(torch.float16)
    weights = torch.full((N,), 1e-9)
    lost = torch.autograd.grad(vocabulary_loss(hidden, head, targets, weights).objective, hidden)[0]
    kept = torch.autograd.grad(vocabulary_loss(hidden, head, targets, weights, scale=2.0**20).objective, hidden)[0]
    assert not lost.any()
    assert kept.any()


def test_without_gradients_only_the_value_is_computed() -> None:
    hidden, head, targets, weights = make_inputs()
    with torch.no_grad():
        loss = vocabulary_loss(hidden, head, targets, weights)
    assert not loss.objective.requires_grad
    torch.testing.assert_close(loss.objective, reference(hidden, head, targets, weights, 0, 0))


def test_all_logits_never_exist_at_once() -> None:
    """No tensor that the forward pass or the backward pass allocates holds more than a chunk's logits."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, Tensor):
                    largest = max(largest, tensor.numel())
            return out

    tokens, width, vocabulary, chunk = 512, 4, 64, 32
    hidden = torch.randn(tokens, width, requires_grad=True)
    head = torch.randn(vocabulary, width, requires_grad=True)
    with Largest():
        loss = vocabulary_loss(
            hidden, head, torch.zeros(tokens, dtype=torch.long), torch.ones(tokens), chunk_tokens=chunk
        )
        loss.objective.backward()
    assert largest <= max(chunk * vocabulary, tokens * width)
