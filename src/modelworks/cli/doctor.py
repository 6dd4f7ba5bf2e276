"""`modelworks doctor`: what this machine has, what was measured on it, and what will therefore be chosen."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from modelworks.cli.output import JsonFlag, Output
from modelworks.config import format_bytes
from modelworks.hardware import (
    Machine,
    MachineFacts,
    choose_device,
    choose_precision,
    choose_threads,
    compiler,
    facts,
    measure_machine,
    peak_flops,
)

LOW_DISK = 5 * 10**9
LOW_MEMORY = 2 * 1024**3
Rows = list[tuple[str, str, str]]  # name, value, remark


def command(
    measure: Annotated[bool, typer.Option("--measure", help="Measure again, even if results are kept.")] = False,
    json: JsonFlag = False,
) -> None:
    """Say what this machine has, how fast it is, and what will therefore be chosen for training.

    Rates are measured once (about 3 seconds) and kept in ~/.cache/modelworks.

    Example:
    modelworks doctor
    modelworks doctor --measure --json
    """
    import torch

    output = Output(json=json)
    found = facts(accelerator=True)
    device = choose_device(found).value
    torch.set_num_threads(int(choose_threads(found).value))  # as training does: the rates are of these threads
    with output.console.status("measuring …") as status:
        machine = measure_machine(
            device=device, refresh=measure, progress=lambda what: status.update(f"measuring {what} …")
        )
    chosen = _chosen(machine)
    warnings = list(_warnings(machine))
    _show(output, "This machine", _machine_rows(found))
    _show(output, "Measured", _measured_rows(machine))
    _show(output, "What will be chosen", [(name, row["value"], row["reason"]) for name, row in chosen.items()])
    for warning in warnings:
        output.console.print(f"[yellow]warning:[/yellow] {warning}")
    output.result({"machine": asdict(machine), "chosen": chosen, "warnings": warnings})


def _machine_rows(found: MachineFacts) -> Rows:
    gpu = found.accelerator
    disk = shutil.disk_usage(Path.cwd())
    cores = f"{found.cores}" if found.cores == found.physical_cores else f"{found.cores} of {found.physical_cores}"
    return [
        ("CPU", found.cpu, ", ".join(found.features) or "no vector instructions that matter here"),
        ("cores", cores, found.cores_reason),
        ("memory", format_bytes(found.memory), found.memory_reason),
        ("accelerator", f"{gpu.count} × {gpu.name}" if gpu else "none", format_bytes(gpu.memory) if gpu else ""),
        ("disk", f"{format_bytes(disk.free)} free", f"of {format_bytes(disk.total)}, at {Path.cwd()}"),
        ("system", found.system, f"Python {found.python}"),
    ]


def _measured_rows(machine: Machine) -> Rows:
    fp32 = machine.gemm["fp32"]
    rows: Rows = []
    for name, rate in machine.gemm.items():
        ratio = "" if name == "fp32" else f"{rate / fp32:.2g}× fp32"
        rows.append((f"{name} matrix products", f"{rate / 1e9:,.0f} GFLOP/s", ratio))
    rows.append(("memory bandwidth", f"{machine.memory_bandwidth / 1e9:,.0f} GB/s", "bytes read and bytes written"))
    rows.append(("with", f"torch {machine.torch}, {machine.threads} threads", f"at {machine.measured_at}"))
    return rows


def _chosen(machine: Machine) -> dict[str, dict[str, str]]:
    device = choose_device(machine.facts)
    precision = choose_precision(machine)
    threads = choose_threads(machine.facts)
    path, compile_reason = compiler()
    peak = peak_flops(machine, "fp32" if precision.value == "fp32" else "fp16" if precision.value == "fp16" else "bf16")
    return {
        "device": {"value": device.value, "reason": device.reason},
        "precision": {"value": precision.value, "reason": precision.reason},
        "threads": {"value": threads.value, "reason": threads.reason},
        "data workers": {"value": threads.value, "reason": "data.workers: 0 means one process a core"},
        "torch.compile": {"value": "available" if path else "not available", "reason": compile_reason},
        "MFU is measured against": {"value": f"{peak.flops / 1e9:,.0f} GFLOP/s", "reason": peak.source},
    }


def _warnings(machine: Machine) -> list[str]:
    """Traps of this machine, each with what to do about it."""
    found = machine.facts
    warnings = []
    if machine.disturbed:
        warnings.append(
            f"other processes used {machine.disturbance:.0%} of this process's cores during the measurement, so the "
            "rates are too low and were not kept; run `modelworks doctor --measure` on an idle machine"
        )
    if machine.threads < found.cores:
        setting = os.environ.get("OMP_NUM_THREADS")
        why = f"OMP_NUM_THREADS={setting} is set" if setting else "torch's default"
        warnings.append(f"torch uses {machine.threads} of {found.cores} usable cores ({why})")
    if found.cores == 1:
        warnings.append("only one core is usable: training and data preparation take turns on it")
    if found.cores < found.physical_cores:
        warnings.append(
            f"this process may use {found.cores} of the machine's {found.physical_cores} cores ({found.cores_reason}); "
            "tools that count the machine's cores start too many threads here"
        )
    if found.memory < found.physical_memory:
        warnings.append(
            f"this process is killed above {format_bytes(found.memory)} ({found.memory_reason}), although the machine "
            f"has {format_bytes(found.physical_memory)}"
        )
    if found.memory < LOW_MEMORY:
        warnings.append(
            f"{format_bytes(found.memory)} of memory is little: choose a small model and a small micro-batch"
        )
    path, reason = compiler()
    if path is None and machine.device == "cpu":
        warnings.append(f"`train.compile: true` will fail: {reason}")
    free = shutil.disk_usage(Path.cwd()).free
    if free < LOW_DISK:
        warnings.append(f"only {format_bytes(free)} free at {Path.cwd()}: checkpoints may not fit")
    if found.accelerator is None and shutil.which("nvidia-smi"):
        warnings.append(
            "this machine seems to have an NVIDIA GPU, but the installed torch cannot use it (a CPU build?)"
        )
    return warnings


def _show(output: Output, title: str, rows: Rows) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_column(style="dim")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    output.console.print(table)
    output.console.print()
