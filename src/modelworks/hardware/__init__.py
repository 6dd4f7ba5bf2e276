"""Devices as data, and this machine measured."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from modelworks.hardware.catalogue import Catalogue, Device, Link, catalogue, device, match_cuda_name
from modelworks.hardware.choose import (
    Choice,
    Peak,
    choose_device,
    choose_precision,
    choose_threads,
    peak_flops,
)
from modelworks.hardware.machine import Accelerator, MachineFacts, compiler, facts

if TYPE_CHECKING:
    from modelworks.hardware.measure import Machine, fingerprint, gemm_rate, measure_machine

__all__ = [
    "Accelerator",
    "Catalogue",
    "Choice",
    "Device",
    "Link",
    "Machine",
    "MachineFacts",
    "Peak",
    "catalogue",
    "choose_device",
    "choose_precision",
    "choose_threads",
    "compiler",
    "device",
    "facts",
    "fingerprint",
    "gemm_rate",
    "match_cuda_name",
    "measure_machine",
    "peak_flops",
]

# These import torch, which takes about a second: only when asked for.
_WITH_TORCH = {"Machine", "fingerprint", "gemm_rate", "measure_machine"}


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(import_module("modelworks.hardware.measure"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
