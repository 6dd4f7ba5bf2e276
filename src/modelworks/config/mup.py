"""Maximal update parametrisation (µP): how each parameter's linear map grew from a base model. No torch.

The idea (Yang et al. 2022, 2203.03466): choose initial values, rates and multipliers by width so that at every width
activations, and what one update changes of them, keep their size. A learning rate found at the base width then serves
wider models. Everything follows from the factors by which a map's fan-in and fan-out grew and from what its output is
divided by (Yang, Simon, Bernstein 2023, 2310.17813: a matrix and its update have a spectral norm of about
sqrt(fan_out / fan_in)); which optimiser takes which rate is for `modelworks.optim.mup`.

The base has this model's depth and is `mup_base_width` wide; feed-forwards and heads shrink with it in proportion.
Heads have `mup_base_head_dim` channels there (default: as here, so there are fewer of them), and key heads shrink as
query heads do unless `mup_base_kv_heads` says how many there are. Invariant: where nothing grew, every factor is
exactly 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from modelworks.config.errors import Problem

if TYPE_CHECKING:
    from modelworks.config.model import ModelConfig
    from modelworks.config.run import OptimizerConfig


@dataclass(frozen=True)
class Growth:
    """Of the linear map y = W x / divisor, or of a vector (a map from one number): factors against the base, 1 for what
    does not grow with width (a vocabulary, a number of experts)."""

    fan_out: float = 1.0
    fan_in: float = 1.0
    divisor: float = 1.0

    @property
    def init(self) -> float:
        """Times the base's standard deviation: 1 / sqrt(fan_in), less where the output is narrower than the input."""
        return self.divisor / self.fan_in * math.sqrt(min(self.fan_in, self.fan_out))


def growth(model: ModelConfig, name: str) -> Growth:
    """Of the parameter `name`; nothing grew where the model has no base."""
    if model.mup_base_width is None:
        return Growth()
    width = width_growth(model)
    module, kind = name.rsplit(".", 1)
    last = module.rsplit(".", 1)[-1]
    if last in ("embedding", "position_embedding"):  # one row is looked up: a map from one number
        return Growth(fan_out=width)
    if last in ("head", "router"):
        return Growth(fan_in=width, divisor=width)
    if last in ("q_norm", "k_norm"):
        return Growth(fan_out=_head_growth(model))
    fan_out = _kv_growth(model) if last in ("k", "v") else width
    vector = kind == "bias" or last.endswith("norm")
    return Growth(fan_out) if vector else Growth(fan_out, width)


def width_growth(model: ModelConfig) -> float:
    """d_model against the base's. The logits, of the vocabulary and of routers, are divided by it."""
    return model.d_model / (model.mup_base_width or model.d_model)


def query_multiplier(model: ModelConfig) -> float:
    """By what queries are multiplied before 1 / sqrt(head_dim): with it, scores are scaled by 1 / head_dim, times what
    makes this the usual scale at the base (keys and queries grow alike once trained, so sums of products do not grow
    as their root)."""
    return 1.0 / math.sqrt(_head_growth(model))


def mup_problems(model: ModelConfig) -> Iterator[Problem]:
    """Where the base cannot be a narrower model of the same kind."""
    width = model.mup_base_width
    if width is None:
        return
    if width > model.d_model:
        expected = f"at most d_model ({model.d_model}): the base is the narrow model that rates were found with"
        yield Problem("mup_base_width", width, expected)
        return
    head_dim = model.mup_base_head_dim or model.head_dim
    shrunk = Fraction(width, model.d_model) * Fraction(model.head_dim, head_dim)
    n_heads, n_kv_heads = model.n_heads * shrunk, model.mup_base_kv_heads or model.n_kv_heads * shrunk
    described = f"the base, {width} of {model.d_model} wide with heads of {head_dim} channels,"
    if n_heads.denominator != 1:
        expected = f"a width, or another mup_base_head_dim, with whole heads: {described} would have {_text(n_heads)}"
        yield Problem("mup_base_width", width, expected)
    elif n_kv_heads.denominator != 1 or n_heads % n_kv_heads:
        expected = (
            f"a divisor of {n_heads}: {described} has {n_heads} heads, and would have {_text(Fraction(n_kv_heads))} "
            "key-value heads"
        )
        yield Problem("mup_base_kv_heads", model.mup_base_kv_heads, expected)


def mup_optimizer_problems(optimizer: OptimizerConfig) -> Iterator[Problem]:
    """Settings of an optimiser whose updates no multiplier of ours keeps at their size. For models with a base."""
    because = "model.mup_base_width is set"
    if optimizer.name in ("lamb", "lars"):
        expected = (
            f"an optimiser that µP's rates are known for, as {because}: a trust ratio makes a rate relative to each "
            "weight's norm, which µP lets grow with width (adamw, lion, muon, sgd, ...)"
        )
        yield Problem("optimizer.name", optimizer.name, expected)
    if optimizer.name == "adafactor":
        for key in ("relative_step", "scale_parameter"):
            if getattr(optimizer, key):
                expected = f"false, as {because}: with it the update's size is no longer its rate's"
                yield Problem(f"optimizer.{key}", True, expected)
    decays = optimizer.weight_decay or any(group.weight_decay for group in optimizer.groups)
    if optimizer.name in ("adam", "adam8bit") and decays:
        expected = (
            f"0, as {because}: Adam divides decay that goes through the gradient by the gradient's size, which changes "
            f"with width ({optimizer.name.replace('adam', 'adamw')} decays the weights themselves)"
        )
        yield Problem("optimizer.weight_decay", optimizer.weight_decay, expected)


def _head_growth(model: ModelConfig) -> float:
    base = model.mup_base_head_dim if model.mup_base_width else None
    return model.head_dim / (base or model.head_dim)


def _kv_growth(model: ModelConfig) -> float:
    """Of the concatenated key (or value) heads."""
    if model.mup_base_kv_heads is None:
        return width_growth(model)
    return model.n_kv_heads / model.mup_base_kv_heads * _head_growth(model)


def _text(number: Fraction) -> str:
    return str(number) if number.denominator == 1 else f"{float(number):.4g}"
