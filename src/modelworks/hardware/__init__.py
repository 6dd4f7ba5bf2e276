"""Devices as data, and this machine measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelworks.hardware.catalogue import (
    AttentionKernel,
    Catalogue,
    Device,
    Dtype,
    Link,
    catalogue,
    device,
    match_cuda_name,
)
from modelworks.hardware.choose import (
    Choice,
    Peak,
    choose_device,
    choose_precision,
    choose_threads,
    peak_flops,
)
from modelworks.hardware.machine import Accelerator, MachineFacts, compiler, facts
from modelworks.lazy_names import lazily

if TYPE_CHECKING:
    from modelworks.hardware.measure import Machine, fingerprint, gemm_rate, measure_machine

__all__ = [
    "Accelerator",
    "AttentionKernel",
    "Catalogue",
    "Choice",
    "Device",
    "Dtype",
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

__getattr__ = lazily(__name__, dict.fromkeys(_WITH_TORCH, "measure"))
