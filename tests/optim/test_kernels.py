"""Compiled kernels come to what torch's operations do, whatever the threads and stretches; and to the same codes."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from modelworks.config import OptimizerConfig
from modelworks.native import Unavailable, load
from modelworks.optim import adafactor, build_optimizer, compiled, eight_bit
from modelworks.optim.codec import code_tables, dequantize, nearest_codes, quantize

SHAPES = {"blocks.0.up.weight": (70, 90), "blocks.0.narrow.weight": (130, 40), "blocks.0.experts.weight": (3, 50, 64),
          "blocks.0.norm.weight": (90,), "blocks.0.long.weight": (5000,)}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "lion": {"name": "lion"},
    "lamb": {"name": "lamb", "weight_decay": 0.1},
    "clamped lamb": {"name": "lamb", "weight_decay": 0.0, "trust_clamp": (1.0, 20.0)},
    "lars": {"name": "lars", "weight_decay": 0.1, "trust_coefficient": 0.02},
    "adafactor": {"name": "adafactor", "weight_decay": 0.1},
    "adafactor with a moment": {"name": "adafactor", "first_moment": 0.9, "update_clip": 0.5},
    "lars without momentum": {"name": "lars", "momentum": 0.0},
}
EIGHT_BIT = ["adam8bit", "adamw8bit", "lion8bit"]


@pytest.fixture(autouse=True)
def compiled_kernels() -> None:
    """Without them torch's own operations run, and there is nothing to compare."""
    if compiled.kernels_for(torch.ones(2)) is None:
        pytest.skip("compiled kernels cannot be had here (no C++ compiler?)")


@pytest.fixture
def short_stretches() -> Iterator[None]:
    """Many of them in these small tensors."""
    with contextlib.ExitStack() as stack:
        for module in (compiled, eight_bit, adafactor):
            stack.enter_context(patch.object(module, "STRETCH", 1000))
        yield


def drawn(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).pow(3).to(dtype) for name, shape in SHAPES.items()}


def trained(settings: dict[str, Any], dtype: torch.dtype, steps: int = 5) -> dict[str, Tensor]:
    """Parameters and state."""
    parameters = {name: tensor.requires_grad_() for name, tensor in drawn(0, dtype).items()}
    optimizer = build_optimizer(parameters.items(), OptimizerConfig(**settings))
    for step in range(steps):
        optimizer.step(drawn(step + 1, dtype), 0.01)
    return {name: tensor.detach() for name, tensor in parameters.items()} | dict(optimizer.named_state())


def without_kernels() -> Any:
    return patch.object(compiled, "_kernels", lambda dtype: None)


@pytest.mark.usefixtures("short_stretches")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_they_equal_torchs_operations(case: str, dtype: torch.dtype) -> None:
    found = trained(CASES[case], dtype)
    with without_kernels():
        expected = trained(CASES[case], dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 3e-5
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("short_stretches")
@pytest.mark.parametrize("name", ["lamb", "adafactor", *EIGHT_BIT])
def test_threads_change_no_bit(name: str) -> None:
    alone = trained({"name": name}, torch.float32, steps=2)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        together = trained({"name": name}, torch.float32, steps=2)
    finally:
        torch.set_num_threads(before)
    for full, tensor in alone.items():
        assert torch.equal(together[full], tensor), full


def test_a_forked_process_has_threads_of_its_own() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        done: list[int] = []
        jobs = [partial(done.append, number) for number in range(4)]
        compiled.run(jobs)
        child = os.fork()
        if child == 0:
            compiled.run(jobs)
            os._exit(len(done))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 8
    finally:
        torch.set_num_threads(before)


def test_what_a_kernel_raises_on_another_thread_is_raised() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ZeroDivisionError):
            compiled.run([partial(divmod, 1, 0)] * 2)  # type: ignore[list-item]
    finally:
        torch.set_num_threads(before)


def written_out(name: str, p: Tensor, m: Tensor, v: Tensor, g: Tensor, t: int) -> tuple[Tensor, Tensor, Tensor]:
    """One operation after the other, each rounded: what a compiled loop does that contracts nothing."""
    scalar = lambda number: torch.tensor(number, dtype=p.dtype)  # noqa: E731
    lr = 0.01
    if name == "lion8bit":
        apart = g - m
        keep = scalar(1 - lr * 0.3)
        return p * keep - (m + apart * scalar(1 - 0.9)).sign() * scalar(lr), m + apart * scalar(1 - 0.99), v
    b1, b2, decay = (0.9, 0.95, 0.1) if name == "adamw8bit" else (0.9, 0.999, 0.0)
    m = m + (g - m) * scalar(1 - b1)
    v = v * scalar(b2) + (scalar(1 - b2) * g) * g
    scales = scalar(1 / (1 - b1**t)), scalar((1 - b2**t) ** -0.5)
    root = torch.from_numpy(np.sqrt(v.numpy()))  # torch's own is not rounded to the nearest
    direction = m * scales[0] / (root * scales[1] + scalar(1e-8))
    return p * scalar(1 - lr * decay) - scalar(lr) * direction, m, v


