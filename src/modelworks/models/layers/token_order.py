"""From tokens to (token, choice) pairs sorted by expert, and back.

Pair i is choice i % k of token i // k, and `order` a permutation of the pairs: the place j of the sorted rows holds
pair order[j]. Each function is the other's backward pass up to a sum over a token's k pairs, and none adds to a row
that another also adds to: the results depend on no order of additions, on any device (the backward pass of plain
indexing does).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def dispatch(tokens: Tensor, order: Tensor, k: int) -> Tensor:
    """tokens (N, d), order int64 (N·k,) -> the pairs' tokens in sorted order, (N·k, d)."""
    return _Dispatch.apply(tokens, order, k)  # type: ignore[no-any-return, no-untyped-call]


def permute(rows: Tensor, order: Tensor) -> Tensor:
    """result[j] = rows[order[j]]."""
    return _Permute.apply(rows, order, False)  # type: ignore[no-any-return, no-untyped-call]


def restore(rows: Tensor, order: Tensor) -> Tensor:
    """result[order[j]] = rows[j]: what `permute` undoes and is undone by."""
    return _Permute.apply(rows, order, True)  # type: ignore[no-any-return, no-untyped-call]


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.k = k
        return tokens.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        pairs = _permuted(gradient, order, back=True)
        return pairs.view(-1, ctx.k, gradient.shape[-1]).sum(1), None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: bool) -> Tensor:
        ctx.save_for_backward(order)
        ctx.back = back
        return _permuted(rows, order, back=back)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return _permuted(gradient, order, back=not ctx.back), None, None


def _permuted(rows: Tensor, order: Tensor, *, back: bool) -> Tensor:
    return torch.empty_like(rows).index_copy_(0, order, rows) if back else rows.index_select(0, order)
