"""What is chosen from what the machine can do: precision, threads, the peak that utilisation is measured against.

Every choice comes with its reason, which is printed and recorded. No torch is imported here.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from modelworks.config import UserError
from modelworks.hardware.catalogue import Dtype, catalogue

if TYPE_CHECKING:
    from modelworks.hardware.catalogue import Device
    from modelworks.hardware.machine import MachineFacts
    from modelworks.hardware.measure import Machine

# Below this the casts and the bf16 memory traffic of a real step eat the gain of the matrix products.
WORTHWHILE = 1.3


class Peak(NamedTuple):
    """flops: FLOP/s. source: what the figure is and where it comes from, for people."""

    flops: float
    source: str


class Choice(NamedTuple):
    """A value that was chosen, and why."""

    value: str
    reason: str


def choose_device(machine_facts: MachineFacts) -> Choice:
    """`cuda` where there is a GPU, else `cpu`. The facts must have been read with `accelerator=True`."""
    if gpu := machine_facts.accelerator:
        return Choice("cuda", f"{gpu.count} × {gpu.name} found")
    return Choice("cpu", "no GPU that torch can use")


def choose_precision(machine: Machine, device: str | None = None) -> Choice:
    """The training precision that is fastest here without losing what training needs.

    bf16 has the exponent range of fp32 and needs no loss scaling, so it is taken wherever the hardware multiplies it
    fast; fp16 only on GPUs that have nothing better; never on CPU, where it is slower than fp32.
    """
    device = device or machine.device
    if device == "cpu":
        if machine.disturbed:
            return _precision_by_features(machine.facts)
        fp32, bf16 = machine.gemm["fp32"], machine.gemm["bf16"]
        measured = f"bf16 matrix products measured {bf16 / fp32:.1f}× fp32 here"
        if bf16 >= WORTHWHILE * fp32:
            return Choice("bf16-autocast", measured)
        return Choice("fp32", f"{measured}, less than {WORTHWHILE}× that makes it worthwhile")
    gpu = machine.facts.accelerator
    if gpu is None:
        raise UserError(f"device {device} was asked for, but torch finds no GPU here")
    capability = ".".join(map(str, gpu.capability))
    if gpu.capability >= (8, 0):
        return Choice("bf16-autocast", f"{gpu.name} multiplies bf16 in its tensor cores (capability {capability})")
    if gpu.capability >= (7, 0):
        return Choice("fp16", f"{gpu.name} has fp16 tensor cores but no bf16 (capability {capability})")
    return Choice("fp32", f"{gpu.name} has no tensor cores (capability {capability})")


def expected_precision(entry: Device) -> Choice:
    """What `choose_precision` would take on a device that is not here, by the catalogue's figures."""
    wide = entry.peak("fp32")
    narrow: tuple[tuple[Dtype, str], ...] = (("bf16", "bf16-autocast"), ("fp16", "fp16"))
    for dtype, precision in narrow:
        peak = entry.peak(dtype)
        if peak and (wide is None or peak >= WORTHWHILE * wide):
            return Choice(precision, f"{entry.name} multiplies {dtype} fast")
    return Choice("fp32", f"{entry.name} multiplies nothing narrower that much faster")


def _precision_by_features(machine_facts: MachineFacts) -> Choice:
    """What the instruction sets promise, where a busy machine spoiled the measurement."""
    found = [name for name in ("amx_bf16", "avx512_bf16", "bf16") if name in machine_facts.features]
    if found:
        return Choice("bf16-autocast", f"this CPU has {found[0]} (the machine was too busy to measure)")
    return Choice("fp32", "this CPU has no bf16 instructions (the machine was too busy to measure)")


def choose_threads(machine_facts: MachineFacts) -> Choice:
    """Threads for torch: one for each core that this process may use, or fewer where OMP_NUM_THREADS says so.

    Never more: threads that share a core wait for each other in busy loops, which costs a hundredfold.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # a list gives nested levels
    if wanted.isdigit() and 0 < int(wanted) < machine_facts.cores:
        return Choice(str(int(wanted)), f"OMP_NUM_THREADS={wanted} is set")
    return Choice(str(machine_facts.cores), f"one a usable core ({machine_facts.cores_reason})")


def peak_flops(where: Machine | str, dtype: Dtype) -> Peak:
    """The denominator of model FLOPs utilisation, in FLOP/s, and what it is.

    A device's name gives its dense datasheet peak (UserError if the catalogue has none). A machine gives its known
    GPU's dense datasheet peak, and otherwise (CPU, unknown GPU) its own measured rate of matrix products.
    """
    if isinstance(where, str):
        entry = catalogue().device(where)
        if (peak := entry.peak(dtype)) is None:
            known = ", ".join(entry.dense_tflops)
            raise UserError(f"the catalogue has no {dtype} peak for {entry.name}; it has {known}")
        return Peak(peak, f"dense {dtype} peak of {entry.name} ({catalogue().source(entry, f'dense_tflops.{dtype}')})")
    gpu = where.facts.accelerator if where.device != "cpu" else None
    known_gpu = catalogue().match_cuda_name(gpu.name) if gpu else None
    if known_gpu and known_gpu.peak(dtype):
        return peak_flops(known_gpu.name, dtype)
    if dtype not in where.gemm:
        raise UserError(f"no {dtype} rate was measured on this machine; measured: {', '.join(where.gemm)}")
    place = f"{gpu.name}, for which no datasheet peak is known" if gpu else f"this CPU, {where.threads} threads"
    if where.disturbed:
        place += ", while other processes disturbed it: too low"
    return Peak(where.gemm[dtype], f"best sustained {dtype} matrix product measured on {place}")
