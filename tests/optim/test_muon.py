"""Newton-Schulz and Muon: singular values, torch.optim.Muon, and the published formula written out."""

import math

import pytest
import torch
from torch import Tensor

from modelworks.config import OptimizerConfig
from modelworks.layout import ShardSpec
from modelworks.optim.adam import Adam
from modelworks.optim.muon import Muon
from modelworks.optim.optimizer import Optimizer
from modelworks.optim.orthogonal import COEFFICIENTS, UpdateScale, is_matrix, newton_schulz, update_scale, whole_here

REST = Adam((0.9, 0.95), 1e-8, decoupled=True)
SHAPES = {"blocks.0.up.weight": (24, 10), "blocks.0.down.weight": (10, 24), "blocks.0.square.weight": (12, 12)}


def draw(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shape", [(30, 12), (12, 30), (16, 16)])
def test_singular_values_follow_the_published_polynomial(shape: tuple[int, int]) -> None:
    matrix = draw(shape, 0)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    expected = values / values.norm()
    for _ in range(5):
        expected = sum(c * expected ** (2 * k + 1) for k, c in enumerate(COEFFICIENTS))
    torch.testing.assert_close(newton_schulz(matrix), left @ torch.diag(expected) @ right, rtol=0, atol=1e-12)
    assert float(expected.min()) > 0.6
    assert float(expected.max()) < 1.25


def test_narrow_dtypes_are_near_and_stacks_are_matrix_by_matrix() -> None:
    stack = draw((3, 16, 8), 1)
    exact = newton_schulz(stack)
    torch.testing.assert_close(exact[1], newton_schulz(stack[1]), rtol=0, atol=1e-13)
    torch.testing.assert_close(newton_schulz(stack.float()).double(), exact, rtol=0, atol=1e-5)
    torch.testing.assert_close(newton_schulz(stack, dtype=torch.bfloat16), exact, rtol=0, atol=0.05)


def test_extreme_matrices_stay_finite() -> None:
    matrix = draw((6, 9), 2, torch.float32)
    for factor in (1e-30, 1e30):
        torch.testing.assert_close(newton_schulz(matrix * factor), newton_schulz(matrix), rtol=0, atol=1e-5)
    assert torch.equal(newton_schulz(torch.zeros(6, 9)), torch.zeros(6, 9))


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_as_torch(scale: UpdateScale, nesterov: bool) -> None:
    ours = {name: draw(shape, 3, torch.float32).requires_grad_() for name, shape in SHAPES.items()}
    theirs = {name: tensor.detach().clone().requires_grad_() for name, tensor in ours.items()}
    reference = torch.optim.Muon(
        theirs.values(), lr=0.02, weight_decay=0.1, momentum=0.9, nesterov=nesterov, adjust_lr_fn=scale
    )
    rule = Muon(0.9, nesterov, 5, scale, REST, torch.bfloat16)
    optimizer = Optimizer(ours.items(), OptimizerConfig(weight_decay=0.1), rule)
    for step in range(20):
        gradients = {name: draw(shape, 10 + step, torch.float32) for name, shape in SHAPES.items()}
        optimizer.step(gradients, 0.02)
        for name, tensor in theirs.items():
            tensor.grad = gradients[name]
        reference.step()
    for name, tensor in ours.items():  # both round in bf16, at other places: ours scales by the largest value first
        moved = 20 * 0.02 * update_scale(SHAPES[name], scale)
        assert float((tensor - theirs[name]).detach().abs().max()) < 0.01 * moved


def test_as_the_formula_and_adamw_for_the_rest() -> None:
    shapes = {**SHAPES, "embedding.weight": (20, 6), "head.weight": (20, 6), "blocks.0.norm.weight": (6,)}
    assert [name for name, shape in shapes.items() if is_matrix(name, shape)] == list(SHAPES)
    ours = {name: draw(shape, 4).requires_grad_() for name, shape in shapes.items()}
    expected = {name: tensor.detach().clone() for name, tensor in ours.items()}
    rest = [torch.nn.Parameter(expected[name]) for name in shapes if name not in SHAPES]
    adamw = torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    optimizer = Optimizer(
        ours.items(), OptimizerConfig(weight_decay=0.1, no_decay=[]), Muon(0.9, True, 5, "match_rms_adamw", REST)
    )
    buffers = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step in range(50):
        gradients = {name: draw(shape, 100 + step) for name, shape in shapes.items()}
        optimizer.step(gradients, 0.01)
        for name, (rows, columns) in SHAPES.items():
            buffers[name] = 0.9 * buffers[name] + 0.1 * gradients[name]
            left, values, right = torch.linalg.svd(0.9 * buffers[name] + 0.1 * gradients[name], full_matrices=False)
            values = values / values.norm()
            for _ in range(5):
                values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
            orthogonal = left @ torch.diag(values) @ right
            expected[name] = expected[name] * (1 - 0.01 * 0.1) - 0.01 * 0.2 * math.sqrt(max(rows, columns)) * orthogonal
        for tensor, name in zip(rest, [name for name in shapes if name not in SHAPES], strict=True):
            tensor.grad = gradients[name]
        adamw.step()
    found_rest = dict(zip([name for name in shapes if name not in SHAPES], rest, strict=True))
    for name, tensor in ours.items():
        found = expected[name] if name in SHAPES else found_rest[name]
        torch.testing.assert_close(tensor.detach(), found.detach(), rtol=0, atol=1e-10)


def test_a_slice_without_the_other_ranks_is_refused() -> None:
    spec = ShardSpec.whole("blocks.0.up.weight", (24, 10)).cut(0, 2, 0)
    with pytest.raises(ValueError, match=r"blocks\.0\.up\.weight: only .* a whole matrix is needed"):
        whole_here({"blocks.0.up.weight": torch.zeros(12, 10)}, {"blocks.0.up.weight": spec}, lambda matrix: matrix)
