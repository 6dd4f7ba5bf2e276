"""AdamW: Adam with decoupled weight decay (Loshchilov & Hutter 2017, 1711.05101).

    m <- b1 m + (1 - b1) g            v <- b2 v + (1 - b2) g^2
    p <- p (1 - lr decay)             p <- p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

The update is elementwise, so any slice of a parameter can be updated by whoever holds it. State is kept by full
parameter name and is at least float32. A parameter stored in bf16 or fp16 gets a float32 *master* copy, which is
what the update changes; the stored parameter is its rounding. Without it an update smaller than half a unit in
the last place (2^-9 of the weight in bf16) would be lost, and most updates are.

torch's fused kernel does the arithmetic (one pass over memory); what is stored, and in which dtype, is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from modelworks.config import OptimizerConfig
from modelworks.optim.groups import ParameterOptions, parameter_options

_LOW_PRECISION = (torch.bfloat16, torch.float16)


# (full state name, shape, dtype) -> zeros where the state is to live
Allocate = Callable[[str, torch.Size, torch.dtype], Tensor]


def build_optimizer(
    named_parameters: Iterable[tuple[str, Tensor]],
    config: OptimizerConfig,
    *,
    all_names: Sequence[str] | None = None,
    allocate: Allocate | None = None,
) -> AdamW:
    """The optimiser that `config.name` names, over the parameters that require a gradient.

    all_names: of the whole model, where `named_parameters` are those of one rank: patterns must match one of them.
    allocate: makes the state elsewhere (host memory, files); every parameter then has a master copy there too.
    """
    return AdamW(named_parameters, config, all_names=all_names, allocate=allocate)


@dataclass(frozen=True)
class _Slot:
    """One parameter. `updated` is the tensor that the update changes: the master copy if there is one."""

    parameter: Tensor
    updated: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    count: Tensor  # float32 scalar beside the state: updates done, as the fused kernel wants it
    options: ParameterOptions


class AdamW:
    """named_parameters: (full name, tensor); tensors that need no gradient are left alone."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        config: OptimizerConfig,
        *,
        all_names: Sequence[str] | None = None,
        allocate: Allocate | None = None,
    ) -> None:
        parameters = {name: tensor for name, tensor in named_parameters if tensor.requires_grad}
        options = parameter_options(all_names or parameters, config)
        self.config = config
        self._slots = {name: _new_slot(name, tensor, options[name], allocate) for name, tensor in parameters.items()}
        self._updates = 0

    @property
    def updates(self) -> int:
        """Updates made so far: t of the bias correction. Skipped steps do not count."""
        return self._updates

    @property
    def options(self) -> dict[str, ParameterOptions]:
        return {name: slot.options for name, slot in self._slots.items()}

    def state_bytes(self) -> int:
        """Bytes of all state, master copies included, wherever they are."""
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.named_state())

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """One update with rate `lr`. gradients: one for every parameter, of its shape.

        Raises KeyError for a missing gradient: a parameter outside the graph should not require one.
        """
        for options in dict.fromkeys(slot.options for slot in self._slots.values()):
            group = {name: slot for name, slot in self._slots.items() if slot.options == options}
            slots = list(group.values())
            adamw(
                [slot.updated for slot in slots],
                [gradients[name].to(slot.updated.device, slot.updated.dtype) for name, slot in group.items()],
                [slot.exp_avg for slot in slots],
                [slot.exp_avg_sq for slot in slots],
                [],
                [slot.count for slot in slots],
                fused=slots[0].updated.device.type in ("cpu", "cuda"),
                amsgrad=False,
                maximize=False,
                beta1=self.config.betas[0],
                beta2=self.config.betas[1],
                lr=lr * options.lr_multiplier,
                weight_decay=options.weight_decay,
                eps=self.config.eps,
            )
        for slot in self._slots.values():
            if slot.updated is not slot.parameter:
                slot.parameter.copy_(slot.updated)
        self._updates += 1

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """Everything to save besides `updates`: (`<parameter>/<state>`, tensor), each of its parameter's shape."""
        for name, slot in self._slots.items():
            yield f"{name}/exp_avg", slot.exp_avg
            yield f"{name}/exp_avg_sq", slot.exp_avg_sq
            if slot.updated is not slot.parameter:
                yield f"{name}/master", slot.updated

    @torch.no_grad()
    def load_state(self, tensors: Iterable[tuple[str, Tensor]], updates: int) -> None:
        """Take over saved state, all of it and nothing else; raises ValueError naming what is missing or extra.

        The caller has already loaded the parameters. A master copy missing from the state (saved by a run in
        float32) is made from its parameter; one that is not needed here is the better value for it.
        """
        own = dict(self.named_state())
        missing = set(own)
        for name, tensor in tensors:
            if name in own:
                if own[name].shape != tensor.shape:
                    raise ValueError(f"optimiser state {name}: shape {tuple(tensor.shape)}, expected {own[name].shape}")
                own[name].copy_(tensor)
                missing.discard(name)
            elif name.endswith("/master") and name.removesuffix("/master") in self._slots:
                self._slots[name.removesuffix("/master")].parameter.copy_(tensor)
            else:
                raise ValueError(f"optimiser state {name} belongs to no parameter of this model")
        for name in list(missing):
            if name.endswith("/master"):
                slot = self._slots[name.removesuffix("/master")]
                slot.updated.copy_(slot.parameter)
                missing.discard(name)
        if missing:
            raise ValueError(f"optimiser state is missing {', '.join(sorted(missing)[:3])} ({len(missing)} in all)")
        for slot in self._slots.values():
            slot.count.fill_(updates)
        self._updates = updates


def _new_slot(name: str, parameter: Tensor, options: ParameterOptions, allocate: Allocate | None) -> _Slot:
    if not parameter.is_contiguous():
        # torch's fused kernel takes it for contiguous and writes beside it.
        raise ValueError(f"{name}: an optimiser updates contiguous tensors, this one has strides {parameter.stride()}")
    wide = torch.float32 if parameter.dtype in _LOW_PRECISION else parameter.dtype
    # A detached alias: same memory, and in-place updates need no permission from autograd.
    stored = parameter.detach()
    if allocate is None:
        updated = stored.float() if wide != parameter.dtype else stored
        exp_avg, exp_avg_sq = torch.zeros_like(updated), torch.zeros_like(updated)
    else:
        updated = allocate(f"{name}/master", parameter.shape, wide).copy_(stored)
        exp_avg, exp_avg_sq = (allocate(f"{name}/{kind}", parameter.shape, wide) for kind in ("exp_avg", "exp_avg_sq"))
    count = torch.zeros((), dtype=torch.float32, device=updated.device)
    return _Slot(stored, updated, exp_avg, exp_avg_sq, count, options)
