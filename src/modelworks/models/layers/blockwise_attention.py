"""Causal attention for training on CPUs: blocks of queries, each a few large matrix products.

torch's fused CPU kernel cuts its work into tiles so small that bfloat16 products run at a fraction of the machine's
rate, in the backward pass above all. Here a block of queries of all rows and heads meets every key it may see in one
batched product. A causal batch in b blocks then costs (b + 1) / 2b of the full one, and the query heads that share a
key head (grouped-query attention, Ainslie et al. 2023) lie side by side in one product, so keys are never repeated.

Scores and softmax are float32 (float64 for float64 inputs): scores rounded to bfloat16 would be wrong by up to 0.4%
of their size, in the exponent. The weights are kept for the backward pass in the dtype of the inputs, so memory grows
with the square of the length: this is for sequences up to `LONGEST_BLOCKWISE`, where they are a minor part of it.
Letters: B rows, T tokens, H query heads, G key/value heads, R = H / G, K head_dim.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from modelworks.models.operators import on_fake_tensors, operator

LONGEST_BLOCKWISE = 512  # tokens
BLOCK = 64  # queries; fewer waste less above the diagonal, more make larger products


def blockwise_attention(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax attention scaled by 1/sqrt(K), (B, T, H, K). All of one dtype; as many keys as queries.

    mask: additive (1 or B, 1, T, T), itself causal; None for plain causal.
    """
    out_BTHK, _ = _forward(q_BTHK, k_BTGK, v_BTGK, mask)
    return out_BTHK  # type: ignore[no-any-return]


# Operators of their own, so that torch.compile and the prediction of memory see one call and not its blocks.
@operator("modelworks::blockwise_attention")
def _forward(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """The attended values, and each block's weights, (B G, queries R, keys)."""
    rows, _, n_groups, head_dim = k_BTGK.shape
    q, k, v = _by_group(q_BTHK, n_groups), _by_group(k_BTGK, n_groups), _by_group(v_BTGK, n_groups)
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    out, kept = torch.empty_like(q), []
    with torch.autocast(q.device.type, enabled=False):
        scaled, keys = q.to(exact) / math.sqrt(head_dim), k.to(exact)
        for start, end, queries in _blocks(q_BTHK, n_groups):
            scores = scaled[:, queries] @ keys[:, :end].mT
            _hide(scores.view(rows, n_groups, end - start, -1, end), mask, start, end)
            weights = scores.softmax(dim=-1).to(q.dtype)
            out[:, queries] = weights @ v[:, :end]
            kept.append(weights)
    return _by_head(out, q_BTHK), kept


@on_fake_tensors("modelworks::blockwise_attention")
def _(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    rows, _, n_heads, _ = q_BTHK.shape
    n_groups = k_BTGK.shape[2]
    shapes = [
        (rows * n_groups, (end - start) * n_heads // n_groups, end) for start, end, _ in _blocks(q_BTHK, n_groups)
    ]
    return q_BTHK.new_empty(q_BTHK.shape), [q_BTHK.new_empty(shape) for shape in shapes]


@operator("modelworks::blockwise_attention_backward")
def _backward(
    gradient_BTHK: Tensor, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, kept: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. With weights P and scores S: dP = dO V^T, dS = P (dP - sum P dP)."""
    n_groups = k_BTGK.shape[2]
    q, k, v = _by_group(q_BTHK, n_groups), _by_group(k_BTGK, n_groups), _by_group(v_BTGK, n_groups)
    gradient = _by_group(gradient_BTHK, n_groups)
    scale = 1.0 / math.sqrt(q.shape[-1])
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    q_gradient = torch.empty_like(q)
    # Sums over blocks, so wider than bfloat16.
    k_gradient, v_gradient = torch.zeros_like(k, dtype=exact), torch.zeros_like(v, dtype=exact)
    with torch.autocast(q.device.type, enabled=False):
        for (_, end, queries), weights in zip(_blocks(q_BTHK, n_groups), kept, strict=True):
            incoming = gradient[:, queries]
            v_gradient[:, :end] += weights.mT @ incoming
            scores_gradient = torch._softmax_backward_data(incoming @ v[:, :end].mT, weights, -1, weights.dtype)
            scores_gradient *= scale
            q_gradient[:, queries] = scores_gradient @ k[:, :end]
            k_gradient[:, :end] += scores_gradient.mT @ q[:, queries]
    return (
        _by_head(q_gradient, q_BTHK),
        _by_head(k_gradient.to(k.dtype), k_BTGK),
        _by_head(v_gradient.to(v.dtype), v_BTGK),
    )


@on_fake_tensors("modelworks::blockwise_attention_backward")
def _(
    gradient_BTHK: Tensor, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, kept: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    return q_BTHK.new_empty(q_BTHK.shape), k_BTGK.new_empty(k_BTGK.shape), v_BTGK.new_empty(v_BTGK.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, list[Tensor]]) -> None:
    ctx.save_for_backward(*inputs[:3], *output[1])


def _gradients(ctx: Any, gradient_BTHK: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    q_BTHK, k_BTGK, v_BTGK, *kept = ctx.saved_tensors
    return (*_backward(gradient_BTHK, q_BTHK, k_BTGK, v_BTGK, kept), None)


torch.library.register_autograd("modelworks::blockwise_attention", _gradients, setup_context=_keep)


def _blocks(q_BTHK: Tensor, n_groups: int) -> list[tuple[int, int, slice]]:
    """Each block's first token, its end, and its queries in the layout by group. It sees the keys [0, end)."""
    length, shared = q_BTHK.shape[1], q_BTHK.shape[2] // n_groups
    bounds = [(start, min(start + BLOCK, length)) for start in range(0, length, BLOCK)]
    return [(start, end, slice(start * shared, end * shared)) for start, end in bounds]


def _hide(scores_BGTRS: Tensor, mask: Tensor | None, start: int, end: int) -> None:
    """Take out of the scores of the queries [start, end) what they must not see."""
    if mask is None:
        size = end - start
        ahead = torch.full((size, size), -math.inf, dtype=scores_BGTRS.dtype, device=scores_BGTRS.device).triu_(1)
        scores_BGTRS[..., start:] += ahead[:, None, :]
    else:
        scores_BGTRS += mask[:, :, start:end, None, :end]


def _by_group(x_BTHK: Tensor, n_groups: int) -> Tensor:
    """(B, T, G R, K) -> (B G, T R, K): the queries of one key head together, in the order of their tokens."""
    rows, length, n_heads, head_dim = x_BTHK.shape
    x_BTGRK = x_BTHK.reshape(rows, length, n_groups, n_heads // n_groups, head_dim)
    return x_BTGRK.transpose(1, 2).reshape(rows * n_groups, -1, head_dim)


def _by_head(x: Tensor, like_BTHK: Tensor) -> Tensor:
    """The way back from `_by_group`: (B G, T R, K) -> the shape of `like_BTHK`."""
    rows, length, n_heads, head_dim = like_BTHK.shape
    n_groups = x.shape[0] // rows
    x_BGTRK = x.view(rows, n_groups, length, n_heads // n_groups, head_dim)
    # Contiguous even where the reshape alone is a view (R = 1), as the fake results above promise.
    return x_BGTRK.transpose(1, 2).reshape(like_BTHK.shape).contiguous()
