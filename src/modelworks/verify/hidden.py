"""What each layer computes in the first step, put together from all ranks: it names the first place that differs.

Of a layer are recorded its input, what its attention and its feed-forward give, and its output. A block that runs again
for its backward pass is recorded once. What a rank has of a place are some rows (its micro-batches) and some columns
(its part of them along cp, and along tp under sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modelworks.models import Transformer
from modelworks.parallel import SplitModel
from modelworks.train import own_columns
from modelworks.verify.observed import Place

_COPIES_AGREE = 1e-9  # of the largest element: ranks that hold the same tokens compute the same


class HiddenRecorder:
    """Listens to the blocks of `parts` from its making until `whole` or `split` takes the result."""

    def __init__(self, parts: Sequence[Transformer]) -> None:
        self._outputs: dict[Place, list[Tensor]] = {}
        self._seen: dict[int, list[Any]] = {}
        self._listening = False  # whether the block that runs now does so for the first time
        self._handles = []
        for part in parts:
            for name, block in part.blocks.items():
                layer = int(name)
                self._handles.append(block.register_forward_pre_hook(self._before(layer)))
                for own_name, module in (("attention", block.attention), ("feed_forward", block.feed_forward)):
                    self._handles.append(module.register_forward_hook(self._after((layer, own_name))))  # type: ignore[union-attr]
                self._handles.append(block.register_forward_hook(self._after((layer, "output"))))

    def whole(self) -> dict[Place, Tensor]:
        """Place -> its result in the only forward pass, (rows, length, d_model) in float64."""
        self._stop()
        return {place: outputs[0].double() for place, outputs in self._outputs.items()}

    def split(self, model: SplitModel) -> dict[Place, Tensor]:
        """The same from all ranks, on rank 0; nothing elsewhere. Every rank must call it.

        NaN where no rank has a value, and where ranks that have the same tokens disagree.
        """
        self._stop()
        config, mesh = model.config, model.mesh
        columns = own_columns(mesh, config)
        columns = torch.arange(config.data.seq_len) if columns is None else columns.cpu()
        if config.parallel.sequence_parallel:
            columns = columns.chunk(mesh.size("tp"))[mesh.place("tp")]
        first_row = mesh.place("dp") * (config.train.global_batch // mesh.size("dp"))
        own = {place: torch.cat(outputs).double() for place, outputs in self._outputs.items()}
        pieces = mesh.group("world").gather_objects((first_row, columns, own))
        if not mesh.is_main:
            return {}
        shape = (config.train.global_batch, config.data.seq_len, config.model.d_model)
        result: dict[Place, Tensor] = {}
        filled: dict[Place, Tensor] = {}
        for row, places, outputs in pieces:
            for place, output in outputs.items():
                whole = result.setdefault(place, torch.full(shape, torch.nan, dtype=torch.float64))
                there = filled.setdefault(place, torch.zeros(shape[:2], dtype=torch.bool))
                if output.shape[1] != len(places) or row + len(output) > len(whole):
                    whole.fill_(torch.nan)
                    continue
                rows = torch.arange(row, row + len(output))[:, None]
                agrees = (whole[rows, places] - output).abs() <= _COPIES_AGREE * output.abs().max()
                whole[rows, places] = torch.where(agrees | ~there[rows, places, None], output, torch.nan)
                there[rows, places] = True
        return result

    def _before(self, layer: int) -> Any:
        def listen(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            # A context belongs to one micro-batch, so the same one again is recomputation.
            context, seen = inputs[2], self._seen.setdefault(layer, [])
            self._listening = not any(context is other for other in seen)
            if self._listening:
                seen.append(context)
                self._note((layer, "input"), inputs[0])

        return listen

    def _after(self, place: Place) -> Any:
        def listen(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            if self._listening:
                self._note(place, output)

        return listen

    def _note(self, place: Place, value: Tensor) -> None:
        self._outputs.setdefault(place, []).append(value.detach().clone())

    def _stop(self) -> None:
        for handle in self._handles:
            handle.remove()
