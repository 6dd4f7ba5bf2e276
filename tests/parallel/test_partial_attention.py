"""Parts of attention, merged, against softmax written out and differentiated by autograd, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from modelworks.parallel import attention_parts as parts
from modelworks.parallel.attention_parts import merge_, partial_attention, partial_attention_gradients

ROWS, QUERIES, KEYS, HEADS, GROUPS, HEAD_DIM = 2, 7, 11, 6, 2, 5


def drawn(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(QUERIES, HEADS), (KEYS, GROUPS), (KEYS, GROUPS), (QUERIES, HEADS)]
    return [torch.randn(ROWS, *shape, HEAD_DIM, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def written_out(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    k, v = (x.repeat_interleave(HEADS // GROUPS, dim=2) for x in (k, v))
    scores = torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(HEAD_DIM)
    scores = scores.masked_fill(~visible[:, None], -math.inf)
    return torch.einsum("bhts,bshk->bthk", scores.softmax(-1), v), scores.logsumexp(-1).transpose(1, 2)


def some_visible() -> Tensor:
    """A mask (B, T, S) with rows that see nothing of the keys 0-3, of 4-10, and of neither part everything."""
    visible = torch.rand(ROWS, QUERIES, KEYS, generator=torch.Generator().manual_seed(1)) < 0.6
    visible[0, 2, :4] = visible[1, 5, 4:] = False
    visible[0, 2, 7] = visible[1, 5, 1] = True
    return visible


@pytest.mark.parametrize("tile", [1, 3, 128])
@pytest.mark.parametrize("cut", [4, KEYS])
def test_parts_of_the_keys_make_the_whole(monkeypatch: pytest.MonkeyPatch, tile: int, cut: int) -> None:
    monkeypatch.setattr(parts, "LONGEST_TILE", tile)
    q, k, v, gradient = drawn()
    visible = some_visible()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    expected, expected_lse = written_out(*leaves, visible)
    gradients = torch.autograd.grad(expected, leaves, gradient)
    q, k, v = (x.detach() for x in leaves)

    sides = [side for side in (slice(0, cut), slice(cut, KEYS)) if side.start < side.stop]
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -math.inf, dtype=q.dtype)
    for side in sides:
        merge_(out, lse, *partial_attention(q, k[:, side], v[:, side], visible[:, :, side], False))
    torch.testing.assert_close(out, expected.detach(), rtol=0, atol=1e-14)
    torch.testing.assert_close(lse, expected_lse.detach(), rtol=0, atol=1e-14)

    got = [torch.zeros_like(x) for x in (q, k, v)]
    for side in sides:
        part = partial_attention_gradients(gradient, q, k[:, side], v[:, side], out, lse, visible[:, :, side], False)
        for total, addend in zip((got[0], got[1][:, side], got[2][:, side]), part, strict=True):
            total += addend
    for value, reference in zip(got, gradients, strict=True):
        torch.testing.assert_close(value, reference, rtol=0, atol=1e-14)


@pytest.mark.parametrize("scores", [1, 40, 1 << 22])
def test_causal_equals_its_mask(monkeypatch: pytest.MonkeyPatch, scores: int) -> None:
    monkeypatch.setattr(parts, "SCORES", scores)
    q, k, v, gradient = drawn()
    k, v = k[:, :QUERIES], v[:, :QUERIES]
    triangle = torch.ones(1, QUERIES, QUERIES, dtype=torch.bool).tril()
    causal, masked = partial_attention(q, k, v, None, True), partial_attention(q, k, v, triangle, False)
    for value, reference in zip(causal, masked, strict=True):
        torch.testing.assert_close(value, reference, rtol=0, atol=1e-14)
    results = [
        partial_attention_gradients(gradient, q, k, v, *causal, *how) for how in ((None, True), (triangle, False))
    ]
    for value, reference in zip(*results, strict=True):
        torch.testing.assert_close(value, reference, rtol=0, atol=1e-14)


def test_a_query_that_sees_nothing_adds_exact_zeros() -> None:
    for dtype, wide in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        q, k, v, gradient = drawn(dtype)
        visible = torch.ones(1, QUERIES, KEYS, dtype=torch.bool)
        visible[:, 3] = False
        out, lse = partial_attention(q, k, v, visible, False)
        assert out.dtype == lse.dtype == wide
        assert bool((lse[:, 3] == -math.inf).all())
        assert not out[:, 3].any()
        before = out.clone(), lse.clone()
        merge_(out, lse, torch.zeros_like(out), torch.full_like(lse, -math.inf))
        assert torch.equal(out, before[0])
        assert torch.equal(lse, before[1])
        # It saw something elsewhere in its row: its whole log-sum-exp is finite, and here it adds nothing.
        lse[:, 3] = 0.5
        q_gradient, k_gradient, v_gradient = partial_attention_gradients(
            gradient, q, k, v, out.to(dtype), lse, visible, False
        )
        assert not q_gradient[:, 3].any()
        gradient[:, 3] += 100.0
        again = partial_attention_gradients(gradient, q, k, v, out.to(dtype), lse, visible, False)
        assert torch.equal(again[1], k_gradient)
        assert torch.equal(again[2], v_gradient)