@pytest.mark.usefixtures("short_stretches")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", EIGHT_BIT)
def test_codes_are_those_of_the_codec_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    parameters = {full: tensor.requires_grad_() for full, tensor in drawn(0, dtype).items()}
    optimizer = build_optimizer(parameters.items(), OptimizerConfig(name=name, weight_decay=0.3 if "lion" in name
                                                                    else 0.1 if "w" in name else 0.0))  # fmt: skip
    signed = {"exp_avg": True, "exp_avg_sq": False}
    for step in range(1, 4):
        state = {full: tensor.clone() for full, tensor in optimizer.named_state()}
        gradients, before = drawn(step, dtype), {n: p.detach().clone() for n, p in parameters.items()}
        optimizer.step(gradients, 0.01)
        after = dict(optimizer.named_state())
        for full, parameter in parameters.items():
            if f"{full}/exp_avg_codes" not in state:
                continue
            moments = [
                dequantize(*(state[f"{full}/{kind}_{part}"] for part in ("codes", "scales")), signed=signed[kind]).to(
                    dtype
                )
                if f"{full}/{kind}_codes" in state
                else torch.zeros(())
                for kind in signed
            ]
            value, *moments = written_out(name, before[full], *moments, gradients[full], step)
            assert torch.equal(parameter, value)
            for (kind, is_signed), moment in zip(signed.items(), moments, strict=True):
                if f"{full}/{kind}_codes" in state:
                    codes, scales = quantize(moment.float(), signed=is_signed)
                    assert torch.equal(after[f"{full}/{kind}_scales"], scales), kind
                    assert torch.equal(after[f"{full}/{kind}_codes"], codes), kind


def codes_of_kernel(values: Tensor, signed: bool) -> Tensor:
    """Of values up to 1, each tile's largest: as a moment that is replaced by the gradient (unsigned: its square)."""
    n = -(-len(values) // 255)
    gradient = torch.ones(n, 256)
    gradient[:, :255] = torch.nn.functional.pad(values, (0, n * 255 - len(values))).view(n, 255)
    name, kind = ("lion8bit", "exp_avg") if signed else ("adam8bit", "exp_avg_sq")
    parameter = torch.zeros_like(gradient).requires_grad_()
    optimizer = build_optimizer([("blocks.0.w.weight", parameter)], OptimizerConfig(name=name, betas=(0.9, 0.0)))
    optimizer.step({"blocks.0.w.weight": gradient}, 0.0)
    codes = dict(optimizer.named_state())[f"blocks.0.w.weight/{kind}_codes"]
    return codes[:, :255].flatten()[: len(values)]


@pytest.fixture(params=["for this processor", "portable"])
def built(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kernels in 8 bits with, and without, what this processor has for permuting bytes."""
    if request.param == "for this processor":
        yield
        return
    sources = [path for path in compiled._SOURCES if path.suffix == ".h" or path.stem == "eight_bit"]
    library = load("optim-portable", sources, flags=[*compiled._FLAGS, "-DMODELWORKS_PORTABLE"])
    with patch.object(compiled, "_kernels", lambda dtype: compiled.Kernels(library, dtype)):
        yield


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("signed", [True, False])
def test_every_kind_of_value_gets_the_nearest_code(signed: bool) -> None:
    limits = code_tables(signed, torch.device("cpu")).limits[:-1]
    upper = (torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16)[:, None]
    every = (upper | torch.tensor([0, 1, 0x7FFF, 0xFFFF], dtype=torch.int32)).view(torch.float32).flatten()
    if not signed:
        limits = limits.double().sqrt().float()
    near = [torch.nextafter(limits, torch.full_like(limits, far)) for far in (-2.0, 2.0)]
    values = torch.cat([every[every.abs() <= 1], limits, *near, torch.tensor([0.0, -0.0])])
    expected = nearest_codes(values if signed else values.square(), signed)
    assert torch.equal(codes_of_kernel(values, signed), expected)


def test_infinite_and_undefined_moments_are_kept_as_the_codec_keeps_them() -> None:
    settings = {"name": "adamw8bit"}
    for bad in (float("inf"), float("nan")):
        runs = []
        for how in (without_kernels, lambda: patch.object(eight_bit, "SMALL", 4096)):
            parameter = torch.ones(64, 64).requires_grad_()
            optimizer = build_optimizer([("blocks.0.w.weight", parameter)], OptimizerConfig(**settings))
            gradient = torch.ones(64, 64)
            gradient[0, 0] = bad
            with how():
                optimizer.step({"blocks.0.w.weight": gradient}, 0.01)
            runs.append(dict(optimizer.named_state()))
        for kind, tensor in runs[0].items():
            torch.testing.assert_close(runs[1][kind], tensor, equal_nan=True, rtol=1e-6, atol=0)


def test_without_a_compiler_a_line_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    def cannot(*_: object, **__: object) -> None:
        raise Unavailable("no C++ compiler was found")

    def forget() -> None:
        compiled._kernels.cache_clear()
        compiled._library.cache_clear()

    forget()
    try:
        with patch.object(compiled, "load", cannot), caplog.at_level(logging.WARNING):
            for dtype in (torch.float32, torch.float64, torch.float32):
                assert compiled.kernels_for(torch.ones(2, dtype=dtype)) is None
    finally:
        forget()
    [line] = caplog.messages
    assert line == "optimisers run without compiled kernels, several times as slow: no C++ compiler was found"
    assert compiled.kernels_for(torch.ones(2)) is not None
    assert compiled.kernels_for(torch.ones(2, dtype=torch.bfloat16)) is None
