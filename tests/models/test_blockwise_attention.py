"""Blockwise attention equals torch's own, forward and backward, at every length around the block's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from modelworks.models.layers.blockwise_attention import BLOCK, blockwise_attention

HEADS, GROUPS, HEAD_DIM = 6, 2, 16


def inputs(rows, length, dtype, groups=GROUPS):
    generator = torch.Generator().manual_seed(length)
    shapes = [(rows, length, heads, HEAD_DIM) for heads in (HEADS, groups, groups, HEADS)]
    q, k, v, gradient = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return [x.requires_grad_() for x in (q, k, v)], gradient


def reference(qkv, gradient, mask):
    """torch's attention in float64."""
    wide = [x.detach().double().requires_grad_() for x in qkv]
    q, k, v = (x.transpose(1, 2) for x in wide)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=None if mask is None else mask.double(), is_causal=mask is None, enable_gqa=True
    ).transpose(1, 2)
    return out, *torch.autograd.grad(out, wide, gradient.double())


def document_mask(rows, length, dtype):
    """Three documents a row, of lengths that differ from row to row; causal within each."""
    token = torch.arange(length)
    starts = torch.tensor([[length // 5 + row, length // 2 + row] for row in range(rows)])
    document = (token >= starts[..., None]).sum(1)
    visible = (token[:, None] >= token) & (document[:, :, None] == document[:, None, :])
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)[:, None]


@pytest.mark.parametrize("length", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
@pytest.mark.parametrize("masked", [False, True])
def test_equals_torch_in_float64(length, masked):
    qkv, gradient = inputs(2, length, torch.float64)
    mask = document_mask(2, length, torch.float64) if masked else None
    out = blockwise_attention(*qkv, mask)
    for ours, theirs in zip(
        (out, *torch.autograd.grad(out, qkv, gradient)), reference(qkv, gradient, mask), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_bfloat16_is_no_further_from_the_truth_than_torch(groups):
    qkv, gradient = inputs(4, 2 * BLOCK, torch.bfloat16, groups)
    truth = reference(qkv, gradient, None)
    out = blockwise_attention(*qkv, None)
    ours = (out, *torch.autograd.grad(out, qkv, gradient))
    torch_out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in qkv), is_causal=True, enable_gqa=True)
    theirs = (torch_out.transpose(1, 2), *torch.autograd.grad(torch_out.transpose(1, 2), qkv, gradient))
    for own, other, exact in zip(ours, theirs, truth, strict=True):
        assert (own.double() - exact).norm() <= 1.5 * (other.double() - exact).norm()
        assert (own.double() - exact).norm() <= 0.01 * exact.norm()


def test_what_is_masked_changes_no_bit():
    qkv, _ = inputs(1, 2 * BLOCK, torch.bfloat16)
    mask = document_mask(1, 2 * BLOCK, torch.bfloat16)
    first = blockwise_attention(*qkv, mask)
    changed = [x.detach().clone() for x in qkv]
    boundary = 2 * BLOCK // 5
    for x in changed:
        x[:, :boundary] = 3.0
    assert torch.equal(blockwise_attention(*changed, mask)[:, boundary:], first[:, boundary:])


def test_operators_are_well_formed():
    """torch's own check of schema, fake tensors and gradient registration, as compilation relies on them."""
    qkv, _ = inputs(2, BLOCK + 3, torch.float64)
    torch.library.opcheck(torch.ops.modelworks.blockwise_attention, (*qkv, None))


@pytest.mark.parametrize("groups", [2, 6])
def test_results_are_contiguous_as_compiled_code_expects(groups):
    qkv, gradient = inputs(2, BLOCK, torch.float64, groups)
    out = blockwise_attention(*qkv, None)
    assert all(x.is_contiguous() for x in (out, *torch.autograd.grad(out, qkv, gradient)))
