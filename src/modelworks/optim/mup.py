"""Rates of µP: by what each parameter's rate is multiplied so that one found at the base width serves a wider model.

A map y = W x / d whose fan-out and fan-in grew by o and i (`modelworks.config.mup.Growth`) shall change by one update
as much as at the base. As updates fit the inputs that made them, that takes, where the update is

    the gradient's               sgd                                      o d^2 / i        Yang et al. 2022, table 8
    elementwise of size 1        adam, adamw, lion, 8 bits, adafactor     d / i            the same, Adam
    orthogonal, times s(W)       muon, of matrices                        d sqrt(o / i) s(base) / s(W)
                                                                          Yang, Simon, Bernstein 2023; Muon's rest: Adam

Weight decay is divided by the same number. All of these optimisers multiply it by the rate, and what the product is
against 1 says over how many steps a weight forgets: it stays as at the base at every width (Wang & Aitchison 2024,
2405.13698). `lr_multiplier` of the user's own groups multiplies both, as it does without µP.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from modelworks.config import ModelConfig, OptimizerConfig, parameter_shapes
from modelworks.config.mup import Growth, growth
from modelworks.optim.groups import ParameterOptions
from modelworks.optim.orthogonal import is_matrix, update_scale


@dataclass(frozen=True)
class MupGroup:
    """Parameters that µP treats alike. kinds: last parts of their names. rate, init: times those of the base; weight
    decay is divided by `rate`. divisor: of the map's output."""

    kinds: tuple[str, ...]
    parameters: int
    growth: Growth
    rate: float

    @property
    def init(self) -> float:
        return self.growth.init


def scaled_options(
    options: Mapping[str, ParameterOptions],
    shapes: Mapping[str, Sequence[int]],
    config: OptimizerConfig,
    model: ModelConfig | None,
) -> dict[str, ParameterOptions]:
    """The options with the rates of µP; as they are where the model has no base. shapes: of whole tensors."""
    if model is None or model.mup_base_width is None:
        return dict(options)
    scaled = {}
    for name, own in options.items():
        rate = mup_rate(config, growth(model, name), name, shapes[name])
        scaled[name] = replace(own, lr_multiplier=own.lr_multiplier * rate, weight_decay=own.weight_decay / rate)
    return scaled


def mup_rate(config: OptimizerConfig, grown: Growth, name: str, shape: Sequence[int]) -> float:
    """Times the base's rate. Exactly 1 where nothing grew. Raises ValueError for an optimiser without such a rule."""
    match config.name:
        case "sgd":
            return grown.fan_out * grown.divisor**2 / grown.fan_in
        case "muon" if is_matrix(name, shape):
            *_, rows, columns = shape
            base = (rows / grown.fan_out, columns / grown.fan_in)
            scale = update_scale(base, config.update_scale) / update_scale((rows, columns), config.update_scale)
            return grown.divisor * math.sqrt(grown.fan_out / grown.fan_in) * scale
        case "adam" | "adamw" | "adam8bit" | "adamw8bit" | "lion" | "lion8bit" | "adafactor" | "muon":
            return grown.divisor / grown.fan_in
    raise ValueError(f"µP has no rates for {config.name}")


def mup_groups(config: OptimizerConfig, model: ModelConfig) -> list[MupGroup]:
    """What µP does to each kind of parameter of a model with a base, in the order of the model."""
    found: dict[tuple[Growth, float], dict[str, int]] = {}
    for name, shape in parameter_shapes(model).items():
        grown = growth(model, name)
        kinds = found.setdefault((grown, mup_rate(config, grown, name, shape)), {})
        kind = _kind(name)
        kinds[kind] = kinds.get(kind, 0) + math.prod(shape)
    return [MupGroup(tuple(kinds), sum(kinds.values()), grown, rate) for (grown, rate), kinds in found.items()]


def _kind(name: str) -> str:
    module, _, kind = name.rpartition(".")
    last = module.rpartition(".")[-1]
    if last.endswith("norm"):
        return "norms" if last not in ("q_norm", "k_norm") else "q_norm, k_norm"
    return "biases" if kind == "bias" else last
