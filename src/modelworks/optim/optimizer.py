"""`Optimizer`: the parameters of a run, their state, and a rule that updates them.

What differs between optimisers is a `Rule` (`modelworks.optim.pieces`); what they share is here. State is kept by full
parameter name and is at least float32. A parameter stored in bf16 or fp16 gets a float32 *master* copy, which is what
the update changes; the stored parameter is its rounding. Without it an update smaller than half a unit in the last
place (2^-9 of the weight in bf16) would be lost, and most updates are.

A state is a logical tensor of its own (`Rule.states`), of its parameter's shape or another, and a rank holds the slice
that goes with its slice of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from modelworks.config import ModelConfig, OptimizerConfig
from modelworks.layout import ShardSpec
from modelworks.optim.eight_bit import state_dtype
from modelworks.optim.groups import ParameterOptions, parameter_options
from modelworks.optim.mup import scaled_options
from modelworks.optim.pieces import Piece, Rule, Step
from modelworks.optim.rules import build_rule
from modelworks.optim.sums import Split, Sums

_LOW_PRECISION = (torch.bfloat16, torch.float16)


# (full state name, shape, dtype) -> zeros where the state is to live
Allocate = Callable[[str, torch.Size, torch.dtype], Tensor]


def build_optimizer(
    named_parameters: Iterable[tuple[str, Tensor]],
    config: OptimizerConfig,
    *,
    model: ModelConfig | None = None,
    split: Split | None = None,
    allocate: Allocate | None = None,
) -> Optimizer:
    """The optimiser that `config.name` names, over the parameters that require a gradient.

    model: whose parameters they are, for the rates of µP; None for those of a model without a base.
    split: where `named_parameters` are those of one rank; None where they are the whole model.
    allocate: makes the state elsewhere (host memory, files); every parameter then has a master copy there too.
    Raises UserError for a pattern that matches no parameter of the model.
    """
    return Optimizer(named_parameters, config, build_rule(config), model=model, split=split, allocate=allocate)


@dataclass(frozen=True)
class _Slot:
    """One parameter. `updated` is the tensor that the update changes: the master copy if there is one."""

    spec: ShardSpec
    parameter: Tensor
    updated: Tensor
    state: dict[str, Tensor]
    options: ParameterOptions


class Optimizer:
    """named_parameters: (full name, tensor); tensors that need no gradient are left alone."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        config: OptimizerConfig,
        rule: Rule,
        *,
        model: ModelConfig | None = None,
        split: Split | None = None,
        allocate: Allocate | None = None,
    ) -> None:
        parameters = {name: tensor for name, tensor in named_parameters if tensor.requires_grad}
        shapes = split.shapes if split else {name: tuple(tensor.shape) for name, tensor in parameters.items()}
        options = scaled_options(parameter_options(shapes, config), shapes, config, model)
        specs = split.specs if split else {name: ShardSpec.whole(name, shape) for name, shape in shapes.items()}
        self.config, self.rule = config, rule
        self._sums = Sums(split)
        self._slots = {
            name: _new_slot(specs[name], tensor, rule, options[name], allocate) for name, tensor in parameters.items()
        }
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
        """One update with rate `lr`. gradients: one for every parameter, of its shape. All ranks call it together.

        Raises KeyError for a missing gradient: a parameter outside the graph should not require one.
        """
        pieces = [
            Piece(
                slot.spec,
                slot.updated,
                gradients[name].to(slot.updated.device, slot.updated.dtype),
                slot.state,
                slot.options,
            )
            for name, slot in self._slots.items()
        ]
        self.rule.update(pieces, Step(lr, self._updates + 1), self._sums)
        for slot in self._slots.values():
            if slot.updated is not slot.parameter:
                slot.parameter.copy_(slot.updated)
        self._updates += 1

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """Everything to save besides `updates`: (`<parameter>/<state>`, tensor), slices as `state_specs` says."""
        for name, slot in self._slots.items():
            for kind, tensor in slot.state.items():
                yield f"{name}/{kind}", tensor
            if slot.updated is not slot.parameter:
                yield f"{name}/master", slot.updated

    def state_specs(self, specs: Mapping[str, ShardSpec]) -> dict[str, ShardSpec]:
        """What a rank that holds these slices of parameters holds of their state: `<parameter>/<state>` -> spec. Also
        of a master copy, whether this run keeps one or not."""
        found = {}
        for name, spec in specs.items():
            for kind, state in {**self.rule.states(spec), "master": spec}.items():
                found[f"{name}/{kind}"] = ShardSpec(f"{name}/{kind}", state.shape, state.bounds, state.counted)
        return found

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
        self._updates = updates


def _new_slot(
    spec: ShardSpec, parameter: Tensor, rule: Rule, options: ParameterOptions, allocate: Allocate | None
) -> _Slot:
    if not parameter.is_contiguous():
        # torch's fused kernels take it for contiguous and write beside it.
        raise ValueError(
            f"{spec.name}: an optimiser updates contiguous tensors, this one has strides {parameter.stride()}"
        )
    wide = torch.float32 if parameter.dtype in _LOW_PRECISION else parameter.dtype
    # A detached alias: same memory, and in-place updates need no permission from autograd.
    stored = parameter.detach()
    if allocate is None:
        updated = stored.float() if wide != parameter.dtype else stored

        def allocate(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=parameter.device)

    else:
        updated = allocate(f"{spec.name}/master", parameter.shape, wide).copy_(stored)
    state = {
        kind: allocate(f"{spec.name}/{kind}", torch.Size(held.local_shape), state_dtype(kind, wide))
        for kind, held in rule.states(spec).items()
    }
    return _Slot(spec, stored, updated, state, options)
