"""Products of contiguous groups of rows, each with a matrix of its own: what a layer of experts computes.

    y[i] = weight[e] x[i]   for the counts[e] rows i of expert e, which lie together; 0 for rows after the last group

The operations are registered with torch, so that tensors without data, torch.compile, selective recomputation and the
FLOP counter see each as one product whose shapes do not depend on the counts. One matrix product a group runs at the
speed of a dense one where groups have a few dozen rows; an empty group costs nothing and has a gradient of zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from modelworks.models.layers.deferred import DeferredWeights, can_defer
from modelworks.models.operators import on_fake_tensors, operator


def grouped_linear(
    rows: Tensor, weight: nn.Parameter, counts: Tensor, deferred: DeferredWeights | None = None
) -> Tensor:
    """rows (N, d_in), weight (E, d_out, d_in), counts int64 (E,) with a sum of at most N -> (N, d_out).

    Under autocast both are cast as for any linear layer. deferred: what the weight's gradient is left to, if anything.
    """
    if not can_defer(rows, deferred):
        return _GroupedLinear.apply(*_cast(rows, weight), counts)  # type: ignore[no-any-return, no-untyped-call]
    return _DeferredGroupedLinear.apply(*_cast(rows, weight.detach()), counts, deferred, weight)  # type: ignore[no-any-return, no-untyped-call]


def _cast(rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    device = rows.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return rows.to(dtype), weight.to(dtype)
    return rows, weight


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, counts)
        return grouped_mm(rows, weight, counts)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight, counts = ctx.saved_tensors
        gradient = gradient.contiguous()
        for_rows = grouped_mm(gradient, weight.transpose(1, 2), counts) if ctx.needs_input_grad[0] else None
        for_weight = grouped_outer(gradient, rows, counts) if ctx.needs_input_grad[1] else None
        return for_rows, for_weight, None


class _DeferredGroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, counts: Tensor, deferred: DeferredWeights, parameter: nn.Parameter
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, counts)
        ctx.deferred, ctx.parameter = deferred, parameter
        return grouped_mm(rows, weight, counts)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, counts = ctx.saved_tensors
        parameter, gradient, rows = ctx.parameter, gradient.contiguous(), rows.detach()
        if parameter.requires_grad:
            deferred = ctx.deferred
            deferred.put_off(lambda: deferred.accumulate(parameter, grouped_outer(gradient, rows, counts)))
        return grouped_mm(gradient, weight.transpose(1, 2), counts), None, None, None, None


@operator("modelworks::grouped_mm")
def grouped_mm(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """(N, a), (E, b, a), (E,) -> (N, b): each group of rows times its matrix, transposed."""
    out = rows.new_empty(rows.shape[0], weight.shape[1])
    start = 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            torch.mm(rows[start : start + count], weight[expert].t(), out=out[start : start + count])
        start += count
    out[start:] = 0
    return out


@operator("modelworks::grouped_outer")
def grouped_outer(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    """(N, a), (N, b), (E,) -> (E, a, b): the sum over each group's rows of their outer products."""
    out = left.new_empty(counts.shape[0], left.shape[1], right.shape[1])
    start = 0
    for expert, count in enumerate(counts.tolist()):
        rows = slice(start, start + count)
        torch.mm(left[rows].t(), right[rows], out=out[expert])  # of no rows: zeros
        start += count
    return out


@on_fake_tensors("modelworks::grouped_mm")
def _(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


@on_fake_tensors("modelworks::grouped_outer")
def _(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    return left.new_empty(counts.shape[0], left.shape[1], right.shape[1])


@register_flop_formula(torch.ops.modelworks.grouped_mm)
def _grouped_mm_flops(rows: Any, weight: Any, counts: Any, *, out_shape: Any = None, **kwargs: Any) -> int:
    """As if every row belonged to a group."""
    return 2 * rows[0] * rows[1] * weight[1]  # type: ignore[no-any-return]


@register_flop_formula(torch.ops.modelworks.grouped_outer)
def _grouped_outer_flops(left: Any, right: Any, counts: Any, *, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * left[0] * left[1] * right[1]  # type: ignore[no-any-return]
