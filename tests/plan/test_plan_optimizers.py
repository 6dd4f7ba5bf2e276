"""Bytes of optimiser state against what torch's own optimisers allocate, and against sums written out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from modelworks.config import UserError, count_parameters, parameter_shapes
from modelworks.config.named_models import preset
from modelworks.plan.optimizer_bytes import OPTIMIZERS, check_optimizer_name, optimizer_bytes, state_bytes

TORCH: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda tensors: torch.optim.SGD(tensors, lr=0.1),
    "momentum": lambda tensors: torch.optim.SGD(tensors, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda tensors: torch.optim.Adam(tensors),
    "adamw": lambda tensors: torch.optim.AdamW(tensors),
    "adafactor": lambda tensors: torch.optim.Adafactor(tensors),
    "muon": lambda tensors: torch.optim.Muon(tensors),
}
SHAPES = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)


@settings(deadline=None)  # the first use of torch.optim imports for a second
@given(shape=SHAPES, name=st.sampled_from(sorted(TORCH)))
def test_as_many_bytes_as_torchs_optimiser_allocates(shape: tuple[int, ...], name: str) -> None:
    if name == "muon" and len(shape) != 2:  # torch's takes matrices only; what is no matrix is AdamW's
        assert optimizer_bytes(name, shape[:1]) == optimizer_bytes("adamw", shape[:1])
        return
    tensor = torch.ones(shape, requires_grad=True)
    tensor.grad = torch.ones_like(tensor)
    optimizer = TORCH[name]([tensor])
    optimizer.step()
    state = [value for value in optimizer.state[tensor].values() if isinstance(value, Tensor)]
    counters = sum(value.nbytes for value in state if value.dim() == 0)
    assert optimizer_bytes(name, shape) == sum(value.nbytes for value in state) - counters


@given(shape=SHAPES, parts=st.integers(1, 8))
def test_the_parts_of_a_tensor_keep_what_the_whole_keeps(shape: tuple[int, ...], parts: int) -> None:
    """8-bit blocks and factored columns are whole on each rank that has some of them: these only grow by that."""
    held = [(len(range(index, shape[0], parts)), *shape[1:]) for index in range(parts)]
    for name in OPTIMIZERS:
        whole = optimizer_bytes(name, shape)
        split = sum(optimizer_bytes(name, shape, held=part) for part in held)
        copies = 4 * shape[-1] if name.startswith("adafactor") and len(shape) == 2 else 2 * 4 if "8bit" in name else 0
        assert whole <= split <= whole + (parts - 1) * copies


def test_small_tensors_and_embeddings_stay_wide() -> None:
    assert optimizer_bytes("adamw8bit", (4095,)) == 8 * 4095
    assert optimizer_bytes("adamw8bit", (4096,)) == 2 * (4096 + 4 * 16)
    assert optimizer_bytes("adamw8bit", (64, 64), parameter="embedding.weight") == 8 * 4096
    assert optimizer_bytes("lion8bit", (64, 65), parameter="head.weight") == 4160 + 4 * 17
    # asked of the whole tensor: a rank's 1,000 elements of a large one are 8-bit too
    assert optimizer_bytes("adam8bit", (100, 512), held=(10, 512)) == 2 * (5120 + 4 * 20)


@pytest.mark.parametrize(
    ("shape", "adam", "lion"),
    [
        ((4095,), 32_760, 16_380),
        ((4096,), 8_320, 4_160),
        ((64, 65), 8_456, 4_228),
    ],
)
def test_as_many_bytes_as_bitsandbytes_allocates(shape: tuple[int, ...], adam: int, lion: int) -> None:
    """Read off bitsandbytes 0.50.2 (Adam8bit, AdamW8bit, Lion8bit after a step), without its tables of code values."""
    assert optimizer_bytes("adam8bit", shape) == optimizer_bytes("adamw8bit", shape) == adam
    assert optimizer_bytes("lion8bit", shape) == lion


@pytest.mark.parametrize(("shape", "adam", "lion"), [((100, 77), 15_648, 7_824), ((1000, 513), 1_042_032, 521_016)])
def test_blocks_of_odd_shapes_are_at_most_a_few_more_than_those_of_bitsandbytes(
    shape: tuple[int, ...], adam: int, lion: int
) -> None:
    """Its blocks run on over the ends of rows; ours are rectangles, and at the edges not all of them are full."""
    assert adam < optimizer_bytes("adam8bit", shape) < 1.003 * adam
    assert lion < optimizer_bytes("lion8bit", shape) < 1.003 * lion


def test_experts_are_matrices_of_their_own() -> None:
    assert optimizer_bytes("adafactor", (8, 30, 20)) == 8 * optimizer_bytes("adafactor", (30, 20)) == 8 * 4 * 50
    assert optimizer_bytes("muon", (8, 30, 20)) == 4 * 8 * 600


def test_bytes_of_a_parameter_as_published() -> None:
    """The figures that papers and users quote: 8 for Adam, 4 for Lion, about 2 for 8-bit Adam, none for Adafactor."""
    layers = {name: state_bytes(name, preset("llama-3-8b")).layers for name in OPTIMIZERS}
    assert {name: round(value, 1) for name, value in layers.items()} == {
        "sgd": 0, "momentum": 4, "adam": 8, "adamw": 8, "lamb": 8, "lars": 4, "adafactor": 0,
        "adafactor-moment": 4, "lion": 4,
        "adam8bit": 2, "adamw8bit": 2, "lion8bit": 1, "muon": 4,
    }  # fmt: skip


@pytest.mark.parametrize("model", ["gpt2-small", "llama-tiny", "qwen3-30b-a3b"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_means_times_elements_are_the_sum_over_parameters(model: str, name: str) -> None:
    config = preset(model)
    expected = sum(
        optimizer_bytes(name, shape, parameter=parameter) for parameter, shape in parameter_shapes(config).items()
    )
    assert state_bytes(name, config).mean * count_parameters(config).total == pytest.approx(expected, rel=1e-12)
    found = state_bytes(name, config)
    ends = {key: shape for key, shape in parameter_shapes(config).items() if not key.startswith("blocks.")}
    held = sum(optimizer_bytes(name, shape, parameter=parameter) for parameter, shape in ends.items())
    assert found.ends * sum(map(math.prod, ends.values())) == pytest.approx(held)


def test_an_unknown_optimiser_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="no optimiser is called 'adamw_8bit'; did you mean adamw8bit"):
        check_optimizer_name("adamw_8bit")
    with pytest.raises(UserError, match="known: sgd, momentum"):
        state_bytes("zzz", preset("llama-tiny"))
