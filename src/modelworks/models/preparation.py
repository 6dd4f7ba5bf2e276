"""A model whose weights are processed for inference: the products of `modelworks.models.weights`, made once.

The model that is given stays as it is. The prepared one has modules of its own and shares with it all tensors but the
matrices, which it has processed; where that is a copy, memory for both is needed until the given one is let go.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from modelworks.models.layers.packed import Linear
from modelworks.models.transformer import Transformer
from modelworks.models.weights import PLAIN, Product, WeightFormat, joined


@torch.no_grad()
def prepared(model: Transformer, plain: WeightFormat = PLAIN) -> Transformer:
    """For inference with these values: it computes the same, has no gradients and cannot be saved.

    plain: the format by which plain matrices are multiplied. Matrices of another format are by that; experts and
    layers that have been replaced (such as those that are spread over ranks) stay as they are.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    for layers in twin.linear_groups():
        if all(type(layer) is Linear for layer in layers):
            _process(layers, plain)
    if twin.head is not None:
        _process((twin.head,), plain)
        twin.head_product = twin.head.product
    elif twin.part.last:
        weight = twin.head_weight().detach()
        twin.head_product = Product(plain, plain.process([{"weight": weight}]), None, (len(weight),))
    return twin


def matrix_bytes(model: Transformer) -> int:
    """Of all matrices that `prepared` processes, tied head included."""
    layers = [layer for group in model.linear_groups() for layer in group]
    tensors = [tensor for layer in layers for tensor in layer.matrix().values()]
    return sum(each.numel() * each.element_size() for each in (*tensors, model.head_weight()))


def _process(layers: Sequence[Linear], plain: WeightFormat) -> None:
    """Give the first of layers of the same input the product of all, and take their tensors from them."""
    own = layers[0].format
    if any(layer.format != own for layer in layers):
        raise ValueError("matrices of the same input have several formats")
    format = plain if own == PLAIN else own
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    widths = tuple(layer.d_out for layer in layers)
    processed = format.process([layer.matrix() for layer in layers])
    layers[0].product = Product(format, processed, joined(biases) if biases else None, widths)
    for layer in layers:
        for name in list(layer.matrix()):
            delattr(layer, name)
        layer.bias = None
