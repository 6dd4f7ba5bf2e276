"""Devices as data, and this machine measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelworks.hardware.catalogue import (
    FORM,
    AttentionKernel,
    Catalogue,
    Device,
    Dtype,
    Link,
    MeasuredOn,
    Vendor,
    catalogue,
    match_cuda_name,
    user_directory,
)
from modelworks.hardware.choose import (
    Choice,
    Peak,
    choose_device,
    choose_precision,
    choose_threads,
    expected_precision,
    peak_flops,
)
from modelworks.hardware.machine import Accelerator, MachineFacts, compiler, facts
from modelworks.hardware.rates import OPERATIONS, Both, Costs, Rates, non_negative_fit
from modelworks.hardware.this_machine import (
    THIS_MACHINE,
    calibrated_device,
    calibration_file,
    device,
    this_machine,
    unused_calibration,
    write_device,
)
from modelworks.lazy_names import lazily

if TYPE_CHECKING:
    from modelworks.hardware.measure import Machine, fingerprint, gemm_rate, measure_machine

__all__ = [
    "FORM",
    "OPERATIONS",
    "THIS_MACHINE",
    "Accelerator",
    "AttentionKernel",
    "Both",
    "Catalogue",
    "Choice",
    "Costs",
    "Device",
    "Dtype",
    "Link",
    "Machine",
    "MachineFacts",
    "MeasuredOn",
    "Peak",
    "Rates",
    "Vendor",
    "calibrated_device",
    "calibration_file",
    "catalogue",
    "choose_device",
    "choose_precision",
    "choose_threads",
    "compiler",
    "device",
    "expected_precision",
    "facts",
    "fingerprint",
    "gemm_rate",
    "match_cuda_name",
    "measure_machine",
    "non_negative_fit",
    "peak_flops",
    "this_machine",
    "unused_calibration",
    "user_directory",
    "write_device",
]

# These import torch, which takes about a second: only when asked for.
_WITH_TORCH = {"Machine", "fingerprint", "gemm_rate", "measure_machine"}

__getattr__ = lazily(__name__, dict.fromkeys(_WITH_TORCH, "measure"))
