"""Every optimiser of the family passes the conformance suite, and what is wrong with a faulty one is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_family import adafactor_with_moment, lamb, lars, lion
from torch import Tensor

from modelworks.config import OptimizerConfig
from modelworks.optim import torch_optimizers as family
from modelworks.optim.codec import dynamic_map
from modelworks.optim.conformance import NotConforming, check_optimizer
from modelworks.optim.sums import Sums

Formula = Callable[..., Tensor]


class Written:
    """A formula of one tensor, as an optimiser: what the suite compares with."""

    def __init__(self, formula: Formula, parameters: list[Tensor], lr: float, weight_decay: float) -> None:
        self._formula, self._parameters, self._lr, self._decay = formula, parameters, lr, weight_decay
        self._states: list[dict[str, Tensor]] = [{} for _ in parameters]
        self._updates = 0

    @torch.no_grad()
    def step(self) -> None:
        self._updates += 1
        for p, state in zip(self._parameters, self._states, strict=True):
            p.copy_(self._formula(p, state, p.grad, self._updates, self._lr, self._decay, p.ndim >= 2))


def written(formula: Formula) -> Callable[..., Written]:
    return lambda parameters, lr, weight_decay, **_: Written(formula, parameters, lr, weight_decay)


def in_8_bits(values: Tensor, signed: bool) -> Tensor:
    """Every element as the nearest of the 256 multiples of its block's largest magnitude. For the suite's one large
    shape, (64, 80): 20 blocks, and squares of 16 leave none of them partly empty."""
    if values.numel() < 4096:
        return values
    blocks = values.float().view(4, 16, 5, 16).permute(0, 2, 1, 3)
    largest = blocks.abs().amax((2, 3), keepdim=True)
    table = dynamic_map(signed)
    between = (table[1:].double() + table[:-1].double()).div(2).float()
    nearest = table[torch.bucketize((blocks * (1.0 / largest)).contiguous(), between)]
    return (nearest * largest).permute(0, 2, 1, 3).reshape(64, 80).double()


def adamw8bit(p: Tensor, state: dict[str, Tensor], g: Tensor, t: int, lr: float, decay: float, adapts: bool) -> Tensor:
    m = 0.9 * state.get("m", torch.zeros_like(p)) + 0.1 * g
    v = 0.95 * state.get("v", torch.zeros_like(p)) + 0.05 * g**2
    state["m"], state["v"] = in_8_bits(m, True), in_8_bits(v, False)
    return p * (1 - lr * decay) - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)


def adam8bit(p: Tensor, state: dict[str, Tensor], g: Tensor, t: int, lr: float, decay: float, adapts: bool) -> Tensor:
    return adamw8bit(p, state, g + decay * p, t, lr, 0.0, adapts)


def lion8bit(p: Tensor, state: dict[str, Tensor], g: Tensor, t: int, lr: float, decay: float, adapts: bool) -> Tensor:
    found = lion(p, state, g, t, lr, decay, adapts)
    state["m"] = in_8_bits(state["m"], True)
    return found


def muon(p: Tensor, state: dict[str, Tensor], g: Tensor, t: int, lr: float, decay: float, adapts: bool) -> Tensor:
    """With singular values instead of matrix products: each step of Newton-Schulz is a polynomial of these alone."""
    if p.ndim < 2:
        m = state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + 0.1 * g
        v = state["v"] = 0.95 * state.get("v", torch.zeros_like(p)) + 0.05 * g**2
        return p * (1 - lr * decay) - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
    b = state["b"] = 0.95 * state.get("b", torch.zeros_like(p)) + 0.05 * g
    left, s, right = torch.linalg.svd(0.95 * b + 0.05 * g, full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return p * (1 - lr * decay) - lr * 0.2 * max(p.shape) ** 0.5 * (left * s) @ right


def torch_adafactor(parameters: list[Tensor], lr: float, weight_decay: float) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=lr, weight_decay=weight_decay, eps=(1e-30, 1e-3))


def first_moment(p: Tensor, state: dict[str, Tensor], g: Tensor, t: int, lr: float, decay: float, a: bool) -> Tensor:
    return adafactor_with_moment(p, state, g, t, lr, decay, a)


USUAL = {"lr": 0.01, "weight_decay": 0.1}
CASES: dict[str, tuple[type[torch.optim.Optimizer], Callable[..., Any], dict[str, Any]]] = {
    "sgd": (family.Sgd, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (family.Adam, torch.optim.Adam, {"betas": (0.8, 0.99), "eps": 1e-6}),
    "adamw": (family.AdamW, torch.optim.AdamW, {"betas": (0.8, 0.99), "eps": 1e-6}),
    "lamb": (family.Lamb, written(lamb), {"betas": (0.9, 0.99)}),
    "lars": (family.Lars, written(lars), {"trust_coefficient": 0.02}),
    "lion": (family.Lion, written(lion), {}),
    "adafactor": (family.Adafactor, torch_adafactor, {}),
    "adafactor with a moment": (
        family.Adafactor,
        written(first_moment),
        {"first_moment": 0.9, "update_clip": 0.5, "decay_exponent": 0.7, "relative_step": False,
         "scale_parameter": False},
    ),
    "adam8bit": (family.Adam8bit, written(adam8bit), {"betas": (0.9, 0.95)}),
    "adamw8bit": (family.AdamW8bit, written(adamw8bit), {}),
    "lion8bit": (family.Lion8bit, written(lion8bit), {}),
    "muon": (family.Muon, written(muon), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_family_conforms(case: str) -> None:
    cls, reference, more = CASES[case]
    settings = {**USUAL, **more}
    config = OptimizerConfig(name=cls.NAME, **settings)  # type: ignore[attr-defined]
    check_optimizer(cls, reference=reference, settings=settings, config=config)


def test_torchs_own_conforms_but_for_what_it_does_not_do() -> None:
    with pytest.raises(NotConforming) as failed:
        check_optimizer(torch.optim.AdamW, reference=torch.optim.AdamW, settings=USUAL)
    lines = str(failed.value).splitlines()
    assert lines[0] == "AdamW does not conform:"
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["keeps_a_master_of_bf16"]


class Forgets(torch.optim.AdamW):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "state": {}}


class OneRate(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = self.param_groups[0]["lr"]
        return super().step(closure)


class Explodes(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None and parameter.grad.abs().max() > 1e20:
                parameter.data.fill_(float("nan"))


class Drifts(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(1e-3)


class SaysNothingOfSparse(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in self.param_groups[0]["params"]):
            raise RuntimeError("layout 1 is not supported")
        return super().step(closure)


class SpoilsSparse(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense() * 0
        return super().step(closure)


class Entangled(torch.optim.SGD):
    """Each tensor's step depends on how many others there are."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad = parameter.grad / len(self.param_groups[0]["params"])
        return super().step(closure)


