"""Each layer's output in the first step, put together from all ranks: it names the first layer that differs.

Layer -1 is what goes into the first block: the embedding. A block that runs again for its backward pass is recorded
once. What a rank has of a layer are some rows (its micro-batches) and some columns (its place along cp, and along tp
under sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modelworks.models import Transformer
from modelworks.parallel import SplitModel
from modelworks.train import own_columns


class HiddenRecorder:
    """Listens to the blocks of `parts` from its making until `whole` or `split` takes the result."""

    def __init__(self, parts: Sequence[Transformer]) -> None:
        self._outputs: dict[int, list[Tensor]] = {}
        self._seen: dict[int, list[Any]] = {}
        self._handles = []
        for part in parts:
            for name, block in part.blocks.items():
                self._handles.append(block.register_forward_hook(self._listener(int(name))))
                if name == "0":
                    self._handles.append(block.register_forward_pre_hook(self._before))

    def whole(self) -> dict[int, Tensor]:
        """Layer -> its output of the only forward pass, (rows, length, d_model) in float64."""
        self._stop()
        return {layer: outputs[0].double() for layer, outputs in self._outputs.items()}

    def split(self, model: SplitModel, micro_batch: int) -> dict[int, Tensor]:
        """The same from all ranks, on rank 0; nothing elsewhere. Every rank must call it."""
        self._stop()
        config, mesh = model.config, model.mesh
        columns = own_columns(mesh, config)
        columns = torch.arange(config.data.seq_len) if columns is None else columns.cpu()
        if config.parallel.sequence_parallel:
            columns = columns.chunk(mesh.size("tp"))[mesh.place("tp")]
        first_row = mesh.place("dp") * (config.train.global_batch // mesh.size("dp"))
        own = {layer: torch.cat(outputs) for layer, outputs in self._outputs.items()}
        pieces = mesh.group("world").gather_objects((first_row, columns, own))
        if not mesh.is_main:
            return {}
        shape = (config.train.global_batch, config.data.seq_len, config.model.d_model)
        result: dict[int, Tensor] = {}
        for row, places, layers in pieces:
            for layer, output in layers.items():
                whole = result.setdefault(layer, torch.full(shape, torch.nan, dtype=torch.float64))
                rows = torch.arange(row, row + output.shape[0])
                if output.shape[1] == len(places):
                    whole[rows[:, None], places] = output.double()
        return result

    def _listener(self, layer: int) -> Any:
        def listen(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            self._note(layer, inputs[2], output)

        return listen

    def _before(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._note(-1, inputs[2], inputs[0])

    def _note(self, layer: int, context: Any, value: Tensor) -> None:
        """A context belongs to one micro-batch, so the same one again is recomputation."""
        seen = self._seen.setdefault(layer, [])
        if not any(context is other for other in seen):
            seen.append(context)
            self._outputs.setdefault(layer, []).append(value.detach().clone())

    def _stop(self) -> None:
        for handle in self._handles:
            handle.remove()
