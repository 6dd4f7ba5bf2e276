"""The map between our parameter names and those of a Hugging Face checkpoint, as data used in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from modelworks.config import UserError


@dataclass(frozen=True)
class NameEntry:
    """One of their tensors and the one or several of ours that it holds.

    theirs: their name. ours: our names; several are concatenated along the output dimension, in this order.
    transposed: theirs is stored (in, out), as GPT-2's Conv1D does; ours is (out, in).
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False

    def to_ours(self, tensor: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Their tensor -> ours by name, as views. shapes: of our parameters (`parameter_shapes(config)`).

        Raises UserError when their tensor's shape is not what the config says.
        """
        wanted = self.their_shape(shapes)
        if tuple(tensor.shape) != wanted:
            raise UserError(
                f"{self.theirs}: the file holds shape {tuple(tensor.shape)}, config.json implies {wanted}; "
                "the weights and the config belong to different models"
            )
        whole = tensor.t() if self.transposed else tensor
        parts = torch.split(whole, [shapes[name][0] for name in self.ours])
        return dict(zip(self.ours, parts, strict=True))

    def to_theirs(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Our tensors by name -> theirs, contiguous."""
        parts = [tensors[name] for name in self.ours]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        return (whole.t() if self.transposed else whole).contiguous()

    def their_shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The shape of their tensor."""
        rows = sum(shapes[name][0] for name in self.ours)
        shape = (rows, *shapes[self.ours[0]][1:])
        return shape[::-1] if self.transposed else shape
