"""Attention of some queries to some of their keys, in a form that can be merged with the rest of their keys.

Softmax attention to a set of keys is out = sum_s exp(S_s) v_s / Z with Z = sum_s exp(S_s). Two disjoint sets of keys
merge by the logarithms of their Z (Milakov and Gimelshein 2018; Dao et al. 2022):

    lse = log(exp(lse_1) + exp(lse_2))        out = out_1 exp(lse_1 - lse) + out_2 exp(lse_2 - lse)

The gradients of a part need the *whole* softmax only through its out and lse: with P = exp(S - lse) they are
dv = P^T dout, dP = dout v^T, dS = P (dP - sum_k dout out), dq = dS k, dk = dS^T q, and sum over the parts.

A query that sees none of these keys has lse = -inf, out = 0 and adds exact zeros to every gradient. Scores, softmax
and all sums over parts are float32 (float64 for float64 inputs); the other products take the weights in the dtype of
the inputs, as `models.layers.blockwise_attention` does. Nothing is kept but q, k, v, out and lse: weights are made
again in the backward pass, in tiles of queries whose scores fit in `SCORES` elements.
Letters: B rows, T queries, S keys, H query heads, G key/value heads, R = H / G, K head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from modelworks.models import operator

SCORES = 1 << 22  # elements of a tile's scores: 16 MB in float32
LONGEST_TILE = 128  # queries; a causal part in b tiles costs (b + 1) / 2b of the full one


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax and sums for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# Operators of their own: selective recomputation must see one call, not products whose results it would keep.
@operator("modelworks::partial_attention")
def partial_attention(
    q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, visible_BTS: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """out (B, T, H, K) and lse (B, T, H), both in the wide dtype; scores are scaled by 1/sqrt(K).

    visible_BTS: bool (1 or B, T, S), None where all is visible. causal: query t sees keys 0..t, and T = S.
    """
    inputs = q_BTHK.dtype
    out_BTHK = torch.empty(q_BTHK.shape, dtype=wide(inputs), device=q_BTHK.device)
    lse_BTH = out_BTHK.new_empty(q_BTHK.shape[:3])
    values = v_BSGK.transpose(1, 2)
    with torch.autocast(q_BTHK.device.type, enabled=False):
        for queries, seen, scores in _tiles(q_BTHK, k_BSGK, visible_BTS, causal):
            lse = scores.logsumexp(-1, keepdim=True)
            weights = scores.sub_(_finite(lse)).exp_()
            out_BTHK[:, queries] = _by_head(weights.to(inputs) @ values[:, :, :seen], q_BTHK.shape[2])
            lse_BTH[:, queries] = _by_head(lse, q_BTHK.shape[2]).squeeze(-1)
    return out_BTHK, lse_BTH


@operator("modelworks::partial_attention_gradients")
def partial_attention_gradients(
    gradient_BTHK: Tensor,
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    out_BTHK: Tensor,
    lse_BTH: Tensor,
    visible_BTS: Tensor | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """What these keys add to the gradients of q, k and v, in the wide dtype. out, lse: of the whole softmax."""
    n_groups, inputs, exact = k_BSGK.shape[2], q_BTHK.dtype, wide(q_BTHK.dtype)
    q_gradient = torch.empty(q_BTHK.shape, dtype=exact, device=q_BTHK.device)
    keys, values = k_BSGK.transpose(1, 2), v_BSGK.transpose(1, 2)
    k_gradient, v_gradient = torch.zeros_like(keys, dtype=exact), torch.zeros_like(values, dtype=exact)
    with torch.autocast(q_BTHK.device.type, enabled=False):
        for queries, seen, scores in _tiles(q_BTHK, k_BSGK, visible_BTS, causal):
            q, gradient = _by_group(q_BTHK[:, queries], n_groups), _by_group(gradient_BTHK[:, queries], n_groups)
            out, lse = _by_group(out_BTHK[:, queries], n_groups), _by_group(lse_BTH[:, queries, :, None], n_groups)
            weights = scores.sub_(lse).exp_()
            v_gradient[:, :, :seen] += weights.to(inputs).mT @ gradient
            gradient, out = gradient.to(exact), out.to(exact)
            shared = (gradient * out).sum(-1, keepdim=True)
            scores_gradient = gradient @ values[:, :, :seen].to(exact).mT
            scores_gradient = scores_gradient.sub_(shared).mul_(weights).mul_(_scale(q_BTHK)).to(inputs)
            q_gradient[:, queries] = _by_head(scores_gradient @ keys[:, :, :seen], q_BTHK.shape[2])
            k_gradient[:, :, :seen] += scores_gradient.mT @ q
    return q_gradient, k_gradient.transpose(1, 2).contiguous(), v_gradient.transpose(1, 2).contiguous()


def merge_(out_BTHK: Tensor, lse_BTH: Tensor, more_out_BTHK: Tensor, more_lse_BTH: Tensor) -> None:
    """Put further keys' part into (out, lse), in place. Of no keys at all, out is 0 and lse is -inf."""
    total_BTH = torch.logaddexp(lse_BTH, more_lse_BTH)
    shift_BTH = _finite(total_BTH)
    out_BTHK.mul_((lse_BTH - shift_BTH).exp_()[..., None])
    out_BTHK.add_(more_out_BTHK * (more_lse_BTH - shift_BTH).exp_()[..., None])
    lse_BTH.copy_(total_BTH)


