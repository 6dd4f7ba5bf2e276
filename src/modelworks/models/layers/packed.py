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
from modelworks.models.weights import PLAIN, Product, WeightFormat, back_to_back, joined


class Linear(nn.Module):
    """y = x W^T + b. weight: (d_out, d_in); bias: (d_out,) or absent. deferred: see `defer_weights`.

    apart: its weight comes when it is called, so that it cannot be joined with others'.
    format: how the matrix is stored; another than PLAIN has tensors of other names, and is multiplied by as `product`
    says, that of a `prepared` model, which is also of the layers that are joined to it.
    """

    deferred: DeferredWeights | None = None
    apart = False
    product: Product | None = None
    weight: nn.Parameter

    def __init__(self, d_in: int, d_out: int, bias: bool, format: WeightFormat = PLAIN) -> None:
        super().__init__()
        self.d_out, self.format = d_out, format
        for name, tensor in format.create(d_out, d_in).items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))
        self.bias = nn.Parameter(torch.empty(d_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x) if self.product is not None else linear(x, self.weight, self.bias, self.deferred)

    def matrix(self) -> dict[str, Tensor]:
        """The tensors of its matrix, as its format has named them."""
        return {name: tensor.detach() for name, tensor in self.named_parameters(recurse=False) if name != "bias"}


def packed_linear(x: Tensor, layers: Sequence[Linear]) -> tuple[Tensor, ...]:
    """`tuple(layer(x) for layer in layers)` by one product. x: (..., d_in). All have a bias, or none has."""
    if layers[0].product is not None:
        return layers[0].product.parts(x)
    if layers[0].apart:
        return tuple(layer(x) for layer in layers)
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers if layer.bias is not None]
    bias = joined(biases) if biases else None
    if can_defer(x, layers[0].deferred):
        with torch.no_grad():
            weight = joined(weights)
        y = deferred_linear(x, weight, bias, layers[0].deferred, weights)
    else:
        y = F.linear(x, joined(weights), bias)
    return torch.split(y, [layer.weight.shape[0] for layer in layers], dim=-1)


def pack_storage(layers: Sequence[Linear]) -> None:
    """Move the layers' weights (and biases) into one allocation, back to back. Values and names do not change."""
    for parameters in ([layer.weight for layer in layers], [layer.bias for layer in layers if layer.bias is not None]):
        if parameters and not back_to_back(parameters):
            whole = torch.cat([parameter.detach() for parameter in parameters])
            parts = torch.split(whole, [parameter.shape[0] for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.data = part
