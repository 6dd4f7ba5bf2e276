"""Weight gradients of linear maps put off: a backward pass in two halves (Qi et al. 2023, "Zero bubble pipeline
parallelism", 2401.10241).

The stage before waits for the gradient of this stage's *inputs* only. With a `DeferredWeights` bound to a part of a
model and collecting, `backward()` computes just that, and for each linear map notes what its weight's gradient will be
made of: its input and the gradient of its output. `run` makes the products later, when the pipeline would stand idle.

    y = x W^T + b        at once: dx = dy W, db = sum dy        later: dW += dy^T x

Only weights of linear maps (also those of experts) are put off; they are nearly all of the work. Gradients of biases,
norms and embeddings are made at once, and so is the head's, which the vocabulary loss makes in its forward pass.

Invariant: after `run` every parameter's gradient is what a whole backward pass gives, up to the order of additions.
Where nothing is bound, or a micro-batch is not split, `linear` is `F.linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class DeferredWeights:
    """The weight gradients that wait, by micro-batch. One for each part of a model; see `defer_weights`."""

    def __init__(self) -> None:
        self.active = False  # whether linear maps that run now will have their backward pass in two halves
        self.watcher: Callable[[nn.Parameter, Tensor], None] | None = None  # shown each gradient before it is added
        self._waiting: dict[int, list[Callable[[], None]]] = {}
        self._current: list[Callable[[], None]] | None = None

    @contextmanager
    def splitting(self) -> Iterator[None]:
        """Around the forward pass of a micro-batch whose backward pass will be in two halves."""
        self.active = True
        try:
            yield
        finally:
            self.active = False

    @contextmanager
    def collect(self, micro_batch: int) -> Iterator[None]:
        """Around its backward pass: the weight gradients wait for `run(micro_batch)`."""
        if micro_batch in self._waiting:
            raise ValueError(f"weight gradients of micro-batch {micro_batch} wait already")
        self._current = self._waiting[micro_batch] = []
        try:
            with self.splitting():  # for what is recomputed
                yield
        finally:
            self._current = None

    def run(self, micro_batch: int) -> None:
        """Make the weight gradients of a micro-batch and add them to their parameters' `grad`, freeing what each
        needed as it is done."""
        work = self._waiting.pop(micro_batch)
        work.reverse()
        while work:
            work.pop()()

    def clear(self) -> None:
        """Forget what a pass that failed has left."""
        self._waiting.clear()

    def add(self, parameters: Sequence[nn.Parameter], x: Tensor, gradient: Tensor) -> None:
        """parameters: weights (d_out, d_in) one above the other. x: (..., d_in), gradient: (..., all d_out)."""
        rows, outputs = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])

        def make() -> None:
            product = outputs.T @ rows
            for parameter, part in zip(parameters, torch.split(product, [len(p) for p in parameters]), strict=True):
                self.accumulate(parameter, part)

        self.put_off(make)

    def accumulate(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add to `grad` as autograd does it: in the parameter's dtype, a first gradient taken as it is."""
        if not parameter.requires_grad:
            return
        if self.watcher is not None:
            self.watcher(parameter, gradient)
        if parameter.grad is None:
            parameter.grad = gradient.to(
                parameter.dtype, memory_format=torch.contiguous_format, copy=not _owns(gradient)
            )
        else:
            parameter.grad += gradient.to(parameter.dtype)

    def put_off(self, make: Callable[[], None]) -> None:
        """make: makes a weight's gradient and accumulates it. Called by `run`, or now in an ordinary backward pass."""
        if self._current is None:
            make()  # a backward pass that nobody cut in two
        else:
            self._current.append(make)


@runtime_checkable
class Deferrable(Protocol):
    """A module that passes its `deferred` to `linear` or `packed_linear`; None for an ordinary backward pass."""

    deferred: DeferredWeights | None


def defer_weights(model: nn.Module) -> DeferredWeights:
    """Bind a `DeferredWeights` to every linear map of the model (its `Deferrable` modules): the one that is bound to
    them already, where there is one."""
    modules = [module for module in model.modules() if isinstance(module, Deferrable)]
    deferred = next((module.deferred for module in modules if module.deferred is not None), DeferredWeights())
    for module in modules:
        module.deferred = deferred
    return deferred


def linear(x: Tensor, weight: nn.Parameter, bias: Tensor | None, deferred: DeferredWeights | None) -> Tensor:
    """F.linear(x, weight, bias), whose weight gradient is left to `deferred` where there is one."""
    if not can_defer(x, deferred):
        return F.linear(x, weight, bias)
    return deferred_linear(x, weight.detach(), bias, deferred, (weight,))


def can_defer(x: Tensor, deferred: DeferredWeights | None) -> bool:
    """Whether a linear map of x has a backward pass that can be put off: one that goes on to x."""
    return deferred is not None and deferred.active and x.requires_grad and torch.is_grad_enabled()


def deferred_linear(
    x: Tensor,
    joined: Tensor,
    bias: Tensor | None,
    deferred: DeferredWeights | None,
    parameters: Sequence[nn.Parameter],
) -> Tensor:
    """As `linear`, with the parameters' weights one above the other in `joined`, which has no gradient of its own."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):  # what F.linear would do under it
        dtype = torch.get_autocast_dtype(device)
        x, joined, bias = x.to(dtype), joined.to(dtype), None if bias is None else bias.to(dtype)
    return _DeferredLinear.apply(x, joined, bias, deferred, parameters)  # type: ignore[no-any-return, no-untyped-call]


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        deferred: DeferredWeights,
        parameters: Sequence[nn.Parameter],
    ) -> Tensor:
        # Saved, not kept as attributes: recomputation makes saved tensors anew instead of holding them.
        ctx.save_for_backward(x, weight)
        ctx.deferred, ctx.parameters = deferred, parameters
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if any(parameter.requires_grad for parameter in ctx.parameters):
            ctx.deferred.add(ctx.parameters, x.detach(), gradient)
        input_gradient = gradient @ weight
        bias_gradient = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return input_gradient, None, bias_gradient, None, None


def _owns(gradient: Tensor) -> bool:
    """Whether a gradient is all of its storage; a slice would keep the gradients beside it alive."""
    return gradient.numel() * gradient.element_size() == gradient.untyped_storage().nbytes()
