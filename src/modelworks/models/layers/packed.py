"""Several linear maps of the same input as one matrix product.

q, k, v (and gate, up) stay separate logical parameters, so that optimisers, sharding and the name maps see them
plainly; only their product is fused. Where their storages lie back to back (`pack_storage`) the fused weight is a
view and costs nothing; otherwise the weights are concatenated, a copy that is small next to the product itself
(1/rows·length of its multiplications).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modelworks.models.layers.deferred import DeferredWeights, can_defer, deferred_linear, linear


class Linear(nn.Module):
    """y = x W^T + b. weight: (d_out, d_in); bias: (d_out,) or absent. deferred: see `defer_weights`.

    apart: its weight comes when it is called, so that it cannot be joined with others'.
    """

    deferred: DeferredWeights | None = None
    apart = False

    def __init__(self, d_in: int, d_out: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in))
        self.bias = nn.Parameter(torch.empty(d_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.deferred)


def packed_linear(x: Tensor, layers: Sequence[Linear]) -> tuple[Tensor, ...]:
    """`tuple(layer(x) for layer in layers)` by one product. x: (..., d_in). All have a bias, or none has."""
    if layers[0].apart:
        return tuple(layer(x) for layer in layers)
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers if layer.bias is not None]
    bias = _joined(biases) if biases else None
    if can_defer(x, layers[0].deferred):
        with torch.no_grad():
            weight = _joined(weights)
        y = deferred_linear(x, weight, bias, layers[0].deferred, weights)
    else:
        y = F.linear(x, _joined(weights), bias)
    return torch.split(y, [layer.weight.shape[0] for layer in layers], dim=-1)


def pack_storage(layers: Sequence[Linear]) -> None:
    """Move the layers' weights (and biases) into one allocation, back to back. Values and names do not change."""
    for parameters in ([layer.weight for layer in layers], [layer.bias for layer in layers if layer.bias is not None]):
        if parameters and not _back_to_back(parameters):
            whole = torch.cat([parameter.detach() for parameter in parameters])
            parts = torch.split(whole, [parameter.shape[0] for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.data = part


def _joined(parameters: Sequence[Tensor]) -> Tensor:
    """The parameters concatenated along dimension 0; a view where no gradient is wanted and storage allows."""
    if not torch.compiler.is_compiling() and not torch.is_grad_enabled() and _back_to_back(parameters):
        first = parameters[0]
        size = (sum(parameter.shape[0] for parameter in parameters), *first.shape[1:])
        return first.as_strided(size, first.stride(), first.storage_offset())
    return torch.cat(tuple(parameters))


def _back_to_back(parameters: Sequence[Tensor]) -> bool:
    first = parameters[0]
    storage, end = first.untyped_storage().data_ptr(), first.storage_offset()
    for parameter in parameters:
        same = parameter.untyped_storage().data_ptr() == storage and parameter.dtype == first.dtype
        if not (same and parameter.storage_offset() == end and parameter.is_contiguous()):
            return False
        end += parameter.numel()
    return True