def _tiles(
    q_BTHK: Tensor, k_BSGK: Tensor, visible_BTS: Tensor | None, causal: bool
) -> Iterator[tuple[slice, int, Tensor]]:
    """Tiles of queries, how many of the first keys each needs, and its scores (B, G, t R, keys), -inf where hidden."""
    rows, n_queries, n_heads, _ = q_BTHK.shape
    n_keys, n_groups = k_BSGK.shape[1:3]
    size = max(1, min(LONGEST_TILE, SCORES // (rows * n_heads * n_keys)))
    keys = k_BSGK.transpose(1, 2).to(wide(q_BTHK.dtype))
    for start in range(0, n_queries, size):
        end = min(start + size, n_queries)
        seen = end if causal else n_keys
        q = _by_group(q_BTHK[:, start:end], n_groups).to(keys.dtype)
        scores = (q * _scale(q_BTHK)) @ keys[:, :, :seen].mT
        by_query = scores.view(rows, n_groups, end - start, -1, seen)  # (B, G, t, R, keys)
        if causal:
            hidden = torch.ones(end - start, seen, dtype=torch.bool, device=scores.device).triu_(start + 1)
            by_query.masked_fill_(hidden[:, None], -math.inf)
        elif visible_BTS is not None:
            by_query.masked_fill_(~visible_BTS[:, None, start:end, None], -math.inf)
        yield slice(start, end), seen, scores


def _finite(lse: Tensor) -> Tensor:
    """What to subtract in place of lse: where nothing is visible it is -inf, and -inf - -inf would be NaN, not 0."""
    return lse.masked_fill(lse == -math.inf, 0.0)


def _scale(q_BTHK: Tensor) -> float:
    return 1.0 / math.sqrt(q_BTHK.shape[-1])


def _by_group(x_BTHK: Tensor, n_groups: int) -> Tensor:
    """(B, T, G R, K) -> (B, G, T R, K): the queries that share a key head together, so that keys are not repeated."""
    rows, length, n_heads, head_dim = x_BTHK.shape
    x_BTGRK = x_BTHK.reshape(rows, length, n_groups, n_heads // n_groups, head_dim)
    return x_BTGRK.transpose(1, 2).flatten(2, 3)


def _by_head(x_BGQK: Tensor, n_heads: int) -> Tensor:
    """The way back from `_by_group`: (B, G, T R, K) -> (B, T, G R, K)."""
    rows, n_groups, _, head_dim = x_BGQK.shape
    x_BGTRK = x_BGQK.reshape(rows, n_groups, -1, n_heads // n_groups, head_dim)
    return x_BGTRK.transpose(1, 2).flatten(2, 3)