class ForeachDiffers(torch.optim.SGD):
    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0, foreach: bool = False) -> None:
        super().__init__(params, lr=lr * (1.001 if foreach else 1.0), weight_decay=weight_decay)


@pytest.mark.parametrize(
    ("cls", "reference", "said"),
    [
        (SaysNothingOfSparse, torch.optim.AdamW, "refused a sparse gradient without saying so: layout 1 is not"),
        (SpoilsSparse, torch.optim.AdamW, "a sparse gradient is not as the dense one that it stands for"),
        (Entangled, torch.optim.SGD, "all tensors in one optimiser differ from one optimiser for each"),
        (ForeachDiffers, torch.optim.SGD, "foreach=True differs from foreach=False"),
        (Forgets, torch.optim.AdamW, "resumes_from_its_state_dict: three steps after loading its own state_dict"),
        (OneRate, torch.optim.AdamW, "takes_options_by_group: a group with {'lr': 0.005"),
        (Explodes, torch.optim.SGD, "240 of 240 weights are not finite after gradients of about 1e+30"),
        (Drifts, torch.optim.SGD, "leaves_alone_what_has_no_gradient: a parameter without a gradient moved"),
        (Drifts, torch.optim.SGD, "equals_the_reference: after step 1 of 50 they differ from the reference: by 0.001"),
        (Drifts, torch.optim.SGD, "stands_still_without_gradient_or_decay: gradients of 0 moved parameters"),
    ],
)
def test_what_is_wrong_is_said(cls: Any, reference: Any, said: str) -> None:
    with pytest.raises(NotConforming) as failed:
        check_optimizer(cls, reference=reference, settings=USUAL)
    assert said in str(failed.value)


def test_norms_of_a_shard_instead_of_the_tensor_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sums, "total", lambda self, own, length: dict(own))
    config = OptimizerConfig(name="lamb", betas=(0.9, 0.99), **USUAL)  # type: ignore[arg-type]
    with pytest.raises(NotConforming) as failed:
        check_optimizer(
            family.Lamb, reference=written(lamb), settings={**USUAL, "betas": (0.9, 0.99)}, config=config
        )  # fmt: skip
    [line] = str(failed.value).splitlines()[1:]
    assert "resumes_on_other_shards" in line
    assert "differs: by " in line
