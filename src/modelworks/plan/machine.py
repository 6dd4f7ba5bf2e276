"""A device with its links, and the widths of numbers on it, as columns; made from the catalogue of devices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from modelworks.config import UserError
from modelworks.hardware import AttentionKernel, Device, Dtype
from modelworks.plan.columns import Column, Columns
from modelworks.plan.measured import Measured


@dataclass(frozen=True)
class Machine(Columns):
    """One device and its links. Rates in FLOP/s and bytes/s, one direction; latencies in seconds.

    product_rate: of the best matrix product in the dtype that the linear layers compute in; wide_product_rate: in the
    dtype of attention and head. units: that share out the tiles of a product (0: unknown, no waves). node: devices that
    the fast link joins. network_bandwidth: per device, among `leaf` neighbouring devices; `oversubscription` times less
    beyond them. host_bandwidth: between a device and its host's memory. host_memory_bandwidth: what a host's own
    update of offloaded state reaches, for all its devices together: half of two sockets' 409 GB/s (eight channels of
    DDR4-3200 each). file_bandwidth: the same of its NVMe drives, four at 6 GB/s. Both are assumptions; neither the half
    nor the four were measured.
    measured: the rates of a machine that was calibrated, which then stand in for all of these but memory and peak.
    """

    memory: Column
    bandwidth: Column
    product_rate: Column
    wide_product_rate: Column
    peak: Column
    units: Column
    node: Column
    link_bandwidth: Column
    link_latency: Column
    network_bandwidth: Column
    network_latency: Column
    host_bandwidth: Column = 25e9
    host_memory_bandwidth: Column = 200e9
    file_bandwidth: Column = 24e9
    leaf: Column = np.inf
    oversubscription: Column = 1.0
    attention_forward: Column = 0.5
    attention_backward: Column = 0.45
    sustained: Column = 1.0
    measured: Measured | None = None

    @classmethod
    def of(cls, device: Device, precision: str, *, attention: AttentionKernel = "flash", ranks: int = 1) -> Machine:
        """From the catalogue. attention: which kernel's measured rates to take, `flash` or `fused`. ranks: of the run;
        they share a device that was measured as a machine.

        Figures that the catalogue lacks are filled in as `DEFAULTS` says.
        """
        shared = ranks if device.measured else 1
        wide: Dtype = "fp32" if precision == "fp32" else "fp16" if precision == "fp16" else "bf16"
        narrow: Dtype = "fp8" if precision == "fp8" else wide
        product, wide_product = (_product_rate(device, dtype) for dtype in (narrow, wide))
        link = device.link
        forward, backward = _attention_rates(device, attention)
        network = device.network_gbit_s or DEFAULTS["network_gbit_s"]
        return cls(
            memory=device.memory_gb * 1e9 / shared,
            bandwidth=(device.memory_bandwidth_tb_s or DEFAULTS["memory_bandwidth_tb_s"]) * 1e12,
            product_rate=product,
            wide_product_rate=wide_product,
            peak=(device.peak(narrow) or product) / shared,
            units=float(device.units or 0),
            node=float(link.devices or 256) if link else 1.0,
            link_bandwidth=(link.gb_s if link else network / 8) * 1e9,
            link_latency=(link.latency_us if link and link.latency_us else DEFAULTS["link_latency_us"]) * 1e-6,
            network_bandwidth=network * 1e9 / 8,
            network_latency=(device.network_latency_us or DEFAULTS["network_latency_us"]) * 1e-6,
            leaf=float(device.network_leaf_devices or np.inf),
            oversubscription=device.network_oversubscription or 1.0,
            attention_forward=forward / (wide_product * 1e-12),
            attention_backward=backward / (wide_product * 1e-12),
            sustained=device.sustained or 1.0,
            measured=Measured.of(device, precision, ranks) if device.measured else None,
        )


@dataclass(frozen=True)
class Numerics(Columns):
    """Bytes of an element, by what it is.

    compute: activations and the operands of products. linear: operands of the linear layers' products, 1 in fp8.
    stream: the residual stream and what is saved of norms, 4 under autocast.
    parameter, gradient: as stored; gathered: as ZeRO-3 gathers them; reduced: as gradients travel. state: of the
    optimiser, master weights included.
    """

    compute: Column
    linear: Column
    stream: Column
    parameter: Column
    gradient: Column
    gathered: Column
    reduced: Column
    state: Column

    @classmethod
    def of(cls, precision: str) -> Numerics:
        """What `train.precision` means, and fp8 besides. Raises UserError for another."""
        if precision not in NUMERICS:
            raise UserError(f"precision: got {precision!r}, expected one of {', '.join(NUMERICS)}")
        return cls(*NUMERICS[precision])


# In the order of the fields. The first four are what our trainer does (fp16 is autocast with loss scaling); fp8 is
# bf16 whose linear layers multiply narrow operands.
NUMERICS = {
    "fp32": (4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 8.0),
    "bf16": (2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 4.0, 12.0),
    "bf16-autocast": (2.0, 2.0, 4.0, 4.0, 4.0, 4.0, 4.0, 8.0),
    "fp16": (2.0, 2.0, 4.0, 4.0, 4.0, 4.0, 4.0, 8.0),
    "fp8": (2.0, 1.0, 2.0, 2.0, 2.0, 2.0, 4.0, 12.0),
}

DEFAULTS = {
    "product_share": 0.82,  # best product measured over the datasheet's peak: the median of those that are published
    "memory_bandwidth_tb_s": 1.0,
    "network_gbit_s": 100.0,
    "link_latency_us": 5.0,  # of a step of a collective over NVLink, software included
    "network_latency_us": 10.0,
    "attention_share": 0.5,  # a flash kernel's rate over the best product's
}


def _product_rate(device: Device, dtype: Dtype) -> float:
    measured = {"bf16": device.measured_bf16_tflops, "fp16": device.measured_bf16_tflops}
    measured["fp8"] = device.measured_fp8_tflops
    if found := measured.get(dtype):
        return found * 1e12
    # bf16 and fp16 run at the same rate wherever both run, and in float32 elsewhere; nothing else stands in for another
    half: tuple[Dtype, ...] = ("bf16", "fp16", "fp32") if dtype in ("bf16", "fp16") else ()
    peak = next((found for name in (dtype, *half) if (found := device.peak(name))), None)
    if peak is None:
        known = ", ".join(device.dense_tflops)
        raise UserError(f"the catalogue has no rate of {dtype} for {device.name}, only of {known}")
    return peak * DEFAULTS["product_share"]


def _attention_rates(device: Device, kernel: AttentionKernel) -> tuple[float, float]:
    """TFLOP/s of the forward and the backward kernel, causal FLOPs over time."""
    rates = device.attention_tflops
    found = rates.get(kernel) or rates.get("flash")
    if found:
        return found[0], found[1]
    best = _product_rate(device, "bf16" if device.peak("bf16") else "fp16" if device.peak("fp16") else "fp32") * 1e-12
    return best * DEFAULTS["attention_share"], best * DEFAULTS["attention_share"] * 0.85
