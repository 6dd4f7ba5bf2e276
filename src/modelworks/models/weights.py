"""How a matrix of weights is stored, and how it is multiplied by: one contract for every format.

    create    the tensors of a matrix, by name, for a checkpoint to fill
    process   after loading and once: what multiplying needs, such as an order that a kernel reads well
    apply     y = x W^T + b

Matrices of the same input (q, k and v) are processed together, one above the other, so that they are one product. They
stay separate until then: names, checkpoints and sharding see each by itself. A layer knows its format
(`layers.packed.Linear`); `modelworks.models.preparation` makes the products of a whole model. (The three steps are
vLLM's for its quantised linear layers.)

    PLAIN     one tensor of the model's dtype. Matrices whose storages lie back to back are processed without a copy
    PACKED    stored the same; processed into the order in which oneDNN's kernels on CPUs read it, a copy

Further formats, such as weights of few bits, need an object with these three methods and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

Tensors = Mapping[str, Tensor]


class WeightFormat(Protocol):
    """A value: formats that do the same are equal, as copies of a model and other processes need it."""

    def create(self, d_out: int, d_in: int) -> dict[str, Tensor]:
        """Unset tensors of a matrix, of torch's default dtype and device where the format leaves them open."""

    def process(self, matrices: Sequence[Tensors]) -> Any:
        """What `apply` needs of matrices of the same d_in, one above the other; each as `create` made it."""

    def apply(self, x: Tensor, processed: Any, bias: Tensor | None) -> Tensor:
        """x (..., d_in) -> (..., all d_out), in the dtype of x."""


@dataclass(frozen=True)
class Product:
    """x W^T + b by weights that are processed. widths: d_out of each matrix."""

    format: WeightFormat
    processed: Any
    bias: Tensor | None
    widths: tuple[int, ...]

    def __call__(self, x: Tensor) -> Tensor:
        return self.format.apply(x, self.processed, self.bias)

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """The results of each matrix."""
        return torch.split(self(x), list(self.widths), dim=-1)


@dataclass(frozen=True)
class Plain:
    def create(self, d_out: int, d_in: int) -> dict[str, Tensor]:
        return {"weight": torch.empty(d_out, d_in)}

    def process(self, matrices: Sequence[Tensors]) -> Tensor:
        return joined([each["weight"] for each in matrices])

    def apply(self, x: Tensor, processed: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, processed, bias)


@dataclass(frozen=True)
class Packed(Plain):
    """float32 or bfloat16 on a CPU, without gradients. The operators are those to which torch.compile turns products
    with constant weights; torch does not document them, so `packs` asks before anyone relies on them."""

    def process(self, matrices: Sequence[Tensors]) -> Tensor:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(super().process(matrices))
        return packed

    def apply(self, x: Tensor, processed: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, processed, bias, "none", [], "")
        return y


PLAIN, PACKED = Plain(), Packed()


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether PACKED can be had here for weights of this dtype, and is worth having."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    operators = torch.ops.mkldnn
    if not (hasattr(operators, "_reorder_linear_weight") and hasattr(operators, "_linear_pointwise")):
        return False
    # Without instructions for bfloat16 oneDNN would emulate them.
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(operators._is_mkldnn_bf16_supported()))


def joined(parameters: Sequence[Tensor]) -> Tensor:
    """The parameters concatenated along dimension 0; a view where no gradient is wanted and storage allows."""
    if not torch.compiler.is_compiling() and not torch.is_grad_enabled() and back_to_back(parameters):
        first = parameters[0]
        size = (sum(parameter.shape[0] for parameter in parameters), *first.shape[1:])
        return first.as_strided(size, first.stride(), first.storage_offset())
    return torch.cat(tuple(parameters))


def back_to_back(parameters: Sequence[Tensor]) -> bool:
    first = parameters[0]
    storage, end = first.untyped_storage().data_ptr(), first.storage_offset()
    for parameter in parameters:
        same = parameter.untyped_storage().data_ptr() == storage and parameter.dtype == first.dtype
        if not (same and parameter.storage_offset() == end and parameter.is_contiguous()):
            return False
        end += parameter.numel()
    return True
