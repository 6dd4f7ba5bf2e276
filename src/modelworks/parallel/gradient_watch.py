"""`GradientWatch`: what each backward pass brings, seen before it is added to what earlier ones brought.

A rank sees the gradient of its `computed` slice from its own tokens of one micro-batch, before any reduction: a part
of a sum where a plan names groups to sum over, or columns of a row are on other ranks. A parameter that two stages
share is seen once for each.

Gradients come to autograd's leaves, where a hook sees them whole even of a parameter that is used twice, or by hand
where weight gradients are put off. Hooks live for one run of the executor: nobody else pays for them, and nothing that
is compiled finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from torch import Tensor, nn

from modelworks.parallel.gradients import GradientStore

See = Callable[[str, int, Tensor], None]  # parameter's name, micro-batch, gradient: neither kept nor changed


class GradientWatch:
    """Of one run: the executor tells which micro-batch comes next, and `see` is called. `close` ends it."""

    def __init__(self, store: GradientStore, see: See) -> None:
        self._store, self._see = store, see
        self._micro_batch = 0
        self._names: dict[int, str] = {}  # by id of the leaf
        self._handles: list[Any] = []

    def before_backward(self, micro_batch: int, names: Collection[str]) -> None:
        """Gradients of these parameters are of this micro-batch from here on."""
        self._micro_batch = micro_batch
        leaves = self._store.leaves()  # of zero 3 they are there once they were used
        for name in names:
            leaf = leaves.get(name)
            if leaf is None or not leaf.requires_grad or id(leaf) in self._names:
                continue
            self._names[id(leaf)] = name
            self._handles.append(leaf.register_hook(partial(self._arrived, name)))  # type: ignore[no-untyped-call]

    def added(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """A gradient that is added by hand."""
        self._arrived(self._names[id(parameter)], gradient)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._names.clear()

    def _arrived(self, name: str, gradient: Tensor | None) -> None:
        if gradient is not None:  # autograd says None where no path has brought any
            self._see(name, self._micro_batch, gradient.detach())
