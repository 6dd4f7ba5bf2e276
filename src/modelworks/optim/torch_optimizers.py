"""The family as `torch.optim.Optimizer`s, for anybody's training loop.

    optimizer = Lamb(model.parameters(), lr=2e-3, weight_decay=0.01)

Parameter groups, schedulers, `state_dict` and closures are torch's own; the update is the rule that runs here. A
parameter in bf16 or fp16 gets a float32 master copy in its state. A parameter without a gradient is left as it is, its
state and count too; a sparse gradient is taken for the dense one that it stands for.

Each takes the whole of a tensor: for tensors that are split over ranks, use `modelworks.optim.Optimizer`. Where a rule
has trust ratios, tensors of fewer than two dimensions (norms, biases) take none, unless their group says `trust: True`.
A group of embeddings or of the head says `embedding: True`: 8-bit optimisers keep float32 state for it, Muon updates it
by AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, overload

import torch
from pydantic import ValidationError
from torch import Tensor
from torch.optim import Optimizer as TorchOptimizer
from torch.optim.optimizer import ParamsT

from modelworks.config import OptimizerConfig
from modelworks.config.optimizers import HABITS, OptimizerName
from modelworks.layout import ShardSpec
from modelworks.optim.eight_bit import state_dtype
from modelworks.optim.groups import ParameterOptions
from modelworks.optim.pieces import Piece, Rule, Step
from modelworks.optim.rules import build_rule
from modelworks.optim.sums import Sums

_LOW_PRECISION = (torch.bfloat16, torch.float16)


class _Family(TorchOptimizer):
    """params: as torch takes them; a group may have settings of its own, and `trust`.

    settings: of the optimiser, by the names of `modelworks.config.OptimizerConfig` (lr, betas, eps, weight_decay, ...)
    and with its defaults. Raises TypeError for one that this optimiser does not use, ValueError for one that is not
    valid.
    """

    NAME: ClassVar[OptimizerName]

    def __init__(self, params: ParamsT, **settings: Any) -> None:
        known = {"lr", "weight_decay", *HABITS[self.NAME].uses} - {"no_trust"}
        for key in settings:
            if key not in known:
                raise TypeError(f"{type(self).__name__} has no setting {key!r}; it has {', '.join(sorted(known))}")
        usual = _config(self.NAME, settings)
        defaults = {key: getattr(usual, key) for key in sorted(known)}
        super().__init__(params, {**defaults, "trust": None, "embedding": False})
        for group in self.param_groups:
            _config(self.NAME, group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient. closure: computes loss and gradients again."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            config = _config(self.NAME, group)
            rule = build_rule(config)
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            by_number: dict[int, list[Piece]] = {}
            for parameter in parameters:
                piece = self._piece(parameter, rule, config.weight_decay, group)
                by_number.setdefault(self.state[parameter]["step"], []).append(piece)
            for number, pieces in by_number.items():
                rule.update(pieces, Step(config.lr, number), Sums())
            for parameter in parameters:
                if "master" in self.state[parameter]:
                    parameter.copy_(self.state[parameter]["master"])
        return loss

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would round a master copy to its parameter's dtype: state keeps its own."""
        super().load_state_dict(state_dict)
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for key, parameter in zip(saved, own, strict=True):
            for kind, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][kind] = value.to(parameter.device, copy=True)

    def _piece(self, parameter: Tensor, rule: Rule, weight_decay: float, group: Mapping[str, Any]) -> Piece:
        """The parameter in its next step. Makes its state in the first one."""
        name = f"{id(parameter)}.embedding.weight" if group["embedding"] else str(id(parameter))
        spec = ShardSpec.whole(name, tuple(parameter.shape))
        trust = group["trust"]
        state, states = self.state[parameter], rule.states(spec)
        wide = torch.float32 if parameter.dtype in _LOW_PRECISION else parameter.dtype
        if not state:
            if not parameter.is_contiguous():
                raise ValueError(f"an optimiser updates contiguous tensors, one has strides {parameter.stride()}")
            if wide != parameter.dtype:
                state["master"] = parameter.detach().to(wide)
            for kind, held in states.items():
                state[kind] = torch.zeros(held.local_shape, dtype=state_dtype(kind, wide), device=parameter.device)
            state["step"] = 0
        state["step"] += 1
        gradient = parameter.grad
        assert gradient is not None
        options = ParameterOptions(1.0, weight_decay, parameter.ndim >= 2 if trust is None else trust)
        return Piece(
            spec,
            state.get("master", parameter.detach()),
            (gradient.to_dense() if gradient.is_sparse else gradient).to(wide),
            {kind: state[kind] for kind in states},
            options,
        )


def _config(name: OptimizerName, settings: Mapping[str, Any]) -> OptimizerConfig:
    """Settings, of a group too, checked."""
    values = {key: value for key, value in settings.items() if key in OptimizerConfig.model_fields}
    if isinstance(values.get("lr"), Tensor):
        values["lr"] = float(values["lr"])
    try:
        return OptimizerConfig.model_validate({"name": name, **values})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise ValueError(f"{name}: {key} is {first['input']!r}: {first['msg']}") from None


class Sgd(_Family):
    """With momentum (0.9) or Nesterov's; weight_decay is L2: `modelworks.optim.sgd`."""

    NAME = "sgd"


class Adam(_Family):
    """weight_decay is L2: `modelworks.optim.adam`."""

    NAME = "adam"


class AdamW(_Family):
    """weight_decay is decoupled: `modelworks.optim.adam`."""

    NAME = "adamw"


class Lamb(_Family):
    """Adam with trust ratios: `modelworks.optim.trust`."""

    NAME = "lamb"


class Lars(_Family):
    """SGD with trust ratios: `modelworks.optim.trust`."""

    NAME = "lars"


class Lion(_Family):
    """The sign of a momentum: `modelworks.optim.lion`."""

    NAME = "lion"


class Adafactor(_Family):
    """A second moment of rows and columns: `modelworks.optim.adafactor`."""

    NAME = "adafactor"


class Adam8bit(_Family):
    """Adam with moments in 8 bits: `modelworks.optim.eight_bit`."""

    NAME = "adam8bit"


class AdamW8bit(_Family):
    """AdamW with moments in 8 bits: `modelworks.optim.eight_bit`."""

    NAME = "adamw8bit"


class Lion8bit(_Family):
    """Lion with its momentum in 8 bits: `modelworks.optim.eight_bit`."""

    NAME = "lion8bit"


class Muon(_Family):
    """Orthogonal momentum for matrices, AdamW for the rest: `modelworks.optim.muon`."""

    NAME = "muon"
