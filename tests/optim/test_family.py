"""Each optimiser against torch's, or against its published formula written out here, over 50 steps in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from modelworks.config import OptimizerConfig
from modelworks.optim import build_optimizer, pieces

SHAPES = {"blocks.0.up.weight": (7, 5), "blocks.0.experts.weight": (3, 4, 6), "blocks.0.norm.weight": (5,),
          "blocks.0.zero.weight": (2, 3)}  # fmt: skip
DECAY = 0.3


def start(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {n: torch.randn(shape, generator=generator, dtype=torch.float64) for n, shape in SHAPES.items()}
    made["blocks.0.zero.weight"].zero_()
    return {name: tensor.to(dtype).requires_grad_() for name, tensor in made.items()}


def gradients_at(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    scale = 10.0 ** math.sin(step)
    return {n: scale * torch.randn(shape, generator=generator, dtype=torch.float64) for n, shape in SHAPES.items()}


def rate_at(step: int) -> float:
    return 0.01 * (1.2 + math.sin(step))


def followed(config: OptimizerConfig, steps: int = 50, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    parameters = start(dtype)
    optimizer = build_optimizer(parameters.items(), config)
    for step in range(steps):
        optimizer.step({n: g.to(dtype) for n, g in gradients_at(step).items()}, rate_at(step))
    return {name: tensor.detach() for name, tensor in parameters.items()}


def by_torch(make: Callable[[list[Any]], torch.optim.Optimizer]) -> dict[str, Tensor]:
    parameters = start()
    decays = {name: 0.0 if "norm" in name else DECAY for name in SHAPES}
    optimizer = make([{"params": [tensor], "weight_decay": decays[name]} for name, tensor in parameters.items()])
    for step in range(50):
        for name, gradient in gradients_at(step).items():
            parameters[name].grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step)
        optimizer.step()
    return {name: tensor.detach() for name, tensor in parameters.items()}


def lamb(p: Tensor, state: dict[str, Tensor], g: Tensor, t: int, lr: float, decay: float, adapts: bool) -> Tensor:
    """Algorithm 2 of 1904.00962, phi the identity."""
    state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + 0.1 * g
    state["v"] = 0.99 * state.get("v", torch.zeros_like(p)) + 0.01 * g**2
    u = (state["m"] / (1 - 0.9**t)) / ((state["v"] / (1 - 0.99**t)).sqrt() + 1e-6) + decay * p
    ratio = p.norm() / u.norm() if adapts and p.norm() > 0 else 1.0
    return p - lr * ratio * u


def clamped_lamb(
    p: Tensor, state: dict[str, Tensor], g: Tensor, t: int, lr: float, decay: float, adapts: bool
) -> Tensor:
    scaled = p - lamb(p, state, g, t, 1.0, decay, adapts=False)  # u
    return p - lr * (float(p.norm().clamp(1.0, 2.0) / scaled.norm()) if adapts else 1.0) * scaled


def lars(p: Tensor, state: dict[str, Tensor], g: Tensor, t: int, lr: float, decay: float, adapts: bool) -> Tensor:
    """Algorithm 1 of 1708.03888."""
    ratio = 0.02 * p.norm() / (g.norm() + decay * p.norm() + 1e-8) if adapts and p.norm() > 0 else 1.0
    state["b"] = 0.9 * state.get("b", torch.zeros_like(p)) + lr * ratio * (g + decay * p)
    return p - state["b"]


def lion(p: Tensor, state: dict[str, Tensor], g: Tensor, t: int, lr: float, decay: float, adapts: bool) -> Tensor:
    """Algorithm 2 of 2302.06675."""
    m = state.get("m", torch.zeros_like(p))
    state["m"] = 0.99 * m + 0.01 * g
    return p - lr * ((0.9 * m + 0.1 * g).sign() + decay * p)


def adafactor_with_moment(
    p: Tensor, state: dict[str, Tensor], g: Tensor, t: int, lr: float, decay: float, adapts: bool
) -> Tensor:
    """Algorithms 4 and 5 of 1804.04235, with a fixed rate, clipping at 0.5 and a first moment (section 7.2)."""
    squares, rest = g**2 + 1e-30, 1 - t**-0.7
    if p.ndim >= 2:
        state["r"] = rest * state.get("r", 0.0) + (1 - rest) * squares.mean(-1)
        state["c"] = rest * state.get("c", 0.0) + (1 - rest) * squares.mean(-2)
        r = state["r"]
        v = r[..., :, None] * state["c"][..., None, :] / r.mean(-1)[..., None, None]
    else:
        v = state["v"] = rest * state.get("v", 0.0) + (1 - rest) * squares
    u = g / v.sqrt()
    u = u / max(1.0, float(u.square().mean().sqrt()) / 0.5)
    state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + 0.1 * lr * u
    return p * (1 - lr * decay) - state["m"]


Formula = Callable[[Tensor, dict[str, Tensor], Tensor, int, float, float, bool], Tensor]


def by_formula(formula: Formula) -> dict[str, Tensor]:
    values = {name: tensor.detach().clone() for name, tensor in start().items()}
    states: dict[str, dict[str, Tensor]] = {name: {} for name in SHAPES}
    for step in range(50):
        for name, gradient in gradients_at(step).items():
            plain = "norm" in name
            decay = 0.0 if plain else DECAY
            values[name] = formula(values[name], states[name], gradient, step + 1, rate_at(step), decay, not plain)
    return values


# Settings of ours, and the reference.
TORCH: dict[str, tuple[dict[str, Any], Callable[[list[Any]], torch.optim.Optimizer]]] = {
    "sgd": ({}, lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=0.9)),
    "nesterov": ({"nesterov": True}, lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=0.9, nesterov=True)),
    "plain sgd": ({"momentum": 0.0}, lambda groups: torch.optim.SGD(groups, lr=1.0)),
    "adam": ({"betas": (0.8, 0.99)}, lambda groups: torch.optim.Adam(groups, betas=(0.8, 0.99))),
    "adamw": ({"betas": (0.8, 0.99)}, lambda groups: torch.optim.AdamW(groups, betas=(0.8, 0.99))),
    "adafactor": ({}, lambda groups: torch.optim.Adafactor(groups, eps=(1e-30, 1e-3))),
}
PLAIN_RATE = {"relative_step": False, "scale_parameter": False}
FORMULAS: dict[str, tuple[dict[str, Any], Formula]] = {
    "lamb": ({"betas": (0.9, 0.99)}, lamb),
    "clamped lamb": ({"betas": (0.9, 0.99), "trust_clamp": (1.0, 2.0)}, clamped_lamb),
    "lars": ({"trust_coefficient": 0.02}, lars),
    "lion": ({}, lion),
    "adafactor with a moment": (
        {"first_moment": 0.9, "update_clip": 0.5, "decay_exponent": 0.7, **PLAIN_RATE},
        adafactor_with_moment,
    ),
}
NAMES = {"nesterov": "sgd", "plain sgd": "sgd", "clamped lamb": "lamb", "adafactor with a moment": "adafactor"}


def config_of(case: str) -> OptimizerConfig:
    settings = TORCH[case][0] if case in TORCH else FORMULAS[case][0]
    return OptimizerConfig(name=NAMES.get(case, case), weight_decay=DECAY, **settings)


@pytest.mark.parametrize("case", [*TORCH, *FORMULAS])
def test_fifty_steps_equal_the_reference(case: str) -> None:
    expected = by_torch(TORCH[case][1]) if case in TORCH else by_formula(FORMULAS[case][1])
    found = followed(config_of(case))
    for name in SHAPES:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", [*TORCH, *FORMULAS])
def test_batches_of_any_size_give_the_same_update(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = followed(config_of(case), steps=5)
    monkeypatch.setattr(pieces, "_CACHED", 8 * 4)  # tensors are cut every few elements, and share batches
    cut = followed(config_of(case), steps=5)
    for name in SHAPES:
        torch.testing.assert_close(cut[name], whole[name], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("case", [*TORCH, *FORMULAS])
def test_low_precision_weights_follow_a_float32_master(case: str) -> None:
    parameters = start(torch.bfloat16)
    wide = {name: tensor.detach().float().requires_grad_() for name, tensor in parameters.items()}
    optimizer, reference = (build_optimizer(each.items(), config_of(case)) for each in (parameters, wide))
    for step in range(3):
        gradients = {name: gradient.float() for name, gradient in gradients_at(step).items()}
        optimizer.step(gradients, 1e-3)
        reference.step(gradients, 1e-3)
    masters = dict(optimizer.named_state())
    for name in SHAPES:
        assert torch.equal(masters[f"{name}/master"], wide[name])
        assert torch.equal(parameters[name], wide[name].bfloat16())
