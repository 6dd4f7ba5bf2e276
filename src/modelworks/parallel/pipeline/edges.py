"""What goes over an edge between two stages on different ranks: a named set of tensors, and their gradients back.

Shapes and dtypes are the same for every micro-batch of a run, so nothing but the tensors is sent. Names go in sorted
order, and messages in the order of the program, which both ranks of an edge share; so no tags are needed, and NCCL,
which has none, does the same as Gloo.

Memory: a received tensor lives from its receive until its use. A sent one lives until its transfer is done, which Gloo
tells only to who waits; so the oldest is waited for when `IN_FLIGHT` to one rank are on their way. A program ends even
if each send waits for its receive, so this waits for no rank that waits for this one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from modelworks.layout.pipeline import Action
from modelworks.parallel.collectives import Group

EdgeShapes = Mapping[str, tuple[Sequence[int], torch.dtype]]  # name -> shape and dtype of one micro-batch's tensor
IN_FLIGHT = 4


class Edges:
    """The transfers of one run. shapes: the same on every edge."""

    def __init__(self, group: Group, device: torch.device, shapes: EdgeShapes) -> None:
        self._group, self._device = group, device
        self._shapes = {name: (tuple(shape), dtype) for name, (shape, dtype) in sorted(shapes.items())}
        self._sent: dict[int, deque[list[tuple[Any, Tensor]]]] = {}
        self._coming: dict[Action, dict[str, tuple[Any, Tensor]]] = {}

    def send(self, action: Action, tensors: Mapping[str, Tensor], place: int) -> None:
        """Start sending to the rank at `place` of the pipeline. The tensors must not change.

        Raises ValueError where they are not what the edges carry.
        """
        names = self._names(action)
        if set(tensors) != set(names):
            raise ValueError(f"{action}: has the tensors {sorted(tensors)}, and edges carry {names}")
        flying = self._sent.setdefault(place, deque())
        while len(flying) >= IN_FLIGHT:
            _wait(flying.popleft())
        works = []
        for name in names:
            tensor, expected = tensors[name].contiguous(), self._shapes[name]
            if (tuple(tensor.shape), tensor.dtype) != expected:
                got = f"shape {tuple(tensor.shape)} and {tensor.dtype}"
                raise ValueError(f"{action}: {name} has {got}, expected {expected[0]} and {expected[1]}")
            works.append((self._group.send(tensor, place), tensor))
        flying.append(works)

    def receive(self, action: Action, place: int) -> None:
        """Start receiving from the rank at `place`; `take` has the result."""
        coming = {}
        for name in self._names(action):
            shape, dtype = self._shapes[name]
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            coming[name] = (self._group.receive(tensor, place), tensor)
        self._coming[action] = coming

    def take(self, action: Action) -> dict[str, Tensor]:
        """Wait for what `receive(action)` started."""
        coming = self._coming.pop(action)
        _wait(list(coming.values()))
        return {name: tensor for name, (_, tensor) in coming.items()}

    def finish(self) -> None:
        """Wait until everything sent has left."""
        for flying in self._sent.values():
            while flying:
                _wait(flying.popleft())

    def gradients(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The gradients of a stage's inputs; zeros for one that it did not use. Integers have none."""
        return {
            name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for name, tensor in inputs.items()
            if tensor.is_floating_point()
        }

    def _names(self, action: Action) -> list[str]:
        backward = action.kind in ("send_backward", "receive_backward")
        return [name for name, (_, dtype) in self._shapes.items() if dtype.is_floating_point or not backward]


def _wait(works: Sequence[tuple[Any, Tensor]]) -> None:
    for work, _ in works:
        work.wait()
