"""AdamW against torch.optim.AdamW, and its state across save and load."""

import math

import pytest
import torch

from modelworks.config import OptimizerConfig, ParameterGroup, UserError
from modelworks.optim import build_optimizer, parameter_options

NAMES = {
    "embedding.weight": (11, 4),
    "blocks.0.attention_norm.weight": (4,),
    "blocks.0.attention.q.weight": (4, 4),
    "blocks.0.feed_forward.up.bias": (7,),
    "blocks.0.feed_forward.up.weight": (7, 4),
    "head.weight": (11, 4),
}
CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.3, groups=[ParameterGroup(pattern="head.*", lr_multiplier=0.5)])


def make_parameters(dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for name, shape in NAMES.items()
    }


def gradients_at(step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in NAMES.items()
    }


def torch_reference(parameters: dict[str, torch.Tensor]) -> torch.optim.AdamW:
    def decays(name: str) -> bool:
        return not (name.endswith(("norm.weight", ".bias")) or "embedding" in name)

    groups = [
        {
            "params": [parameters[name]],
            "weight_decay": 0.3 if decays(name) else 0.0,
            "multiplier": 0.5 if name == "head.weight" else 1.0,
        }
        for name in parameters
    ]
    return torch.optim.AdamW(groups, betas=CONFIG.betas, eps=CONFIG.eps, foreach=False, fused=False)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 2e-6)])
def test_fifty_steps_equal_torch(dtype: torch.dtype, tolerance: float) -> None:
    ours, theirs = make_parameters(dtype), make_parameters(dtype)
    optimizer, reference = build_optimizer(ours.items(), CONFIG), torch_reference(theirs)
    for step in range(50):
        rate = 1e-2 * (1 + math.sin(step))
        gradients = gradients_at(step, dtype)
        optimizer.step(gradients, rate)
        for group in reference.param_groups:
            group["lr"] = rate * group["multiplier"]
        for name, parameter in theirs.items():
            parameter.grad = gradients[name].clone()
        reference.step()
    for name in NAMES:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=tolerance)
    assert optimizer.updates == 50


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_follow_a_float32_master(dtype: torch.dtype) -> None:
    """The stored parameter is the rounding of what a float32 run from the same start would hold."""
    low = make_parameters(dtype)
    full = {name: tensor.detach().float().requires_grad_() for name, tensor in low.items()}
    config = OptimizerConfig(lr=1e-5)
    optimizer, reference = build_optimizer(low.items(), config), build_optimizer(full.items(), config)
    start = {name: tensor.detach().clone() for name, tensor in low.items()}
    for step in range(200):
        gradients = {name: torch.ones(shape, dtype=dtype) for name, shape in NAMES.items()}
        optimizer.step(gradients, 1e-5)
        reference.step({name: gradient.float() for name, gradient in gradients.items()}, 1e-5)
        if step == 0 and dtype is torch.bfloat16:
            # One update is below bf16's resolution for weights of order 1; only the master sees it.
            assert torch.equal(
                low["head.weight"][start["head.weight"].abs() > 0.5],
                start["head.weight"][start["head.weight"].abs() > 0.5],
            )
    state = dict(optimizer.named_state())
    for name in NAMES:
        assert torch.equal(low[name], full[name].to(dtype))
        assert torch.equal(state[f"{name}/master"], full[name])
        assert state[f"{name}/exp_avg"].dtype == torch.float32
    assert not torch.equal(low["head.weight"], start["head.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_state_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    parameters = make_parameters(dtype)
    optimizer = build_optimizer(parameters.items(), CONFIG)
    for step in range(5):
        optimizer.step(gradients_at(step, dtype), 1e-2)
    saved = {name: tensor.clone() for name, tensor in optimizer.named_state()}
    copies = {name: tensor.detach().clone().requires_grad_() for name, tensor in parameters.items()}
    restored = build_optimizer(copies.items(), CONFIG)
    restored.load_state(saved.items(), updates=5)
    for step in range(5, 10):
        optimizer.step(gradients_at(step, dtype), 1e-2)
        restored.step(gradients_at(step, dtype), 1e-2)
    for name in NAMES:
        assert torch.equal(parameters[name], copies[name])


def test_load_refuses_what_does_not_fit() -> None:
    parameters = make_parameters(torch.float32)
    optimizer = build_optimizer(parameters.items(), CONFIG)
    state = {name: tensor.clone() for name, tensor in optimizer.named_state()}
    with pytest.raises(ValueError, match="belongs to no parameter"):
        optimizer.load_state([*state.items(), ("stranger.weight/exp_avg", torch.zeros(2))], 0)
    with pytest.raises(ValueError, match=r"missing .*head.weight/exp_avg_sq"):
        optimizer.load_state([item for item in state.items() if item[0] != "head.weight/exp_avg_sq"], 0)
    with pytest.raises(ValueError, match="shape"):
        optimizer.load_state([("head.weight/exp_avg", torch.zeros(2))], 0)


def test_decay_is_off_for_norms_biases_and_embeddings() -> None:
    options = parameter_options(NAMES, CONFIG)
    assert {name for name, option in options.items() if option.weight_decay == 0.0} == {
        "embedding.weight",
        "blocks.0.attention_norm.weight",
        "blocks.0.feed_forward.up.bias",
    }
    assert options["head.weight"].lr_multiplier == 0.5


def test_a_group_overrides_the_decay_rule_and_later_groups_win() -> None:
    groups = [
        ParameterGroup(pattern="*embedding*", weight_decay=0.7),
        ParameterGroup(pattern="embedding.weight", lr_multiplier=3.0),
        ParameterGroup(pattern="emb*", lr_multiplier=4.0),
    ]
    option = parameter_options(NAMES, OptimizerConfig(groups=groups))["embedding.weight"]
    assert (option.weight_decay, option.lr_multiplier) == (0.7, 4.0)


def test_default_patterns_may_match_nothing_but_written_ones_may_not() -> None:
    names = ["blocks.0.attention.q.weight", "blocks.1.attention.q.weight"]
    assert set(parameter_options(names, OptimizerConfig())) == set(names)
    with pytest.raises(
        UserError,
        match=r"optimizer\.groups\.0\.pattern: `blocks\.\*\.atention\.q\.weight`.*`blocks\.\*\.attention\.q\.weight`",
    ):
        parameter_options(names, OptimizerConfig(groups=[ParameterGroup(pattern="blocks.*.atention.q.weight")]))
    with pytest.raises(UserError, match=r"optimizer\.no_decay: `\*\.gain` matches no parameter"):
        parameter_options(names, OptimizerConfig(no_decay=["*.bias", "*.gain"]))


def test_tensors_with_gaps_are_refused() -> None:
    """torch's fused kernel would write into the gaps."""
    view = torch.zeros(4, 6)[:, :3].requires_grad_()
    with pytest.raises(ValueError, match=r"w: an optimiser updates contiguous tensors, this one has strides \(6, 1\)"):
        build_optimizer([("w", view)], OptimizerConfig())
