"""The map between our parameter names and those of a Hugging Face checkpoint, as data used in both directions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from modelworks.config import UserError


@dataclass(frozen=True)
class NameEntry:
    """One of their tensors and the one or several of ours that it holds, or the part of one of ours.

    theirs: their name. ours: our names; several are concatenated along `dimension`, in this order.
    transposed: theirs is stored (in, out), as GPT-2's Conv1D does; ours is (out, in).
    expert: theirs is this expert's matrix alone, ours holds those of all experts, one after the other.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False
    dimension: int = 0
    expert: int | None = None

    def to_ours(self, tensor: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Their tensor -> ours by name, as views; of an expert, its part of ours. shapes: of our parameters
        (`parameter_shapes(config)`).

        Raises UserError when their tensor's shape is not what the config says.
        """
        wanted = self.their_shape(shapes)
        if tuple(tensor.shape) != wanted:
            raise UserError(
                f"{self.theirs}: the file holds shape {tuple(tensor.shape)}, config.json implies {wanted}; "
                "the weights and the config belong to different models"
            )
        whole = tensor.t() if self.transposed else tensor
        if self.expert is not None:
            return {self.ours[0]: whole}
        parts = torch.split(whole, [shapes[name][self.dimension] for name in self.ours], self.dimension)
        return dict(zip(self.ours, parts, strict=True))

    def to_theirs(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Our tensors by name -> theirs, contiguous."""
        if self.expert is not None:
            return tensors[self.ours[0]][self.expert].contiguous()
        parts = [tensors[name] for name in self.ours]
        whole = torch.cat(parts, self.dimension) if len(parts) > 1 else parts[0]
        return (whole.t() if self.transposed else whole).contiguous()

    def their_shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The shape of their tensor."""
        shape = list(shapes[self.ours[0]])
        if self.expert is not None:
            return tuple(shape[1:])
        shape[self.dimension] = sum(shapes[name][self.dimension] for name in self.ours)
        return tuple(shape[::-1] if self.transposed else shape)


def entries_by_name(entries: Iterable[NameEntry]) -> dict[str, list[NameEntry]]:
    """Our name -> the entries that fill it: one, or one for each expert."""
    found: dict[str, list[NameEntry]] = {}
    for entry in entries:
        for name in entry.ours:
            found.setdefault(name, []).append(entry)
    return found
